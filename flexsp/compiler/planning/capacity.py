"""Stage 4b: shared memory and registers of one program of a kernel, and the operations that it does.

Read off the nodes of the kernel's graph in the order in which they are emitted, for given tile sizes. Shared memory
has the tiles that products read (loads of a walk in a buffer for each stage of its pipeline) and the scratch of one
change of layout. Registers have the fp32 tiles that are alive at once. Both are estimates of what Triton 3.6 makes for
sm_90; `tests/compiler/test_plan.py` compares them with compiled kernels.
"""

# fx types the arguments of a node as a union of all there can be.
# mypy: disable-error-code="union-attr,index,arg-type"
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexsp.compiler.backend import intrinsic_kernels
from flexsp.compiler.backend.pieces import ADDED_UP
from flexsp.compiler.backend.walks import FLIPPED, HELD
from flexsp.compiler.graphs.intrinsics import SUMS
from flexsp.compiler.graphs.rewrite import dims, reverse_cumsum
from flexsp.devices import reads_shared

__all__ = ["Load", "intrinsic_load", "part_load", "smaller_chunk"]

aten = torch.ops.aten
_VIEWS = {
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.view.default, aten._unsafe_view.default, aten.expand.default,
}  # fmt: skip
_SLOW = {aten.exp.default, aten.exp2.default, aten.log.default, aten.sigmoid.default, aten.sin.default,
         aten.cos.default, aten.tanh.default}  # fmt: skip
_RUNNING = (aten.cumsum.default, reverse_cumsum)
_SCRATCH = 32 * 1024  # bytes at most in which Triton transposes a large tile, piece by piece
_ROWS = 128  # of a state, up to which Triton turns it in half of that
_TALL = {False: 28 * 1024, True: 32 * 1024}  # bytes for one of more rows; True: of several documents
_BARRIERS = 2 * 1024  # of tcgen05's products
_ENDS = 4352  # of walks over packed documents
_ROUNDS = 8 * 1024  # of what a round of a loop over pieces begins before the last one has ended


@dataclass(frozen=True)
class Load:
    """Resources and operations of one program of a kernel, in a chunk.

    `shared` is the most bytes that Triton was seen to give it, `least` what it certainly does (0: not known); `tiles`
    the fp32 numbers alive at once in registers, over all threads; `flops` those of products of padded tiles, `slow`
    those of them on tiles too small for warp-group instructions; `products` their number and that of scans, `loads`
    that of tiles read from memory; `numbers` those that elementwise work makes, exponentials and scans four times.
    """

    shared: int
    least: int
    tiles: int
    flops: int
    slow: int
    products: int
    loads: int
    numbers: int


def smaller_chunk(chunk: int, fits: int | None = None) -> str:
    """What to do where kernels for chunks of `chunk` tokens do not fit. `fits`: a chunk size that does, if known."""
    return f"use chunk_size <= {fits or chunk // 2}" if chunk > 16 else "use smaller K or V"


class _Tiles:
    """Sizes of tiles, for block sizes by name, and how long they are there: `loop` are the first and the last node of a
    loop over pieces, of which what comes from before or goes on lives through all rounds."""

    def __init__(self, blocks: Mapping[str, int], item: int, loop: tuple[int, int] = (0, -1)) -> None:
        self.blocks, self.item, self.loop = blocks, item, loop

    def span(self, made: int, first: int, last: int) -> tuple[int, int]:
        """From the node `first` to `last`, of what the node `made` makes."""
        a, b = self.loop
        if made < a <= last:
            return min(first, a), max(last, b)
        return (a if made <= b < last else first), last

    def numbers(self, node: Any) -> int:
        return math.prod(self.blocks[s] if s in self.blocks else int(s) for s in dims(node))

    def shape(self, node: Any) -> tuple[int, ...]:
        return tuple(self.blocks[s] if s in self.blocks else int(s) for s in dims(node))


def _loop(nodes: Sequence[Any], pieces: str) -> tuple[int, int]:
    """The first and the last node of the loop over `pieces`: those that have them, and those that sum over them."""
    every = [(node, *(node.all_input_nodes if node.target in ADDED_UP else ())) for node in nodes]
    inside = [i for i, of in enumerate(every) if any(pieces in dims(x) for x in of)]
    return (inside[0], inside[-1]) if inside else (0, -1)


def _source(node: Any) -> tuple[Any, bool]:
    """The operand of a product without its transposes, and whether the product reads it transposed."""
    turned = False
    while node.target in _VIEWS:
        turned ^= node.target is aten.t.default
        node = node.args[0]
    return node, turned


