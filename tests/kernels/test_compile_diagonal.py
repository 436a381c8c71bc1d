"""The diagonal engine's kernels compiled for sm_90 without a GPU: shared memory, spills, tensor-core instructions.

Spills (ptxas's stack frame, bytes a thread) are bounded in the training shapes, unpacked bf16 heads of 64 and 128, by a
table: a walk in Gluon, whose state takes half of all registers, keeps some where keys have gates of their own. Releases
of Triton bring their own LLVM and ptxas; where the table has no release, its spills are not tested. Spills into L1 are
accepted elsewhere: with K or V of 120 or 256, with packed documents, and in fp32, whose products are three tf32
products each: both operands are split in two in registers. There only shared memory is bounded.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import triton

from flexsp.devices import H200
from flexsp.runtime.triton_private import RELEASE
from tests.harness.compiling import described, in_child, told_of
from tests.marks import slow

pytestmark = pytest.mark.compiles

CONFIGS: dict[str, dict[str, Any]] = {
    "bf16 128": {"dtype": "bfloat16", "K": 128, "V": 128},
    "bf16 120": {"dtype": "bfloat16", "K": 120, "V": 128},
    "bf16 64": {"dtype": "bfloat16", "K": 64, "V": 64},
    "bf16 256": {"dtype": "bfloat16", "K": 256, "V": 256},
    "bf16 256, no decay": {"dtype": "bfloat16", "K": 256, "V": 128, "gated": False, "learned": False},
    "bf16 256, write gates": {"dtype": "bfloat16", "K": 256, "V": 256, "writes": True},
    "bf16 128, write gates": {"dtype": "bfloat16", "K": 128, "V": 128, "writes": True},
    "bf16 200": {"dtype": "bfloat16", "K": 200, "V": 256},
    "fp32 128": {"dtype": "float32", "K": 128, "V": 128},
    "fp32 64": {"dtype": "float32", "K": 64, "V": 64},
    "bf16 120, fixed decay": {"dtype": "bfloat16", "K": 120, "V": 128, "learned": False},
    "bf16 128, no decay": {"dtype": "bfloat16", "K": 128, "V": 128, "gated": False, "learned": False},
    "bf16 128, packed": {"dtype": "bfloat16", "K": 128, "V": 128, "packed": True},
    "bf16 128, one column": {"dtype": "bfloat16", "K": 128, "V": 1, "values": "float32"},
    "bf16 128 and 64": {"dtype": "bfloat16", "K": 128, "V": 64},
    "bf16 Mamba-3": {"dtype": "bfloat16", "K": 128, "V": 64, "H": 80, "weights": True},
    "bf16 Mamba-3 256, packed": {"dtype": "bfloat16", "K": 256, "V": 64, "weights": True, "packed": True},
    "bf16 Mamba-3 128": {"dtype": "bfloat16", "K": 128, "V": 128, "weights": True},
    "bf16 Mamba-3 of 256": {"dtype": "bfloat16", "K": 256, "V": 128, "weights": True, "halves": True},
    "fp32 Mamba-3": {"dtype": "float32", "K": 128, "V": 64, "weights": True},
    "fp32 spectral": {"dtype": "float32", "K": 128, "V": 128, "spectral": True},
    "fp32 spectral, packed": {"dtype": "float32", "K": 64, "V": 40, "spectral": True, "packed": True},
    "bf16 Mamba-2": {"dtype": "bfloat16", "K": 128, "V": 64, "H": 80, "groups": 1},
    "bf16 Mamba-2 256, packed": {"dtype": "bfloat16", "K": 256, "V": 128, "groups": 2, "packed": True},
    "bf16 Mamba-2 100, packed": {"dtype": "bfloat16", "K": 100, "V": 40, "groups": 2, "packed": True},
    "bf16 Mamba-2 64, blocks": {"dtype": "bfloat16", "K": 64, "V": 64, "groups": 1, "T": 512},
    "fp32 Mamba-2": {"dtype": "float32", "K": 128, "V": 64, "groups": 4},
    "bf16 16, odd sizes": {"dtype": "bfloat16", "K": 16, "V": 16, "B": 2, "T": 333, "H": 3},
}
QUICK = ["bf16 128", "fp32 64", "bf16 128, packed", "bf16 Mamba-2", "bf16 256"]
SLOW = ["bf16 120", "bf16 16, odd sizes", "bf16 64", "fp32 128", "bf16 256, write gates", "bf16 128, write gates",
        "bf16 128, no decay", "bf16 256, no decay", "bf16 200", "bf16 120, fixed decay", "bf16 128, one column",
        "bf16 128 and 64", "bf16 Mamba-2 256, packed", "bf16 Mamba-2 100, packed", "bf16 Mamba-2 64, blocks",
        "fp32 Mamba-2", "bf16 Mamba-3", "bf16 Mamba-3 256, packed", "fp32 Mamba-3", "bf16 Mamba-3 128",
        "bf16 Mamba-3 of 256", "fp32 spectral", "fp32 spectral, packed"]
ONLY_SIZES = ["bf16 128, no decay", "bf16 120, fixed decay"]  # quickly: how much shared memory walks need
TRAINING = ["bf16 128", "bf16 Mamba-2", "bf16 256", *slow("bf16 64", "bf16 256, no decay", "bf16 Mamba-3"),
            *slow("bf16 Mamba-3 128", "bf16 256, write gates", "bf16 128, write gates")]
MAY_SPILL: dict[tuple[int, ...], dict[str, dict[str, int]]] = {  # of a release and a shape; 0 if not here
    (3, 6): {
        "bf16 128": {}, "bf16 64": {}, "bf16 Mamba-3": {"dq_kernel": 8, "dkv_kernel": 64},
        "bf16 Mamba-3 128": {"dkv_kernel": 8},
        "bf16 Mamba-2": {"output_kernel": 24, "shared_keys_kernel": 16},
        "bf16 256": {}, "bf16 256, no decay": {},
        "bf16 256, write gates": {"walk_kernel": 56}, "bf16 128, write gates": {},
    },
}
_SIZES = ": sizes"
WALKS = {"summarize_kernel", "output_kernel", "dq_kernel", "dkv_kernel", "walk_kernel"}
IN_TRITON = {"output_kernel", "dq_kernel", "dkv_kernel"}
KERNELS = WALKS - {"walk_kernel"} | {"gate_kernel", "gate_grad_kernel", "token_sums_kernel", "tail_kernel"}
OF_MAMBA2 = {"step_kernel", "step_grads_kernel", "sum_heads_kernel"}
BY_CHUNKS = {"chunk_states_kernel", "shared_values_kernel", "shared_keys_kernel", "chunk_gate_grad_kernel"}


def launches_of(
    dtype: str, K: int, V: int, gated: bool = True, learned: bool = True, packed: bool = False,
    B: int = 1, T: int = 32768, H: int = 32, values: str | None = None, groups: int = 0, weights: bool = False,
    writes: bool = False, halves: bool = False, spectral: bool = False,
) -> list[Any]:  # fmt: skip
    """In a child process: the launches of a forward and backward pass on meta tensors.

    `learned`: the gate has a gradient. `groups`: of Mamba-2, 0 for other ops. `weights`: of tokens' own values, and
    tokens turn the state. `writes`: of tokens' keys. `halves`: two heads share keys, as halves of large values do.
    `spectral`: tokens turn the state from both sides.
    """
    import torch

    from flexsp.kernels import executable, operators
    from flexsp.testing.offline import record_launches
    from tests.harness.executables import scalar_decay_executable, ssd_executable

    def meta(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=kind, device="meta")

    executable.propagate_step = lambda *args: lambda frame: None  # type: ignore[assignment]  # compiled in its own tests
    kind = getattr(torch, dtype)
    q, k = (meta(B, T, groups or H // (1 + halves), K, kind=kind) for _ in range(2))
    v, do = (meta(B, T, H, V, kind=getattr(torch, values or dtype)) for _ in range(2))
    n_docs = 4 if packed else 0
    state, bounds = meta(n_docs or B, H, K, V).requires_grad_(), meta(n_docs + 1, kind=torch.int64) if packed else None
    table = meta(T // 64 + n_docs if packed else 0, 5, kind=torch.int32)
    operators.chunk_table = lambda *args: table  # type: ignore[assignment]
    given = {"q": q, "k": k, "v": v}
    if groups:
        given |= {"dt": meta(B, T, H), **{name: meta(H).requires_grad_() for name in ("A", "dt_bias", "D")}}
    elif gated:
        given |= {"g": meta(B, T, H).requires_grad_(learned)}
    if writes:
        given |= {"i": meta(B, T, H).requires_grad_()}
    if weights:
        given |= {"w": meta(B, H, T).transpose(1, 2).requires_grad_()}
        given |= {"turned": meta(B, T, q.shape[2], K // 4).requires_grad_()}
    if spectral:
        given |= {name: meta(B, T, H, n // 2).requires_grad_() for name, n in (("turned", K), ("turned_values", V))}
    with record_launches() as launches:
        found = (ssd_executable if groups else scalar_decay_executable)(given, state, n_docs, K**-0.5)
        o, final = operators.run(found, None, [*given.values()], state, bounds, (0, T, T))
        torch.autograd.backward([o, final], [do, state.detach()])
    return launches


def compile_config(only_sizes: bool = False, **config: Any) -> list[dict[str, Any]]:
    """All launches compiled; or what shared memory walks need, which is known before they are assembled."""
    from flexsp.testing.offline import shared_of

    launches = launches_of(**config)
    if only_sizes:
        walks = [launch for launch in launches if launch[0].__name__ in WALKS]
        names = [launch[0].__name__ for launch in walks]
        return [{"name": name, "shared": n} for name, n in zip(names, shared_of(walks, 90), strict=True)]
    return told_of(launches)


def compile_all(*names: str) -> dict[str, list[dict[str, Any]]]:
    return {name: compile_config(name.endswith(_SIZES), **CONFIGS[name.removesuffix(_SIZES)]) for name in names}


@functools.cache
def group(of_quick: bool) -> dict[str, list[dict[str, Any]]]:
    quick = [*QUICK, *(f"{x}{_SIZES}" for x in ONLY_SIZES)]
    return in_child(compile_all, *(quick if of_quick else SLOW))


def compiled(name: str) -> list[dict[str, Any]]:
    return group(name in QUICK or name.endswith(_SIZES))[name]


@pytest.mark.parametrize("name", [*QUICK, *slow(*SLOW)])
def test_shared_memory(name: str) -> None:
    found = compiled(name)
    missing = {"gate_kernel"} if "no decay" in name else set()
    missing |= set() if "packed" in name else {"tail_kernel"}
    missing |= {"gate_grad_kernel"} if "decay" in name else set()
    if "Mamba-2" in name:
        missing |= {"gate_kernel"}
    missing |= set() if "Mamba-3" in name or "write gates" in name else {"token_sums_kernel"}
    of_mamba2 = OF_MAMBA2 if "Mamba-2" in name else {"sum_heads_kernel"} if CONFIGS[name].get("halves") else set()
    if name.startswith("bf16 Mamba-2") and CONFIGS[name]["K"] <= 128:  # larger states are walked
        missing |= {"dq_kernel", "dkv_kernel", "gate_grad_kernel"}
        of_mamba2 = OF_MAMBA2 - {"sum_heads_kernel"} | BY_CHUNKS | ({"sum_heads_kernel"} if "blocks" in name else set())
    if "spectral" in name:
        of_mamba2 = {"value_turns_kernel"}
    if "column" in name:
        missing, of_mamba2 = missing | IN_TRITON | {"gate_grad_kernel"}, BY_CHUNKS | {"column_output_kernel"}
    K, V = CONFIGS[name]["K"], CONFIGS[name]["V"]
    large = (K == 256 and V > 64) or (K == V == 128 and name.startswith("bf16") and "no decay" not in name)
    if large and "Mamba-3" not in name:
        missing, of_mamba2 = missing | IN_TRITON, of_mamba2 | {"walk_kernel"}
    assert {kernel["name"] for kernel in found} == KERNELS - missing | of_mamba2
    assert sum(kernel["name"] == "summarize_kernel" for kernel in found) == 2  # one a direction
    assert all(kernel["shared"] < H200.shared for kernel in found), described(found)


@pytest.mark.parametrize("name", ONLY_SIZES)
def test_shared_memory_without_learned_gates(name: str) -> None:
    """What is not weighted is read from shared memory, and held there longer."""
    found = compiled(name + _SIZES)
    assert {kernel["name"] for kernel in found} == IN_TRITON | {"summarize_kernel"}
    assert all(kernel["shared"] < H200.shared for kernel in found), described(found)


@pytest.mark.parametrize("name", TRAINING)
def test_registers_of_training_shapes(name: str) -> None:
    if RELEASE not in MAY_SPILL:
        pytest.skip(f"no spills are stated for Triton {triton.__version__}")
    found, allowed = compiled(name), MAY_SPILL[RELEASE][name]
    over = [kernel["name"] for kernel in found if kernel["stack"] > allowed.get(kernel["name"], 0)]
    assert not over, f"{over} spill:\n{described(found)}"


OF_PRODUCTS = ["bf16 128", "bf16 128, packed", "bf16 256", *slow(*(x for x in SLOW if "fp32" not in x))]


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_bf16_products_use_wgmma(name: str) -> None:
    """And go on side by side: where registers do not suffice, ptxas has each of them wait for the one before."""
    found = compiled(name)
    assert not any(kernel["serialized"] for kernel in found if kernel["wgmma"] > 4), described(found)
    without = {"summarize_kernel"} if "column" in name else set()  # sums in fp32
    assert all(kernel["wgmma"] > 0 for kernel in found if kernel["name"] in WALKS - without), described(found)


@pytest.mark.parametrize("name", [*QUICK, *slow(*SLOW)])
def test_nothing_touches_memory_before_the_kernel_before_is_done(name: str) -> None:
    assert all(kernel["waits_first"] for kernel in compiled(name)), described(compiled(name))


@pytest.mark.parametrize("what", ["uneven_sums", "drops_nan", "races", "unwritten"])
@pytest.mark.parametrize("name", [*QUICK, *slow(*SLOW)])
def test_what_the_interpreter_cannot_show(name: str, what: str) -> None:
    """Lanes that round a sum differently, NaN that gives way to a number, missing barriers, registers not written."""
    assert not any(kernel[what] for kernel in compiled(name)), described(compiled(name))
