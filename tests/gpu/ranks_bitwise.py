"""Ops over a group made with bitwise have the bits of one rank. Run by torchrun, not by pytest:

    PYTHONPATH=. torchrun --standalone --nproc-per-node 4 tests/gpu/ranks_bitwise.py [--only A,B] [--device cpu]

Prints one line a call on rank 0; exit status 1 if any bits differ. Several ranks may share no GPU.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.testing.cases import Shape
from tests.harness.bitwise import differing, inputs_of, joined, lengths_of, run
from tests.harness.ops import ALL

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def moved(x: Any, device: torch.device) -> Any:
    if isinstance(x, tuple):
        return tuple(moved(y, device) for y in x)
    return x.to(device) if torch.is_tensor(x) else x


def check(sp: SequenceParallel, name: str, dtype: torch.dtype, shape: Shape) -> str:
    """What differs from one rank, for segments spread evenly, and with a rank that has none."""
    case, segments = ALL[name], -(-shape.T // sp.segment)
    given = {n: moved(x, sp.device) for n, x in inputs_of(case, dtype, False, 7, shape).items()}
    even = [(segments + r) // sp.world_size for r in range(sp.world_size)]
    wrong = []
    one = run(SequenceParallel(device=sp.device, segment=sp.segment), case, given, 0, shape.T, shape.T)
    again = run(SequenceParallel(device=sp.device, segment=sp.segment), case, given, 0, shape.T, shape.T)
    wrong += [f"{x} from call to call" for x in differing(one, again)]
    for cut in (even, [segments, *[0] * (sp.world_size - 1)]):
        lengths = lengths_of(tuple(cut), sp.segment, shape.T)
        sp.set_lengths(lengths)
        begin = sum(lengths[: sp.rank])
        mine = run(sp, case, given, begin, begin + lengths[sp.rank], shape.T)
        parts: list[Any] = [None] * sp.world_size
        dist.all_gather_object(parts, {n: x.cpu() for n, x in mine.items()})
        wrong += [f"{x} of {cut}" for x in differing({n: x.cpu() for n, x in one.items()}, joined(case, parts))]
    return ", ".join(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of calls, with commas")
    parser.add_argument("--device", help="cpu, or the GPU of LOCAL_RANK")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    sp = init_sequence_parallel(device=options.device, bitwise=48 if on_cpu else 1024)
    shape = Shape(T=4 * sp.segment - 7, H=2, K=6, V=5) if on_cpu else Shape(T=8 * sp.segment - 7, H=4, K=64, V=64)
    names = [x for x in options.only.split(",") if x] or [*ALL]
    failed = 0
    for name in names:
        for dtype in DTYPES:
            try:
                wrong = check(sp, name, dtype, shape)
            except Exception:
                wrong = traceback.format_exc()
            failed += bool(wrong)
            if sp.is_first:
                print(f"{name} {dtype}: {wrong or 'same bits'}", flush=True)
    if sp.is_first:
        print(f"ranks_bitwise: {'FAILED' if failed else 'passed'}, {failed} of {len(names) * len(DTYPES)} differ")
    sp.close()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
