"""Stage 4: how one call of a generated variant is cut into chunks, segments and tiles. Deterministic.

Whether the sequence is walked in one go ("fused") or in segments that a scan joins ("segmented"), and the chunk size,
follow from predicted times (`flexsp.compiler.planning.model`) of the plans whose tiles fit a block's shared memory
(`flexsp.compiler.planning.capacity`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexsp.compiler.backend.exact import EXACT
from flexsp.compiler.backend.generated_kernels import CHUNKS, NARROWEST, WHOLE, Generated, padded
from flexsp.compiler.backend.walks import WALKS
from flexsp.compiler.graphs.rewrite import dims
from flexsp.compiler.graphs.values import NotEmittable
from flexsp.compiler.planning.capacity import smaller_chunk
from flexsp.compiler.planning.generated_plan import Tiling
from flexsp.compiler.planning.model import Predicted, predict, tiles_of
from flexsp.devices import Device, check_shared, of_device
from flexsp.kernels.launch_spec import Launch
from flexsp.runtime.kept import keep_with
from flexsp.scan.dense import MOST
from flexsp.scan.tiles import MOST_COLUMNS, MOST_ROWS, too_large

__all__ = ["candidates", "choose_tiling", "not_generated"]

_LONGEST = 128
_PIECE = {True: 64, False: 32}  # columns of a piece of a large state, in bf16 or not
_TILE = 128 * 128  # numbers of the state that a walk holds at most
_HELD = 128 * 256  # numbers of any tile, at most
# A thread of `grads` that needs up to _LIGHT registers runs faster with a limit of _THIRD: three programs then share a
# multiprocessor.
_LIGHT, _THIRD = 224, 168
# Above _HEAVY registers eight warps are faster, since they spill less. Each product adds _EXCHANGE to that threshold,
# because eight warps have to exchange its operands.
_HEAVY, _EXCHANGE = 300, 15
_SPARE = 12 * 1024  # bytes by which estimates for kernels with many tiles were too small
_SHARED = 4  # programs on a multiprocessor, of kernels without products
_WORTH = 0.8  # a chunk size is taken instead of the measured one if its predicted time is at most this share


def choose_tiling(
    code: Generated, sizes: Mapping[str, int], heads: int, T: int, n_docs: int, dtype: torch.dtype, ranks: bool = False,
    device: Device | None = None, chunk: int | None = None,
) -> Tiling:  # fmt: skip
    """The tiling of a call of generated kernels, kept for calls like it.

    A dense transition is walked in one segment, and columns of the state are spread over programs instead: its
    segments would have to be composed with a K x K product each. With others, bf16 walks have all columns, or as many
    as make 128 x 128 numbers: every program computes the chunk's scores again. Numbers of a vector state that nothing
    joins are spread, in all kernels; several such programs share a multiprocessor, so as many more segments are looked
    at too.

    Args:
        code: the kernels; its `chunk` is the chunk size, None to choose it.
        sizes: of the inputs and the state, by name.
        heads: B * H sequences of T tokens of this rank.
        n_docs: packed documents, 0 if not packed.
        ranks: the call is chained over ranks, so its summary is needed.
        device: the GPU; None for the one that is there, else the one that is planned for.
        chunk: a chunk size where the kernels have none.

    Raises:
        NotEmittable: a size that no kernel is made for.
        ValueError: kernels for the given chunk size need more shared memory than a block has.
    """
    made, sized, chunk = code.sized(sizes, dtype), tuple(sizes.items()), code.chunk if chunk is None else chunk
    return _best(made, chunk, sized, max(1, heads), T, n_docs, dtype, ranks, device or of_device())


def not_generated(code: Generated, sizes: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """Why no generated kernels run calls of these sizes, or None."""
    try:
        if code.layout.parts:
            rows, cols = code.layout.numbers(sizes)
            if (taken := too_large(rows, cols, code.dense)) is not None:
                return f"state and extra state make a matrix of {rows} x {cols}; kernels scan {taken}"
        wrong = _wrong_on_gpus(code, sizes, dtype)
        if wrong is not None:
            return wrong
        choose_tiling(code, {name: sizes[name] for name in code.layout.sizes}, 1, 1, 0, dtype)
    except KeyError as error:
        return f"no input of the call tells the size {error}"
    except NotEmittable as error:
        return str(error)
    return None


def _wrong_on_gpus(code: Generated, sizes: Mapping[str, int], dtype: torch.dtype) -> str | None:
    """What was seen to be wrong on a GPU and in no interpreter (tests/gpu/repro_numbers_beside_states.py)."""
    number = next((x.name for x in code.layout.parts if not x.sizes), None)
    if number is None or dtype == torch.bfloat16:
        return None
    K, V = (sizes[name] for name in code.layout.state)
    if padded(K) * padded(V) <= 128 * 64:
        return None
    return (
        f"{number} is a number beside a state of {K} x {V}, in {str(dtype).removeprefix('torch.')}; such kernels "
        "gave wrong gradients on an H200 where states were larger than 128 x 64, so use bfloat16, or smaller K or V"
    )


def candidates(
    code: Generated, sizes: Mapping[str, int], heads: int, T: int, n_docs: int, dtype: torch.dtype, ranks: bool = False,
    device: Device | None = None,
) -> list[tuple[Tiling, float]]:  # fmt: skip
    """Every plan that fits, with the microseconds that forward and backward are predicted to take, by chunk size."""
    made, sized = code.sized(sizes, dtype), tuple(sizes.items())
    cut = _Cut.of(made, sized, max(1, heads), T, n_docs, dtype, ranks, device or of_device())
    return list(_candidates(cut, code.chunk, made))


@dataclass(frozen=True)
class _Cut:
    """What a plan depends on besides the kernels. `tiles` are the parts of the state with two axes."""

    rows: str
    cols: str
    sizes: tuple[tuple[str, int], ...]
    heads: int
    T: int
    n_docs: int
    dtype: torch.dtype
    dense: bool
    split: bool
    panels: bool
    pieces: bool
    tiles: int
    ranks: bool
    device: Device

    @classmethod
    def of(
        cls, code: Generated, sizes: tuple[tuple[str, int], ...], heads: int, T: int, n_docs: int, dtype: torch.dtype,
        ranks: bool, device: Device,
    ) -> _Cut:  # fmt: skip
        rows, cols = code.layout.rows, code.layout.cols
        tiles = sum(len(x.sizes) == 2 for x in code.layout.places()) or 1
        return cls(
            rows, cols, sizes, heads, T, n_docs, code.products(dtype), code.dense, code.split, code.panels, code.pieces,
            tiles, ranks, device,
        )  # fmt: skip

    @property
    def half(self) -> bool:
        return self.dtype == torch.bfloat16

    @property
    def chunk(self) -> int:
        """The chunk size that was measured to be good with K = V = 128.

        In fp32 the only one that is chosen: a product keeps its operands in three parts, and kernels compiled for 32
        rows and more spill up to 17 KB a thread.
        """
        return 64 if self.half else 16

    @property
    def width(self) -> int:
        """Columns of the state for a program of a walk: as many as fit, but fewer for dense transitions and in fp32."""
        width = whole = padded(dict(self.sizes)[self.cols])
        rows = self.tiles * padded(dict(self.sizes).get(self.rows, 1))
        while self.split and (rows * width > _TILE or width > MOST):
            width //= 2
        if self.dense and self.split:
            while width > NARROWEST and self.heads * (whole // width) < self.device.programs:
                width //= 2
        return width if not self.split or (self.half and not self.panels) else min(width, NARROWEST)

    def plans(self, chunk: int) -> Iterator[Tiling]:
        """In segments and whole; for a dense transition, over ever narrower panels."""
        if not self.dense:
            spread = [self.plan(chunk, self.width, programs=_SHARED * self.device.programs)] if self.panels else []
            plans = (self.plan(chunk, self.width), *spread, self.plan(chunk, self.width, whole=True))
            yield from dict.fromkeys(plans)
            return
        width = self.width
        yield self.plan(chunk, width)
        while self.split and width > NARROWEST:
            width //= 2
            yield self.plan(chunk, width)

    def plan(self, chunk: int, width: int, whole: bool = False, programs: int | None = None) -> Tiling:
        """The plan for a chunk size and columns a program; `whole`: in one segment, else for `programs` programs."""
        blocks = {name: padded(n) for name, n in self.sizes}
        n_chunks = -(-self.T // chunk) + self.n_docs
        tiles = self.heads * -(-blocks[self.cols] // width)
        segments = max(1, min(n_chunks, max(-(-(programs or self.device.programs) // tiles), -(-n_chunks // _LONGEST))))
        per_seg = max(1, -(-n_chunks // (1 if whole or self.dense else segments)))
        n_seg = max(1, -(-n_chunks // per_seg))
        fused = n_seg == 1 and n_chunks > 0 and not self.ranks
        rows = blocks.get(self.rows, 1)  # a vector has one
        large = self.tiles * rows * width >= (_TILE if self.half or not self.pieces else _TILE // 2)
        pipelined = self.half and self.rows in blocks  # Triton pipelines the loads of products
        walk = Launch(width, 8 if large else 4, 3 if pipelined else 1)
        piece = min(blocks[self.cols], _PIECE[self.half]) if self.pieces else blocks[self.cols]
        cols = width if self.panels else piece
        # Of fp32 ptxas gave kernels with many tiles of 128 x 32, of four warps, 32 registers and 13 KB on the stack.
        many = 64 * 64 if self.pieces and not self.half else 64 * 128
        tile = Launch(cols, 8 if rows * cols >= many else 4, 1)
        part, small = Launch(cols, 8 if self.pieces else 4, 1), Launch(cols, 2, 1)
        return Tiling(
            chunk, tuple(blocks.items()), n_chunks, per_seg, n_seg, walk, tile, part, small,
            "fused" if fused else "segmented",
        )  # fmt: skip


@keep_with(0)
def _best(
    code: Generated, chunk: int | None, sizes: tuple[tuple[str, int], ...], heads: int, T: int, n_docs: int,
    dtype: torch.dtype, ranks: bool, device: Device,
) -> Tiling:  # fmt: skip
    cut = _Cut.of(code, sizes, heads, T, n_docs, dtype, ranks, device)
    _refuse_large(cut, code)
    found = _candidates(cut, chunk, code)
    if not found:
        return _last_resort(cut, chunk, code)
    quickest: dict[int, tuple[Tiling, float]] = {}
    for plan, us in found:
        if plan.chunk not in quickest or us < quickest[plan.chunk][1]:
            quickest[plan.chunk] = (plan, us)
    best = min(quickest.values(), key=lambda x: x[1])
    usual = quickest.get(cut.chunk, best)
    return (best if best[1] < _WORTH * usual[1] else usual)[0]


def _refuse_large(cut: _Cut, code: Generated) -> None:
    """NotEmittable if a kernel would hold too large a tile, or the scan too large a state."""
    for name, n in cut.sizes:
        of_columns = MOST_ROWS if code.panels else MOST_COLUMNS if code.split else MOST
        most = of_columns if name == cut.cols else MOST
        if n > most:
            raise NotEmittable(f"{name} = {n}: kernels are generated for sizes up to {most}")
    plan = next(cut.plans(CHUNKS[0]))
    blocks = dict(plan.blocks) | {"C": plan.chunk, "1": 1}
    for kind, kernel in code.kernels.items():
        if kind.startswith(EXACT):
            continue  # they hold fewer columns
        blocks[cut.cols] = (plan.walk if kind in WALKS else plan.whole).cols
        for node in (x for part in kernel.nodes for x in part):
            if math.prod(blocks[x] for x in dims(node)) > _HELD:
                raise NotEmittable(_too_large(kind, node, cut, code))


def _too_large(kind: str, node: Any, cut: _Cut, code: Generated) -> str:
    found, axes, line = dict(cut.sizes), dims(node), node.meta.get("line")
    numbers = " x ".join(str(found[x]) for x in axes)
    of_all = [name for name in WALKS if cut.cols in code.kernels[name].contracted]
    why = f", since `{of_all[0]}` sums over {cut.cols}" if of_all and cut.cols in axes else ""
    return (
        f"kernel `{kind}` would hold [{', '.join(axes)}] of {numbers} at once{why}{f', at {line}' if line else ''}; "
        f"kernels hold up to {WHOLE} x {MOST}, so make {' or '.join(axes)} smaller"
    )


@keep_with(2)
def _candidates(cut: _Cut, chunk: int | None, code: Generated) -> tuple[tuple[Tiling, float], ...]:
    """Plans whose estimated shared memory a block has, each with as many stages as fit, and their microseconds."""
    found = []
    usual = CHUNKS[:-1] if cut.half else (cut.chunk,)  # whether 256 fits is known only when it is compiled
    for size in usual if chunk is None else (chunk,):
        for plan in cut.plans(size):
            for stages in range(plan.walk.stages, 0, -1):
                plan = replace(plan, walk=replace(plan.walk, stages=stages), part=_part(cut, plan, code))
                rows = _launches(cut, plan, code)
                if all(x.shared <= cut.device.shared - (0 if x.kernel in WALKS else _SPARE) for x in rows):
                    found.append((plan, sum(x.us for x in rows)))
                    break
    return tuple(found)


def _part(cut: _Cut, plan: Tiling, code: Generated) -> Launch:
    """How `grads` is launched, by the registers that its tiles would take of four warps. The numbers were measured with
    the generated simple GLA, GLA, DeltaNet and Gated DeltaNet on an H200."""
    if not cut.half or len(code.layout.state) == 1:
        return plan.part
    tiles = tiles_of(code, plan, dict(cut.sizes), cut.dtype, "grads", plan.part, cut.device)
    if any(registers > _HEAVY + _EXCHANGE * products for registers, products in tiles):
        return replace(plan.part, warps=8)
    light = max(registers for registers, _ in tiles) <= _LIGHT and cut.device.wide_products
    return replace(plan.part, registers=_THIRD) if light else plan.part


def _launches(cut: _Cut, plan: Tiling, code: Generated) -> list[Predicted]:
    sizes = dict(cut.sizes)
    forward, backward = (
        predict(code, plan, sizes, cut.heads, cut.T, cut.dtype, n_docs=cut.n_docs, backward=x, device=cut.device)
        for x in (False, True)
    )
    return forward + backward


def _last_resort(cut: _Cut, chunk: int | None, code: Generated) -> Tiling:
    """The plan with least shared memory where none is estimated to fit; what is compiled from it will tell."""
    plan = [*cut.plans(chunk or CHUNKS[0])][-1]
    plan = replace(plan, walk=replace(plan.walk, stages=1), sure=False)
    if chunk is not None:
        most = max(_launches(cut, plan, code), key=lambda x: x.least)
        fits = [x for x in CHUNKS if x < chunk and _candidates(cut, x, code)]
        sizes = ", ".join(f"{name} = {n}" for name, n in (("chunk_size", chunk), *cut.sizes))
        advice = smaller_chunk(chunk, max(fits, default=None))
        check_shared(most.kernel, most.least, cut.device.arch, sizes, advice)
    return plan
