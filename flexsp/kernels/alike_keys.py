"""What kernels in bfloat16 do about keys that are alike: how an inverse of a chunk is rounded, and how much it rounds.

docs/math.md, section 7, "Keys that are alike".
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["FEW_KEYS", "GOLDEN", "NEARER", "dithered", "size_of_inverse"]

FEW_KEYS = tl.constexpr(4.0)
"""Of squares of I + G below the diagonal, for each of n tokens: random keys of K channels have n / 2 K, one n / 2."""
NEARER = tl.constexpr(1.225)
"""Times the size of an inverse where keys are alike. The limit of `flexsp.kernels.delta.exact` is 1.02 there."""
GOLDEN = tl.constexpr(40503)
"""65536 / 1.618: its multiples, modulo 65536, are as evenly spread as can be, however many there are."""


@triton.jit
def dithered(x, i, j):
    """x of rows i and columns j, in fp32, on numbers of bfloat16: up or down by a threshold for each i + j.

    To the nearest number all of a chunk's equal entries are rounded the same way, and their errors add up: with one key
    and one step size, 64 times in a chunk. Here about as many go up as makes their mean right. Numbers of bfloat16 stay
    what they are. Equal entries lie in diagonals, along which i + j grows. Blocks of 16 have the same thresholds, so
    that a thread keeps few of them.
    """
    bits = x.to(tl.int32, bitcast=True) + ((((i & 15) + (j & 15)) * GOLDEN) & 0xFFFF)
    found = (bits & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(x == x, found, x)  # all bits of a NaN may be ones: more would make it a number


@triton.jit
def size_of_inverse(squares, alike, length):
    """The number by which `flexsp.kernels.delta.exact.choose` goes, from the sums of squares below the diagonal of a
    chunk's inverse, and of what is inverted, and from how many tokens it has.

    Keys are alike where the second is more than `FEW_KEYS` for each token; a short document's chunk has few. Terms that
    nearly cancel then make roundings larger, too. With steps up to 1 and decays near 1 the number stays below the limit
    beyond which segments are done token by token; with one key and a step of 1.03 or more it is above, in chunks of 16
    1.05.
    """
    return tl.where(alike > FEW_KEYS * length, NEARER * squares, squares)
