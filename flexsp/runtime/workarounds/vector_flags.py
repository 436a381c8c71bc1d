"""Removes flags on unused vector lanes from the LLVM text that Triton makes of a kernel.

Fault: the code generator of Triton 3.6. LLVM packs scalars that are computed alike into short vectors. A lane that
nobody reads may then get an operand of its neighbour: `shl nuw nsw <2 x i32> <tid, lane>, <28, 1>` shifts a thread
number that was never to be shifted. The flag "nuw" (no unsigned wrap) is false for that lane, which LLVM allows as long
as nobody reads the lane. But the code generator holds both lanes in one 64-bit register, trusts the flag and computes
the product in 64 bits. What overflows the first lane then changes the second one. One kernel of vector gates read wrong
columns in this way, with warps that disagreed: its result was wrong by half, and differed from call to call.

The flags only allow more optimisations. Without them every lane is what the operation says.

`tests/runtime/test_llvm_workaround.py` shows the fault; where a release does not show it any more, this file can go.
"""

from __future__ import annotations

import re

__all__ = ["drop_lane_flags"]

_FLAGGED = re.compile(
    r"= (add|sub|mul|shl|lshr|ashr|udiv|sdiv|or|trunc|zext|uitofp|icmp)"
    r"((?: (?:nuw|nsw|exact|disjoint|nneg|samesign))+) (?=(?:\w+ )?<\d+ x )"
)


def drop_lane_flags(text: str) -> str:
    """LLVM text without the flags of integer operations on vectors that make a result poison."""
    return _FLAGGED.sub(r"= \1 ", text)
