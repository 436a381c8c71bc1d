"""Generated kernels compiled for sm_90 without a GPU, and their source as text.

Bf16 heads of 128: shared memory, stack, the wait before memory is touched, and the ptxas. A stack frame (bytes a
thread) beyond those stated is a failure, and so is one that became half of what is stated: the table must say so then.

`FLEXSP_RENEW_GOLDEN=1` writes tests/golden anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_LIMIT = 227 * 1024
GOLDEN = Path(__file__).parent / "golden"
CONFIGS = [("gla", "whole"), ("deltanet", "ranks")]
if os.environ.get("ALL_TESTS") == "1":
    CONFIGS += [
        ("simple_gla", "packed"),
        ("simple_gla", "whole"),
        ("deltanet", "whole"),
        ("hgrn", "whole"),
        ("hgrn", "packed"),
        ("gated_deltanet", "whole"),
        ("gated_deltanet", "ranks"),
    ]
STACK: dict[tuple[str, str], dict[str, int]] = {  # bytes a thread; 0 if not here
    ("gla", "whole"): {"grads": 16},
    ("simple_gla", "whole"): {"grads": 64},
    ("simple_gla", "packed"): {"output": 80, "grads": 72},
    ("deltanet", "whole"): {"grads": 568},
    ("deltanet", "ranks"): {"grads": 568},
    ("gated_deltanet", "whole"): {"back": 48, "grads": 336},
    ("gated_deltanet", "ranks"): {"collect": 48, "back": 8, "grads": 336},
}
WALKS = ("summarize", "output", "states", "collect", "back")


def compile_variant(name: str, how: str, K: str = "128", V: str = "128") -> list[dict[str, Any]]:
    """Body of the child process: a forward and backward pass on meta tensors, every launch compiled."""
    import torch

    from flexsp.comm.group import SequenceParallel
    from flexsp.comm.heap import SymmetricHeap
    from flexsp.compiler import dispatch, engine
    from flexsp.testing import offline
    from tests import variants

    dispatch.chunk_table = lambda *args: torch.empty(1, dtype=torch.int32, device="meta")  # type: ignore[assignment]
    sizes = {"H": 32, "K": int(K), "V": int(V)}
    program = variants.load(name).make(*sizes.values(), torch.bfloat16).program
    code = engine.Generated(program)

    def made(what: Any, lead: list[int]) -> torch.Tensor:
        shape = [*lead, *(sizes[s.name] for s in what.shape[len(lead) > 0 :])]
        return torch.empty(shape, dtype=what.dtype, device="meta").requires_grad_()

    tokens = {key: made(what, [1, 4096]) for key, what in program.meta.tokens.items()}
    params = {key: made(what, []) for key, what in program.meta.params.items()}
    bounds = torch.empty(5, dtype=torch.int64, device="meta") if how == "packed" else None
    initial = made(program.meta.state, [4 if how == "packed" else 1])
    sp = None
    if how == "ranks":  # the last one, which returns a final state
        arena = torch.empty(64 << 20, dtype=torch.uint8, device="meta")
        heap = SymmetricHeap(arena, [arena] * 3)
        sp = SequenceParallel(rank=2, world_size=3, device="meta", transport="peer", heap=heap)
        initial = None
    with offline.record_launches() as launches:
        recipe = dispatch.Recipe(code, tokens | params, initial, bounds, sp)
        o, final = dispatch.run(recipe, [*tokens.values(), *params.values()], initial, bounds, (0, 4096, 4096))
        torch.autograd.backward([o, final], [torch.empty_like(o), torch.empty_like(final)])
    results = []
    for found in offline.compile_launches(launches):
        told = {"waits_first": found.waits_first, "wgmma": found.ptx.count("wgmma.mma_async")}
        results.append({key: value for key, value in vars(found).items() if key != "ptx"} | told)
    return results


def run_child(*args: str, folder: Path) -> Any:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "WORLD_SIZE", "FLEXSP_BACKEND")}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "FLEXSP_CODE_DIR": str(folder)}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, __file__, *args], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("name", "how"), CONFIGS)
def test_resources(name: str, how: str, tmp_path: Path) -> None:
    found = run_child("compile", name, how, folder=tmp_path)
    told = "\n".join(" ".join(f"{key}={value}" for key, value in kernel.items()) for kernel in found)
    print(told)
    names = {kernel["name"] for kernel in found}
    assert {"output", "states", "back", "grads"} <= names, told
    assert all(kernel["shared"] <= SHARED_LIMIT for kernel in found), told
    assert all(kernel["waits_first"] for kernel in found), told
    products = name != "hgrn"
    assert all((kernel["wgmma"] > 0) == products for kernel in found if kernel["name"] in WALKS), told
    assert all(kernel["assembler"] >= 129 for kernel in found), "ptxas 12.8 miscompiles some of these"
    allowed = STACK.get((name, how), {})
    stack = {kernel: max(x["stack"] for x in found if x["name"] == kernel) for kernel in names}
    more = {kernel: n for kernel, n in stack.items() if n > allowed.get(kernel, 0)}
    assert not more, f"stack of {more}, allowed {allowed}\n{told}"
    less = {kernel: stack.get(kernel) for kernel, n in allowed.items() if 2 * stack.get(kernel, 0) < n}
    assert not less, f"the table allows more than is needed: {less} of {allowed}"


# Golden sources -------------------------------------------------------------------------------------------------------


def source_of(name: str) -> str:
    """The generated file for heads of 64 in bf16, without the line that names Triton's version."""
    import torch

    from flexsp.compiler.engine import Generated
    from tests import variants

    source = Generated(variants.load(name).make(4, 64, 64, torch.bfloat16).program).source
    return re.sub(r"\nTriton \S+, \w+\.\n", "\n", source)


@pytest.mark.parametrize("name", ["simple_gla", "gla", "deltanet"])
def test_golden_source(name: str, tmp_path: Path) -> None:
    found, file = run_child("source", name, folder=tmp_path), GOLDEN / f"{name}.py"
    if os.environ.get("FLEXSP_RENEW_GOLDEN") == "1":
        file.write_text(found)
    assert found.splitlines() == file.read_text().splitlines(), "FLEXSP_RENEW_GOLDEN=1 writes the file anew"


if __name__ == "__main__":
    what, which, *more = sys.argv[1:]
    print(json.dumps(source_of(which) if what == "source" else compile_variant(which, *more)))
