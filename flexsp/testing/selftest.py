"""The doctor's tests, each in its own process: `python -m flexsp.testing.selftest ops DEVICE DTYPE | ranks TRANSPORT`.

Prints findings [level, name, detail] as JSON on the last line. Exit status 0 unless the test could not run at all.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch

from flexsp.testing.compare import Report
from flexsp.testing.problems import OPS, check, draw, merge, solve, solve_all

__all__ = ["main", "ops", "ranks"]

Findings = list[tuple[str, str, str]]
DOCUMENTS = (70, 0, 41, 1, 88)


def _finding(name: str, reports: Sequence[Report], began: float) -> tuple[str, str, str]:
    bad = [str(report) for report in reports if not report.ok]
    if bad:
        return "fail", name, f"{len(bad)} of {len(reports)} tensors: {bad[0]}"
    worst = max(report.error for report in reports)
    text = f"{len(reports)} outputs and gradients against float64, worst error {worst:.1e}"
    return "ok", name, f"{text}, {time.monotonic() - began:.0f} s"


def ops(device: str, dtype_name: str) -> Findings:
    """Ops forward and backward on one device: on the CPU each, packed too; on a GPU what few compilations allow."""
    began, dtype = time.monotonic(), getattr(torch, dtype_name)
    reports: list[Report] = []
    names = list(OPS) if device == "cpu" else ["simple_gla", "mamba2"]
    for op in names:
        for documents in (None, DOCUMENTS):
            problem = draw(op, T=sum(DOCUMENTS), K=32, V=32, documents=documents).rounded(dtype)
            reports += check(problem, dtype, solve_all(problem, dtype, device))
    where = "the CPU" if device == "cpu" else "GPU 0"
    return [_finding(f"ops on {where}, {dtype_name}", reports, began)]


def ranks(transport: str) -> Findings:
    """Uneven shards, an empty one among them where there are three ranks, against one rank. Every rank calls it."""
    import torch.distributed as dist

    from flexsp.launch.bootstrap import init_sequence_parallel

    began = time.monotonic()
    sp = init_sequence_parallel(transport=transport)
    title = f"{sp.world_size} {sp.device.type.replace('cuda', 'gpu').upper()} ranks, {transport}"
    dtype = torch.float32
    lengths = [97, 0, 70, 33][: sp.world_size] if sp.world_size > 2 else [123, 77]
    lengths += [1] * (sp.world_size - len(lengths))
    reports: list[Report] = []
    for seed, (op, packed) in enumerate([("simple_gla", False), ("simple_gla", True), ("mamba2", False)]):
        T = sum(lengths)
        documents = [T // 3, 0, T - T // 3] if packed else None
        problem = draw(op, T=T, K=32, V=32, documents=documents, seed=seed).rounded(dtype)
        mine = {name: x.cpu() for name, x in solve(problem, dtype, sp.device, sp, lengths).items()}
        parts = [mine] * sp.world_size
        dist.all_gather_object(parts, mine, group=sp.cpu_group)
        sp.check()
        if sp.rank == 0:
            reports += check(problem, dtype, [merge(problem, parts)], one_rank=solve(problem, dtype, sp.device))
    dist.barrier(group=sp.cpu_group)
    sp.close()
    dist.destroy_process_group()
    return [_finding(title, reports, began)] if reports else [("ok", title, "")]


def main(words: Sequence[str]) -> int:
    torch.set_num_threads(1)
    findings = ops(words[1], words[2]) if words[0] == "ops" else ranks(words[1])
    print(json.dumps(findings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
