"""Compares the host's time for a call with another version of the code: `make host-time BASE=commit`.

The time of a call on a GPU is that of its kernels or that of Python, whichever is longer, and short shards are bound by
Python. Here launches only fill in addresses: tensors are on the CPU, and what is left is the checks, the lookup of what
is launched, and the memory. Values are not read, as on a GPU. Both versions take turns in processes of their own, and
the quickest of each counts, in time of the processor: what else the machine does makes a call slower, never quicker.
Calls over ranks need GPUs: `flexsp bench host`.

mamba2_ssd is called as the layer `Mamba2` of 80 heads calls it. Layers themselves are small, since the CPU computes
their projections; the host's time does not depend on their width.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
T, HEADS, SIZE = 256, 2, 32
CALLS, BURSTS = 30, 12
OPS = (
    "chunk_simple_gla", "mamba2_ssd", "chunk_gla", "chunk_gated_delta_rule", "chunk_rwkv7", "chunk_hgrn", "chunk_mlstm",
    "mamba3",
)  # fmt: skip
OPTIONS = {"mamba2_ssd": {"dt_softplus": True}, "chunk_mlstm": {"head_first": False}}
LAYERS: dict[str, dict[str, int]] = {
    "Mamba2": {"head_dim": 16, "state_size": 16}, "GatedDeltaNet": {"num_heads": 2, "head_dim": 16},
    "KimiDeltaAttention": {"num_heads": 2, "head_dim": 16}, "MLSTM": {"num_heads": 2},
}  # fmt: skip
WIDTH = 32


def inputs_of(op: str) -> dict[str, Any]:
    import torch

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    def gates(*shape: int) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(torch.randn(shape) + 3)

    heads, rows = (1, T, HEADS), (1, T, HEADS, SIZE)
    q, k, v = (normal(*rows) for _ in range(3))
    if op == "mamba2_ssd":
        return like_layer(80, 64, 128)
    if op == "chunk_rwkv7":
        unit = torch.nn.functional.normalize(k, dim=-1)
        return {"r": q, "w": -0.5 * torch.rand(rows), "k": unit, "v": v, "a": -unit, "b": unit.clone()}
    if op == "chunk_hgrn":
        return {"x": normal(1, T, 64), "g": gates(1, T, 64)}
    if op == "mamba3":
        x, steps, angles = normal(1, T, HEADS, 16), torch.rand(heads), torch.randn(1, T, HEADS, SIZE // 4)
        return {"x": x, "dt": steps, "A": -torch.rand(heads), "B": k, "C": q, "trap": steps.logit(), "angles": angles}
    if op == "chunk_mlstm":
        return {"q": q, "k": k, "v": v, "i": torch.randn(heads), "f": gates(*heads).exp().logit()}
    found = {"q": q, "k": k, "v": v, "g": gates(*(rows if op == "chunk_gla" else heads))}
    return found | ({"beta": torch.rand(heads)} if "delta" in op else {})


def like_layer(heads: int, size: int, state: int) -> dict[str, Any]:
    """Arguments of mamba2_ssd that lie as those of the layer do: parts of what its projection and its convolution
    return."""
    import torch

    x, B, C = torch.randn(1, T, heads * size + 2 * state, dtype=torch.bfloat16).split([heads * size, state, state], -1)
    dt = torch.randn(1, T, heads + 64, dtype=torch.bfloat16)[..., 64:]
    B, C = B.unsqueeze(2), C.unsqueeze(2)
    params = {"A": -torch.ones(heads), "D": torch.ones(heads), "dt_bias": torch.zeros(heads)}
    return {"x": x.unflatten(-1, (heads, size)), "dt": dt, "B": B, "C": C, **params}


def quickest_us(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(BURSTS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        found.append((time.process_time() - began) / CALLS * 1e6)
    return min(found)


def launching_nothing() -> None:
    """From now on launches only fill in addresses, and values are not read, as on a GPU."""
    import torch

    from flexsp.exceptions import checks_wanted
    from flexsp.kernels import executable  # noqa: F401  (imported here so that its launches are replaced)
    from flexsp.ops import _validate
    from flexsp.runtime import steps
    from flexsp.runtime.launch import KernelLaunch

    def fill_in(every: Any, frame: Any, device: torch.device) -> None:
        at = frame.addresses()
        for step in every:
            if isinstance(step, KernelLaunch):
                step._pick(at)
            else:
                step(frame)

    def readable(x: torch.Tensor) -> bool:
        return checks_wanted()

    others = {steps.run_steps: ("run_steps", fill_in), _validate.readable: ("readable", readable)}
    for module in [x for name, x in sys.modules.items() if name.startswith("flexsp")]:
        for plain, (name, other) in others.items():
            if getattr(module, name, None) is plain:
                setattr(module, name, other)


def measure() -> dict[str, float]:
    """Microseconds of each op, without gradients and with them. Body of the child process."""
    import torch

    from flexsp import nn, ops

    launching_nothing()
    torch.set_num_threads(1)
    found = {}
    for name in OPS:
        leaves = {key: x.detach().requires_grad_() for key, x in inputs_of(name).items()}
        call = functools.partial(getattr(ops, name), **leaves, **OPTIONS.get(name, {}))
        found |= both_ways(name, call, [*leaves.values()])
    x = torch.randn(1, 8, WIDTH, requires_grad=True)
    for name, sizes in LAYERS.items():
        layer = getattr(nn, name)(WIDTH, **sizes)
        found |= both_ways(name, lambda layer=layer: (layer(x), None), [x, *layer.parameters()])
    return found


def both_ways(name: str, call: Callable[[], tuple[Any, Any]], leaves: Sequence[Any]) -> dict[str, float]:
    """Microseconds of a call that returns outputs and states: without gradients, and with those of `leaves`."""
    import torch

    def forward() -> object:
        with torch.no_grad():
            return call()

    def both() -> object:
        o = call()[0]
        return torch.autograd.grad(o, leaves, o.detach())

    return {f"{name} forward": quickest_us(forward), f"{name} both": quickest_us(both)}


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