def _held(node: Any, walks: str) -> bool:
    """Whether it is what a walk holds in registers: "S", "dS" or a parameter. Chunkwise kernels ("") hold nothing."""
    held = node.name.split("__")[0] == walks or bool(node.meta.get("param"))
    return bool(walks) and node.op == "placeholder" and held


def _last_uses(nodes: Sequence[Any]) -> dict[Any, int]:
    """Index of the last node that reads each value. Readers of a view are readers of the viewed value."""
    last: dict[Any, int] = {}
    for i, node in enumerate(nodes):
        if node.op == "placeholder" or node.target in _VIEWS:
            continue
        for x in node.all_input_nodes:
            last[_source(x)[0]] = i
    return last


def _is_tile(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and len(dims(node)) == 2 and "1" not in dims(node)


def copied_over(nodes: Sequence[Any], walks: str) -> bool:
    """Whether a walk multiplies a tile into its next state that it also reads elementwise.

    Triton (3.6 and 3.7 were tried) lets such a product run into the next chunk, and does not keep the tile's buffer for
    it: copies that go ahead would write over what it still reads.
    """
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for x in node.all_input_nodes if node.target not in _VIEWS else ():
            users.setdefault(_source(x)[0], []).append(node)
    loads = [x for x in nodes if x.op == "placeholder" and _is_tile(x) and not _held(x, walks)]
    products = {node for node in nodes if node.target is aten.mm.default}
    return any(
        any(x in products and "C" not in dims(x) for x in users.get(load, ())) and not products.issuperset(users[load])
        for load in loads
    )  # fmt: skip


def part_load(
    kind: str, nodes: Sequence[Any], blocks: Mapping[str, int], item: int, stages: int, wide: frozenset[str],
    dense: bool, arch: int, pieces: str = "", packed: bool = False,
) -> Load:  # fmt: skip
    """Load of one part of a kernel.

    Args:
        kind: the kernel's name.
        nodes: in the order in which they are emitted.
        blocks: tile size by name of size, "C" among them.
        item: bytes of an operand of products.
        stages: of a walk's pipeline.
        wide: names of loads that are fp32 whatever the inputs are.
        dense: the transition is.
        arch: compute capability, 90 for Hopper.
        pieces: the size that chunkwise kernels take in pieces, if they do.
        packed: tokens are of several documents.
    """
    walks = HELD.get(kind, "")
    tiles = _Tiles(blocks, item, (0, -1) if walks else _loop(nodes, pieces))
    flipped = kind in FLIPPED and not dense
    if reads_shared(arch):
        shared, least = _of_groups(kind, nodes, tiles, walks, flipped, stages, wide, bool(pieces), packed and not dense)
        shared += _first_states(nodes, tiles, walks) if packed and flipped else 0
        shared += _BARRIERS if arch >= 100 else 0
    else:
        shared, least = _of_warps(nodes, tiles, walks, stages, wide), 0
    flops = slow = products = loads = numbers = 0
    for node in nodes:
        if node.target is aten.mm.default:
            (m, k), (_, n) = (tiles.shape(x) for x in node.args)
            flops += 2 * m * n * k
            slow += 2 * m * n * k if max(m, n if flipped else 0) < 64 else 0
            products += 1
        elif node.target in SUMS or (walks and node.target in _RUNNING):
            products += 1
            numbers += 4 * tiles.numbers(node)
        elif node.op == "placeholder":
            loads += _is_tile(node) and not _held(node, walks)
        elif _is_tile(node) and node.target not in _VIEWS:
            numbers += tiles.numbers(node) * (4 if node.target in _SLOW else 1)
    return Load(shared, least, _alive(nodes, tiles, walks, wide), flops, slow, products, loads, numbers)


def _of_groups(
    kind: str, nodes: Sequence[Any], tiles: _Tiles, walks: str, flipped: bool, stages: int, wide: frozenset[str],
    large: bool, packed: bool,
) -> tuple[int, int]:  # fmt: skip
    """Bytes at most and at least where products read their operands from shared memory, as from Hopper on. `large`:
    states are; `packed`: tokens are of several documents."""
    C, least = tiles.blocks["C"], 0
    shared = _operands(nodes, tiles, walks, flipped)
    if walks:
        state = _state(nodes, tiles, walks)
        shared = max(shared, _inside(kind, nodes, tiles, walks, flipped, large, packed))
        shared += _buffers(nodes, tiles, stages, wide, walks)
        shared = max(shared, 0 if kind == "chunk_states" or flipped else state)
    else:
        least = _operands(nodes, tiles, walks, flipped, ahead=0) if C >= 64 and tiles.item == 2 else 0
        shared = max(shared, _stored(nodes, tiles)) + (_ROUNDS if tiles.loop[1] >= 0 else 0)
    shared += _vectors(nodes, tiles, stages) + (_ENDS if walks else 0)
    if tiles.item == 4 and C >= 64:  # without warp-group products, transposes are laid out anew
        shared = shared * 8 // 5
    return shared, least


def _inside(
    kind: str, nodes: Sequence[Any], tiles: _Tiles, walks: str, flipped: bool, large: bool, packed: bool
) -> int:
    """Bytes in which a walk lays out its state anew, in each chunk or where a document begins."""
    state, tall = _state(nodes, tiles, walks), _rows(nodes, tiles, walks) > _ROWS
    if flipped:
        turned = not any(x.meta.get("param") for x in nodes)  # a matrix of a head comes in another layout
        half = _TALL[packed] if tall else _SCRATCH // 2
        return state if large else min(half if turned else _SCRATCH, state)
    # A decay that is summed here comes in another layout than the state it multiplies.
    anew = (packed and tall) or any(x.target is aten.sum.dim_IntList for x in nodes)
    if kind != "chunk_states" and anew:
        return state
    return 0 if kind == "output" else min(_SCRATCH, state)


def _of_warps(nodes: Sequence[Any], tiles: _Tiles, walks: str, stages: int, wide: frozenset[str]) -> int:
    """Bytes at most where products read their operands from registers, as before Hopper: shared memory has the buffers
    of a pipeline, one less than stages, and what of one product's operands is laid out anew."""
    loads = {x for x in nodes if x.op == "placeholder" and len(dims(x)) == 2 and not _held(x, walks)}
    piped = loads if walks and stages > 1 else set()
    buffers = (stages - 1) * sum(tiles.numbers(x) * (4 if x.name in wide else tiles.item) for x in piped)
    scratch = max(
        (sum(tiles.numbers(x) * tiles.item for x, _ in map(_source, node.args) if x not in piped)
         for node in nodes if node.target is aten.mm.default),
        default=0,
    )  # fmt: skip
    if walks:  # the state of a document that begins is laid out anew
        ends = _state(nodes, tiles, walks)
    else:
        many = sum(node.target is aten.mm.default for node in nodes) > 8 and tiles.blocks["C"] >= 64
        ends = _operands(nodes, tiles, walks, False, ahead=2 if many else 1)
        ends = max(_stored(nodes, tiles), ends * 17 // 16 if many else ends)  # tiles of many sizes leave gaps
        ends = ends * 3 // 2 if tiles.loop[1] >= 0 else ends  # and rounds of a loop meet
    return buffers + max(scratch, ends) + _vectors(nodes, tiles, stages)


def _state(nodes: Sequence[Any], tiles: _Tiles, walks: str) -> int:
    """Bytes in fp32 of the largest part of what a walk holds."""
    held = [x for x in nodes if _held(x, walks)] or [x for x in nodes if _is_tile(x)]  # all: it is not read
    return 4 * max(map(tiles.numbers, held), default=0)


def _rows(nodes: Sequence[Any], tiles: _Tiles, walks: str) -> int:
    """Rows of the tallest part of what a walk holds; 0 if it reads none."""
    return max((tiles.shape(x)[0] for x in nodes if _held(x, walks) and tiles.shape(x)), default=0)


def _first_states(nodes: Sequence[Any], tiles: _Tiles, walks: str) -> int:
    """Bytes of a document's first state, which comes in another layout than the one it replaces, while operands are
    there: up to 8 KiB were seen with 128 rows, 24 KiB with 256."""
    return 96 * _rows(nodes, tiles, walks)


def _stored(nodes: Sequence[Any], tiles: _Tiles) -> int:
    """Bytes of the largest fp32 tile that nothing reads after it: it is laid out anew to be stored."""
    read = {x for node in nodes for x in node.all_input_nodes if node in nodes}
    ends = [x for x in nodes if x not in read and _is_tile(x) and x.op != "placeholder"]
    return 4 * max((tiles.numbers(x) for x in ends if x.target is not aten.mm.default), default=0)


def _buffers(nodes: Sequence[Any], tiles: _Tiles, stages: int, wide: frozenset[str], walks: str) -> int:
    """Bytes of a walk's pipeline: a buffer a stage, one less for what goes through registers."""
    direct = {x for x in nodes if x.op == "placeholder"} & {
        x for node in nodes if node.target is aten.mm.default for x, _ in map(_source, node.args)
    }
    total = 0
    for x in nodes:
        if x.op == "placeholder" and len(dims(x)) == 2 and not _held(x, walks):
            count = 1 if stages == 1 and x in direct else 0 if stages == 1 else stages if x in direct else stages - 1
            total += count * tiles.numbers(x) * (4 if x.name in wide else tiles.item)
    return total


def _vectors(nodes: Sequence[Any], tiles: _Tiles, stages: int) -> int:
    """Bytes for the loads of one axis, for sums over warps, and for what Triton rounds up."""
    return 4096 + 4 * stages * sum(tiles.numbers(x) for x in nodes if x.op == "placeholder" and len(dims(x)) == 1)


def _operands(nodes: Sequence[Any], tiles: _Tiles, walks: str, flipped: bool, ahead: int = 1) -> int:
    """Most bytes of operands at a time that are put into shared memory for products.

    `ahead`: the number of products whose operands, chunkwise, are put there before one has read its own.
    """
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    products = [i for i, node in enumerate(nodes) if node.target is aten.mm.default]
    for i in products:
        node = nodes[i]
        for side, x in enumerate(node.args):
            source, turned = _source(x)
            loaded = source.op == "placeholder" and not _held(source, walks)
            if (walks and loaded) or (flipped and _held(source, walks)):
                continue
            computed = source.op != "placeholder" or _held(source, walks)
            if computed and side == 0 and not turned:
                continue  # from registers
            first.setdefault(source, i)
            last[source] = i
    if ahead and not walks:
        after = {at: products[min(i + ahead, len(products) - 1)] for i, at in enumerate(products)}
        last = {x: after[at] for x, at in last.items()}
    times, at = range(len(nodes)), {node: i for i, node in enumerate(nodes)}
    spans = {x: tiles.span(at[x], first[x], last[x]) for x in first}
    return max(
        (sum(tiles.numbers(x) * tiles.item for x, (a, b) in spans.items() if a <= i <= b) for i in times), default=0
    )


def _alive(nodes: Sequence[Any], tiles: _Tiles, walks: str, wide: frozenset[str]) -> int:
    """Most fp32 numbers at a time in registers; a bf16 number counts half. Masks are made anew where they are used."""
    last, at = _last_uses(nodes), {node: i for i, node in enumerate(nodes)}
    end = len(nodes)
    spans: list[tuple[int, int, float]] = []  # from after the node that makes it up to the one that reads it last
    for node in nodes:
        if not _is_tile(node) or node.target in _VIEWS or node.meta["val"].dtype == torch.bool:
            continue
        state = _held(node, walks)
        if walks and node.op == "placeholder" and not state:
            continue
        size = float(tiles.numbers(node))
        size *= tiles.item / 4 if node.op == "placeholder" and not state and node.name not in wide else 1
        made = -1 if state else at[node]
        spans.append((*tiles.span(made, made, last.get(node, end if walks else at[node] + 1)), size))
    return int(max((sum(size for a, b, size in spans if a < i <= b) for i in range(end + 1)), default=0.0))


def intrinsic_load(kind: str, C: int, N: int, item: int) -> Load:
    """Load of a kernel of `intrinsic_kernels`; N is the padded size of a key."""
    if kind == "inverse":
        widths = [16 << i for i in range(C.bit_length() - 5)]  # of the blocks that are joined, a level each
        pairs = [C // (2 * s) for s in widths]
        flops = sum(4 * n * s**3 for n, s in zip(pairs, widths, strict=True))
        return Load(max(4096, C * C), 0, 7 * C * C // 4, flops, flops, 2 * sum(pairs), 4 + 3 * sum(pairs), 16 * 16 * C)
    levels, grad = C.bit_length() - 1, kind == "scores_grad"
    columns = intrinsic_kernels.columns(kind, N, item == 2)
    flops = levels * 2 * C * C * N
    numbers = levels * (10 if grad else 8) * C * N
    products, loads = (x * N // columns for x in (levels, 3 + levels))
    alive = (5 if grad else 3) * C * columns
    parts = item + 1 if grad else item  # of fp32 operands; sums over warps need room besides
    shared = item * C * columns * parts + (4096 if grad else 0)
    if grad and item == 2:  # both operands of a chunk with small gates, beside the gradients
        shared = max(shared, item * C * (2 * columns + C))
    return Load(shared, 0, alive, flops, flops if C < 64 else 0, products, loads, numbers)
