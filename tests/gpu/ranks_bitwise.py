"""Ops and layers over a group made with bitwise have the bits of one rank. Run by torchrun, not by pytest:

    PYTHONPATH=. torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_bitwise.py [--only A,B] [--device cpu]

Prints one line a call on rank 0; exit status 1 if any bits differ. Several ranks may share no GPU.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flexsp import SequenceParallel, init_sequence_parallel, nn
from flexsp.testing.cases import Shape
from tests.harness.bitwise import Tensors, differing, inputs_of, joined, joined_rows, lengths_of, of_a_layer, run
from tests.harness.layers import LAYERS
from tests.harness.layers import make as small
from tests.harness.ops import ALL

# Beside those of tests/harness/layers.py, wide enough for other tiles of matrix products.
WIDE: dict[str, Callable[[], torch.nn.Module]] = {
    "wide gated-delta": lambda: nn.GatedDeltaNet(1024, num_heads=8, head_dim=64, expand_v=1.0),
    "wide mamba2": lambda: nn.Mamba2(512, head_dim=64, state_size=64),
    "wide mlstm": lambda: nn.MLSTM(512, num_heads=4),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


Call = tuple[Callable[[SequenceParallel, slice], Tensors], Callable[[list[Tensors]], Tensors]]
"""What gives the answers of some tokens over some ranks, and what makes those of one rank of what all ranks gave."""


def moved(x: Any, device: torch.device) -> Any:
    if isinstance(x, tuple):
        return tuple(moved(y, device) for y in x)
    return x.to(device) if torch.is_tensor(x) else x


def of_an_op(sp: SequenceParallel, name: str, dtype: torch.dtype, shape: Shape) -> Call:
    case = ALL[name]
    given = {n: moved(x, sp.device) for n, x in inputs_of(case, dtype, False, 7, shape).items()}
    return lambda over, at: run(over, case, given, at.start, at.stop, shape.T), lambda parts: joined(case, parts)


def of_layers(sp: SequenceParallel, name: str, dtype: torch.dtype, shape: Shape) -> Call:
    torch.manual_seed(7)
    layer = (WIDE[name]() if name in WIDE else small(name, 7)).to(sp.device, dtype)
    width = LAYERS[name][2] if name in LAYERS else layer.hidden_size
    x, w = torch.randn(2, 2, shape.T, width).to(sp.device, dtype)
    return (
        lambda over, at: of_a_layer(over, layer, x[:, at], w[:, at], None),
        lambda parts: joined_rows(parts, {"y", "dx"}),
    )


def check(sp: SequenceParallel, call: Call, shape: Shape) -> str:
    """What differs from one rank, for segments spread evenly, and with a rank that has none."""
    (gives, join), segments = call, -(-shape.T // sp.segment)
    even = [(segments + r) // sp.world_size for r in range(sp.world_size)]
    alone, whole = SequenceParallel(device=sp.device, segment=sp.segment), slice(0, shape.T)
    one = gives(alone, whole)
    wrong = [f"{x} from call to call" for x in differing(one, gives(alone, whole))]
    for cut in (even, [segments, *[0] * (sp.world_size - 1)]):
        lengths = lengths_of(tuple(cut), sp.segment, shape.T)
        sp.set_lengths(lengths)
        begin = sum(lengths[: sp.rank])
        mine = gives(sp, slice(begin, begin + lengths[sp.rank]))
        parts: list[Any] = [None] * sp.world_size
        dist.all_gather_object(parts, {n: x.cpu() for n, x in mine.items()})
        wrong += [f"{x} of {cut}" for x in differing({n: x.cpu() for n, x in one.items()}, join(parts))]
    return ", ".join(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of calls, with commas")
    parser.add_argument("--device", help="cpu, or the GPU of LOCAL_RANK")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    sp = init_sequence_parallel(device=options.device, bitwise=48 if on_cpu else 1024)
    shape = Shape(T=4 * sp.segment - 7, H=2, K=6, V=5) if on_cpu else Shape(T=8 * sp.segment - 7, H=4, K=64, V=64)
    layers = [*WIDE, *(n for n in LAYERS if not n.startswith("attention"))]
    calls = [(n, of_an_op) for n in ALL] + [(f"layer {n}", of_layers) for n in layers]
    only = options.only.split(",") if options.only else None
    calls = [(n, make) for n, make in calls if only is None or n in only]
    failed = 0
    for name, make in calls:
        for dtype in DTYPES:
            try:
                wrong = check(sp, make(sp, name.removeprefix("layer "), dtype, shape), shape)
            except Exception:
                wrong = traceback.format_exc()
            failed += bool(wrong)
            if sp.is_first:
                print(f"{name} {dtype}: {wrong or 'same bits'}", flush=True)
    if sp.is_first:
        print(f"ranks_bitwise: {'FAILED' if failed else 'passed'}, {failed} of {len(calls) * len(DTYPES)} differ")
    sp.close()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
