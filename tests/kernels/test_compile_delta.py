"""The delta engine's kernels compiled for sm_90 without a GPU: shared memory, spills, tensor-core instructions.

`MAY_SPILL` has ptxas's stack frames, bytes a thread, of unpacked bf16 heads of 128; see test_compile_diagonal.py.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from flexsp.devices import H200
from flexsp.runtime.triton_private import RELEASE
from tests.harness.compiling import described, in_child, told_of
from tests.marks import slow

pytestmark = pytest.mark.compiles

OF_LARGE = ("output", "output_backward", "grads")
OF_STRENGTHS = ("channel_scores", "channel_grads", "exact_forward", "exact_backward", "exact_grads")
"""Those of heads with gates of channels that read gates, and strengths."""
OF_LARGE_CHANNELS = ("output_backward", "channel_parts")
"""Of heads of 256, those that take most shared memory and registers: all of them would take too long."""
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16 128": {"K": 128, "V": 128, "norm": True, "group": 2},
    "bf16 128, unit keys": {"K": 128, "V": 128},
    "bf16 128, any keys, no decay": {"name": "deltanet", "K": 128, "V": 128, "norm": True},
    "bf16 128, any keys, packed": {"K": 128, "V": 128, "norm": True, "packed": True},
    "bf16 128, any keys, two a token": {"K": 128, "V": 128, "norm": True, "steps": 2},
    "bf16 64, any keys": {"K": 64, "V": 64, "norm": True},
    "any keys, gates of channels": {"name": "vector_gated_delta", "K": 128, "V": 128, "norm": True},
    "fp32 64, any keys": {"K": 64, "V": 64, "dtype": "float32", "norm": True, "group": 4},
    "bf16 128, no decay": {"name": "deltanet", "K": 128, "V": 128},
    "bf16 128, packed": {"K": 128, "V": 128, "packed": True},
    "bf16 128, gates of channels": {"name": "vector_gated_delta", "K": 128, "V": 128},
    "bf16 128, gates of channels, packed": {"name": "vector_gated_delta", "K": 128, "V": 128, "packed": True},
    "bf16 20, 24, gates of channels": {"name": "vector_gated_delta", "K": 20, "V": 24, "packed": True},
    "fp32 64, gates of channels": {"name": "vector_gated_delta", "K": 64, "V": 64, "dtype": "float32"},
    "bf16 20, 24": {"K": 20, "V": 24, "packed": True},
    "fp32 64": {"K": 64, "V": 64, "dtype": "float32"},
    "bf16 64": {"K": 64, "V": 64},
    "bf16 128, three keys a token": {"K": 128, "V": 128, "steps": 3},
    "bf16 128, two keys a token, packed": {"K": 128, "V": 128, "steps": 2, "packed": True},
    "bf16 64, many heads": {"name": "deltanet", "K": 64, "V": 64, "H": 256},
    "bf16 64, many heads, packed": {"name": "deltanet", "K": 64, "V": 64, "H": 256, "packed": True},
    "bf16 64, many heads, packed, walks": {
        "name": "deltanet", "K": 64, "V": 64, "H": 256, "packed": True, "only": ("forward", "backward", "grads"),
    },
    "bf16 64, many heads, gates of channels": {
        "name": "vector_gated_delta", "K": 64, "V": 64, "H": 256, "only": ("forward", "backward"),
    },
    "over ranks": {"ranks": True, "norm": True, "group": 2},
    "over ranks, unit keys": {"ranks": True},
    "over ranks, no decay": {"name": "deltanet", "ranks": True},
    "over ranks, no decay, packed": {"name": "deltanet", "ranks": True, "packed": True},
    "over ranks, no decay, in Triton": {"name": "deltanet", "ranks": True, "packed": True, "gluon": False, "H": 8},
    "over ranks, gates of channels": {"name": "vector_gated_delta", "ranks": True},
    "over ranks, in Triton": {"ranks": True, "gluon": False},
    "in Triton": {"gluon": False},
    "in Triton, no decay": {"name": "deltanet", "gluon": False},
    "in Triton, packed": {"packed": True, "gluon": False},
    "in Triton, gates of channels": {"name": "vector_gated_delta", "gluon": False},
    "bf16 256": {"K": 256, "V": 256, "packed": True, "H": 4, "gluon": False, "only": OF_LARGE},
    "bf16 256, any keys": {"K": 256, "V": 256, "H": 12, "norm": True, "group": 2},
    "bf16 208, 64, any keys, packed": {"K": 208, "V": 64, "norm": True, "packed": True},
    "bf16 144, outputs": {"name": "deltanet", "K": 144, "V": 64, "H": 256, "only": ("forward",)},
    "bf16 144, walks": {"K": 144, "V": 64, "only": ("forward", "backward", "grads")},
    "bf16 256, gates of channels": {
        "name": "vector_gated_delta", "K": 256, "V": 256, "packed": True, "only": OF_LARGE_CHANNELS,
    },
    "bf16 256, over ranks": {"K": 256, "V": 256, "ranks": True, "H": 4},
    "bf16 256, over ranks, packed": {"K": 256, "V": 256, "packed": True, "ranks": True, "H": 4},
    "bf16 256, over ranks, no decay": {"name": "deltanet", "K": 256, "V": 256, "packed": True, "ranks": True},
    "bf16 256, over ranks, gates of channels": {"name": "vector_gated_delta", "K": 256, "V": 256, "ranks": True},
    "bf16 256, packed, gates of channels": {"name": "vector_gated_delta", "K": 256, "V": 256, "packed": True},
    "bf16 256, two keys a token": {"K": 256, "V": 256, "packed": True, "ranks": True, "H": 4, "steps": 2},
    "bf16 256, 128": {"K": 256, "V": 128, "packed": True, "H": 4},
    "bf16 128, 256": {"K": 128, "V": 256, "ranks": True, "H": 4},
    "bf16 128, 256, gates of channels": {"name": "vector_gated_delta", "K": 128, "V": 256, "packed": True},
    "bf16 128, 256, many heads": {
        "name": "vector_gated_delta", "K": 128, "V": 256, "packed": True, "ranks": True, "H": 96,
    },
    "bf16 96, 192": {"K": 96, "V": 192, "H": 30, "norm": True},
    "bf16 96, 192, over ranks, packed": {"K": 96, "V": 192, "H": 30, "norm": True, "packed": True, "ranks": True},
    "bf16 80, 192, two keys a token": {"K": 80, "V": 192, "norm": True, "steps": 2, "group": 2},
    "bf16 96, no decay": {"name": "deltanet", "K": 96, "V": 128},
    "bf16 128, 256, packed": {"K": 128, "V": 256, "norm": True, "packed": True, "group": 2},
    "bf16 192": {"K": 192, "V": 192, "ranks": True, "H": 4},
    "bf16 255, packed": {"K": 255, "V": 255, "packed": True, "ranks": True, "H": 4},
    "fp32 256": {"K": 256, "V": 256, "dtype": "float32", "packed": True, "ranks": True, "H": 4},
    "fp32 256, gates of channels": {"name": "vector_gated_delta", "K": 256, "V": 256, "dtype": "float32"},
    "many heads, gates of channels": {"name": "vector_gated_delta", "H": 128},
    "bf16 128, gates of channels in bf16": {
        "name": "vector_gated_delta", "K": 128, "V": 128, "gates": "bfloat16", "packed": True,
        "only": OF_STRENGTHS,
    },
    "bf16 128, strengths": {"name": "gdn2", "K": 128, "V": 128, "norm": True, "group": 2},
    "bf16 64, 128, strengths, packed": {"name": "gdn2", "K": 64, "V": 128, "packed": True},
    "over ranks, strengths": {"name": "gdn2", "ranks": True, "norm": True},
    "bf16 128, strengths in bf16": {
        "name": "gdn2", "K": 128, "V": 128, "gates": "bfloat16", "packed": True, "only": OF_STRENGTHS,
    },
}
QUICK = [
    "bf16 128", "bf16 64, many heads, packed, walks", "bf16 128, gates of channels",
    "bf16 64, many heads, gates of channels", "bf16 144, outputs",
]  # fmt: skip
NO_DECAY = ["bf16 128, no decay"]
STRENGTHS = ["bf16 128, strengths"]
SHARED = ["many heads, gates of channels"]
IN_TRITON = ["in Triton"]
OVER_RANKS = ["over ranks"]
LARGE = ["bf16 256, gates of channels"]
GROUPS = ([*QUICK, *OVER_RANKS], NO_DECAY, IN_TRITON, LARGE, SHARED)
"""One child each; ranks have most kernels in common with the first."""
SLOW = [name for name in CONFIGS if not any(name in group for group in GROUPS)]
ALL_LARGE = [name for name in CONFIGS if re.match("bf16 .*(192|256)", name)]
OLMO = ["bf16 96, 192"]
EXACT = {"choose", "exact_forward", "exact_backward", "exact_grads"}
WALKS = {"output", "chunk_states", "output_backward", "summarize", "summarize_backward"}
OF_CHANNELS = {"channel_scores", "channel_wy_transform", "channel_parts", "channel_grads"}
BY_CHANNEL = ("vector_gated_delta", "gdn2")
IN_GLUON = {"forward", "backward", "grads", "segment_horizon", "channel_scores", "channel_grads"}
MAY_SPILL = {
    (3, 6): {
        "wy_inverse": 304, "output": 64, "output_backward": 24, "grads": 80, "channel_inverse": 128,
        "channel_grads": 104,
    }
}


def compile_config(
    name: str = "gated_deltanet", K: int = 128, V: int = 128, dtype: str = "bfloat16", packed: bool = False,
    H: int = 32, gluon: bool = True, ranks: bool = False, steps: int = 1, only: tuple[str, ...] = (),
    gates: str = "float32", norm: bool = False, group: int = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """In a child process: a forward and backward pass on meta tensors, every launch compiled.

    only: names of kernels, all if empty. norm: kernels divide queries and keys by their norms. group: heads of values
    for one of these.
    """
    import importlib

    import torch

    from flexsp.compiler.dispatch import executable_of
    from flexsp.kernels import executable, operators
    from flexsp.kernels.delta import calls
    from flexsp.kernels.delta.delta_plan import DeltaPlan
    from flexsp.kernels.delta.tiling import tiling_of
    from flexsp.runtime import tested_versions
    from flexsp.testing.offline import record_launches
    from flexsp.variants.delta_rule import OF_ANY_KEYS

    if ranks:  # the launches are those of several ranks, though the call is of one
        calls.tiling_of = lambda *args: tiling_of(*args[:8], True, *args[9:])  # type: ignore[assignment]
    if not gluon:
        tested_versions.GLUON = frozenset()  # type: ignore[misc]
    executable.propagate_step = lambda *args: lambda frame: None  # type: ignore[assignment]  # compiled in its own tests
    options = {"lowerings": [OF_ANY_KEYS]} if norm else {}
    code = importlib.import_module(f"flexsp.variants.{name}").make(H, K, V, getattr(torch, dtype), **options).kernels
    n_docs = 4 if packed else 0
    looks = code.program.meta.looks({"H": H, "K": K, "V": V}, 32768 * steps)
    looks |= {x: (kind, (32768, *shape[1:])) for x, (kind, shape) in looks.items() if x in ("q", "g")}
    looks |= {x: (getattr(torch, gates), shape) for x, (_, shape) in looks.items() if x in ("g", "erase", "write")}
    looks |= {x: (kind, (rows, heads // group, K)) for x, (kind, (rows, heads, *_)) in looks.items() if x in ("q", "k")}
    given = {x: torch.empty(1, *shape, dtype=kind, device="meta") for x, (kind, shape) in looks.items()}
    for x in given.values():
        x.requires_grad_()
    state = torch.empty(n_docs or 1, H, K, V, device="meta").requires_grad_()
    bounds = torch.empty(n_docs + 1, dtype=torch.int64, device="meta") if packed else None
    operators.chunk_table = lambda *args: torch.empty(1, 5, dtype=torch.int32, device="meta")  # type: ignore[assignment]
    with record_launches() as launches:
        found = executable_of(code, given, state, bounds, None)
        assert isinstance(found.plan, DeltaPlan)
        shard = 0, 32768 * steps, 32768 * steps
        o, final = operators.run(found, None, [*given.values()], state, bounds, shard)
        torch.autograd.backward([o, final], [torch.empty_like(o), state.detach()])
    launches = [x for x in launches if not only or x[0].__name__ in only]
    return told_of(launches)


def compile_all(*names: str) -> dict[str, list[dict[str, Any]]]:
    return {name: compile_config(**CONFIGS[name]) for name in names}


in_one_child = functools.cache(functools.partial(in_child, compile_all))


def compiled(name: str) -> list[dict[str, Any]]:
    return in_one_child(*next((group for group in GROUPS if name in group), [name]))[name]


def in_gluon(name: str) -> bool:
    how = {"name": "", "K": 128, "V": 128, "dtype": "bfloat16", "gluon": True} | CONFIGS[name]
    sizes = {how["K"], how["V"]} <= {64, 128}
    if how["name"] != "vector_gated_delta":
        sizes = how["K"] in range(64, 257, 16) and how["V"] % 64 == 0
    return how["gluon"] and how["dtype"] == "bfloat16" and sizes


@pytest.mark.parametrize("name", [*QUICK, *OVER_RANKS, *slow(*NO_DECAY, *IN_TRITON, *LARGE, *SLOW)])
def test_kernels(name: str) -> None:
    """All are there, with room in shared memory, and wait for the kernel before; lanes round sums alike, NaN stays, no
    barrier is missing and no register is read that nothing wrote."""
    found, of = compiled(name), CONFIGS[name].get("name", "gated_deltanet")
    ranks = CONFIGS[name].get("ranks", False)
    segments, packed = of == "gated_deltanet" or (of == "deltanet" and ranks), CONFIGS[name].get("packed", False)
    if in_gluon(name) and of in BY_CHANNEL:
        want = {"channel_scores", "inverse", "forward", "backward", "channel_grads"}
        want |= {"written_values", "written_values_grad"} if of == "gdn2" else set()
        heads = CONFIGS[name].get("H", 32)
        want |= {"scan_segments"} if heads < 128 else set()
        want |= {"segment_horizon"} if heads < 128 or ranks else set()
    elif in_gluon(name):
        want = {"wy_inverse", "forward", "backward", "grads", "reduce_gate_grads"}
        want |= {"scan_segments"} if segments else set()
        want |= {"horizons"} if segments and (packed or of != "deltanet") else set()
    else:
        want = {"output", "chunk_states", "output_backward"}
        want |= {"summarize", "summarize_backward"} if segments or ranks else set()
        want |= {"scan_segments"} if of == "gated_deltanet" or (segments and CONFIGS[name].get("H") == 8) else set()
        of_channels = OF_CHANNELS | {"channel_blocks", "channel_inverse"}
        of_tokens = {"wy_inverse", "wy_transform", "grads", "reduce_gate_grads"}
        want |= of_channels if of == "vector_gated_delta" else of_tokens
    want |= EXACT if CONFIGS[name].get("dtype", "bfloat16") == "bfloat16" else set()
    want |= {"tail_kernel"} if packed else set()
    if CONFIGS[name].get("norm"):
        want |= set() if in_gluon(name) else {"unit_keys_kernel"}
        want |= {"unit_keys_grad_kernel"} if of in BY_CHANNEL or not in_gluon(name) else set()
    assert {kernel["name"] for kernel in found} == want & {*CONFIGS[name].get("only", want)}, described(found)
    assert all(kernel["shared"] < H200.shared and kernel["waits_first"] for kernel in found), described(found)
    wrong = ("uneven_sums", "drops_nan", "races", "unwritten")
    assert not [x for x in found if any(x[what] for what in wrong)], described(found)


@pytest.mark.parametrize("name", [QUICK[0], QUICK[1], QUICK[3], *slow(*NO_DECAY, *IN_TRITON, *STRENGTHS, *OLMO)])
def test_products_of_training_shapes(name: str) -> None:
    found, products = compiled(name), IN_GLUON if in_gluon(name) else WALKS | OF_CHANNELS | {"wy_transform", "grads"}
    assert all(kernel["wgmma"] > 0 for kernel in found if kernel["name"] in products), described(found)
    assert not [x for x in found if x["name"] in EXACT and x["stack"]], described(found)
    if RELEASE in MAY_SPILL:
        may = {} if in_gluon(name) else MAY_SPILL[RELEASE]
        over = [x["name"] for x in found if x["stack"] > may.get(x["name"], 0)]
        assert not over, f"{over} spill:\n{described(found)}"
    if in_gluon(name) and CONFIGS[name].get("name") not in BY_CHANNEL and "no decay" not in name:
        large = [x["name"] for x in found if x["name"] in IN_GLUON and 2 * (x["shared"] + 1024) > 228 * 1024]
        assert not large, f"{large}: two do not fit a multiprocessor\n{described(found)}"
    if in_gluon(name):
        two = ("channel_scores",) if CONFIGS[name].get("name") == "gdn2" else ("channel_scores", "channel_grads")
        of_chunks = [x for x in found if x["name"] in two]
        large = [x for x in of_chunks if x["registers"] > 128 or 2 * (x["shared"] + 1024) > 228 * 1024]
        assert not large, f"two programs do not fit a multiprocessor\n{described(large)}"


@pytest.mark.parametrize("name", slow(*ALL_LARGE))
def test_large_heads(name: str) -> None:
    found = compiled(name)
    products = IN_GLUON if in_gluon(name) else WALKS | {"wy_transform", "grads", "channel_parts", "channel_grads"}
    assert all(kernel["wgmma"] > 0 for kernel in found if kernel["name"] in products), described(found)
    if RELEASE in MAY_SPILL:
        may = MAY_SPILL[RELEASE] if CONFIGS[name]["K"] <= 128 else {}
        packed, wide = CONFIGS[name].get("packed"), CONFIGS[name]["K"] > 128
        if in_gluon(name):  # addresses, while panels of values are multiplied; walks of documents with any size
            may = {"grads": 96} | ({"forward": 104, "backward": 32} if packed else {})
        if in_gluon(name) and wide:  # addresses beside a state in half of the registers
            may |= {"forward": 216, "backward": 120} if packed else {"forward": 192, "backward": 80}
        over = [x["name"] for x in found if x["stack"] > may.get(x["name"], 0)]
        assert not over, f"{over} spill:\n{described(found)}"


@pytest.mark.parametrize("name", slow(*SHARED))
def test_programs_share_a_multiprocessor(name: str) -> None:
    """Of many heads; with few heads each has one to itself, and copies further ahead."""
    found = compiled(name)
    large = [x["name"] for x in found if 2 * (x["shared"] + 1024) > 228 * 1024]
    assert not large, f"{large}: two do not fit a multiprocessor\n{described(found)}"
