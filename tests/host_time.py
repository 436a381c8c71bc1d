"""Compares the host's time for a call with another version of the code: `make host-time BASE=commit`.

The time of a call on a GPU is that of its kernels or that of Python, whichever is longer, and short shards are bound by
Python. Here launches only fill in addresses: tensors are on the CPU, and what is left is the checks, the lookup of what
is launched, and the memory. Both versions take turns in processes of their own, and the quickest of each counts, in
time of the processor: what else the machine does makes a call slower, never quicker. Calls over ranks need GPUs:
`flexsp bench host`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
T, HEADS, SIZE = 256, 2, 32
CALLS, BURSTS = 30, 12
OPS = ("chunk_simple_gla", "mamba2_ssd", "chunk_gla", "chunk_gated_delta_rule", "chunk_rwkv7", "chunk_hgrn")


def inputs_of(op: str) -> dict[str, Any]:
    import torch

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    def gates(*shape: int) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(torch.randn(shape) + 3)

    heads, rows = (1, T, HEADS), (1, T, HEADS, SIZE)
    q, k, v = (normal(*rows) for _ in range(3))
    if op == "mamba2_ssd":
        B, C = normal(1, T, 1, SIZE), normal(1, T, 1, SIZE)
        return {"x": v, "dt": -gates(*heads), "A": -torch.ones(HEADS), "B": B, "C": C}
    if op == "chunk_rwkv7":
        unit = torch.nn.functional.normalize(k, dim=-1)
        return {"r": q, "w": -0.5 * torch.rand(rows), "k": unit, "v": v, "a": -unit, "b": unit}
    if op == "chunk_hgrn":
        return {"x": normal(1, T, 64), "g": gates(1, T, 64)}
    found = {"q": q, "k": k, "v": v, "g": gates(*(rows if op == "chunk_gla" else heads))}
    return found | ({"beta": torch.rand(heads)} if "delta" in op else {})


def quickest_us(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(BURSTS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        found.append((time.process_time() - began) / CALLS * 1e6)
    return min(found)


def measure() -> dict[str, float]:
    """Microseconds of each op, without gradients and with them. Body of the child process."""
    import torch

    from flexsp import ops
    from flexsp.kernels import executable  # noqa: F401  (imported here so that its launches are replaced)
    from flexsp.runtime import steps
    from flexsp.runtime.launch import KernelLaunch

    def fill_in(every: Any, frame: Any, device: torch.device) -> None:
        at = frame.addresses()
        for step in every:
            if isinstance(step, KernelLaunch):
                step._pick(at)
            else:
                step(frame)

    plain = steps.run_steps
    for module in [x for name, x in sys.modules.items() if name.startswith("flexsp")]:
        if getattr(module, "run_steps", None) is plain:
            module.run_steps = fill_in
    torch.set_num_threads(1)
    found = {}
    for name in OPS:
        inputs, op = inputs_of(name), getattr(ops, name)
        leaves = {key: x.requires_grad_() for key, x in inputs.items()}

        def forward(op: Any = op, leaves: Any = leaves) -> object:
            with torch.no_grad():
                return op(**leaves)

        def both(op: Any = op, leaves: Any = leaves) -> object:
            o = op(**leaves)[0]
            return torch.autograd.grad(o, [*leaves.values()], o.detach())

        found |= {f"{name} forward": quickest_us(forward), f"{name} both": quickest_us(both)}
    return found


def child(tree: Path) -> dict[str, float]:
    env = os.environ | {"TRITON_INTERPRET": "1", "FLEXSP_BACKEND": "triton", "PYTHONPATH": str(tree)}
    command = [sys.executable, __file__, "--child"]
    done = subprocess.run(command, env=env, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the calls failed in {tree}:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="the commit to compare with; without it, this version alone")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each version")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure()))
        return 0
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="flexsp-base-") as folder:
        trees = {"now": ROOT}
        if args.base is not None:
            trees = {args.base: Path(folder) / "tree", "now": ROOT}
            subprocess.run([*git, "add", "--detach", "--quiet", str(trees[args.base]), args.base], check=True)
        try:
            runs = [{name: child(tree) for name, tree in trees.items()} for _ in range(args.rounds)]
        finally:
            if args.base is not None:
                subprocess.run([*git, "remove", "--force", str(trees[args.base])], check=True)
    print(f"{'microseconds of a call':34}" + "".join(f"{name[:12]:>14}" for name in trees))
    for what in runs[0]["now"]:
        print(f"{what:34}" + "".join(f"{min(run[name][what] for run in runs):14.1f}" for name in trees))
    return 0


if __name__ == "__main__":
    sys.exit(main())
