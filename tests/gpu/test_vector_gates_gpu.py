"""The ops with vector gates and vector states on one GPU against the token loop in float64: whole and packed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from flexsp.testing.compare import DRAWS, check_functions
from flexsp.testing.oracles import token_loop
from tests.gpu.judge import CUDA, DTYPES, Sums, assert_right
from tests.harness.keys import Keys, wrong
from tests.harness.keys_of_programs import RWKV7, Own
from tests.harness.vector_gates import KEPT_WIDE, OPS, draw, float32_sums

DOCUMENTS = (0, 61, 61, 125, 126, 203, 203)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (33, 48), (128, 256), (256, 256)], ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("poisoned")
def test_against_the_token_loop(name: str, size: tuple[int, int], dtype: torch.dtype, packed: bool, seed: int) -> None:
    check(name, size, dtype, packed, seed)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.usefixtures("poisoned")
def test_strong_gates(dtype: torch.dtype, packed: bool, seed: int) -> None:
    """Of `chunk_gla`, so strong that its kernels for small gates run no chunk."""
    check("gla", (128, 128), dtype, packed, seed, strength=10.0)


def check(
    name: str, size: tuple[int, int], dtype: torch.dtype, packed: bool, seed: int, strength: float = 1.0
) -> None:  # fmt: skip
    op, T, B = OPS[name], DOCUMENTS[-1], 1 if packed else 2
    inputs = draw(name, B, T, states=len(DOCUMENTS) - 1 if packed else 2, K=size[0], V=size[1], seed=seed)
    if strength != 1.0:
        inputs[op.gate] = strength * inputs[op.gate]
    leaves = {key: x.to(torch.float32 if key in KEPT_WIDE else dtype) for key, x in inputs.items()}
    bounds = {"cu_seqlens": torch.tensor(DOCUMENTS)} if packed else {}

    def call(function: Any, **more: Any) -> Any:
        def run(given: dict[str, torch.Tensor]) -> Any:
            device = next(iter(given.values())).device
            return function(**given, **{key: x.to(device) for key, x in bounds.items()}, **more)

        return run

    made = torch.Generator().manual_seed(seed)
    outputs = op.chunk(**inputs, **bounds, output_final_state=True)
    do, dfinal = (torch.randn(x.shape, generator=made).bfloat16().double() for x in outputs)
    chunk = call(op.chunk, output_final_state=True)
    # In float32 sums of strong gates lose digits that the functions in PyTorch, which add gates up in float64, do not.
    rounded = call(op.oracle, engine=float32_sums)
    sums = Sums((op.gate,), rounded, DRAWS) if strength != 1.0 and dtype == torch.float32 else None
    assert_right(chunk, call(op.oracle, engine=token_loop), chunk, leaves, do, dfinal, dtype, seed, sums=sums)


@pytest.mark.parametrize("T", [32_768, 131_072])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.usefixtures("poisoned")
def test_recurrent_gemma(T: int, packed: bool, seed: int) -> None:
    """`rg_lru` of 4096 channels in bfloat16, values and all gradients."""
    recurrent_gemma(T, 4096, packed, seed)


def recurrent_gemma(T: int, D: int, packed: bool, seed: int, device: torch.device = CUDA) -> None:
    """Channels do not see each other: float64, and bfloat16 in PyTorch, have some of them. Decays of open gates are
    those that the layer begins with."""
    made, kept = torch.Generator(device).manual_seed(seed), slice(D // 3, None, D // 16)
    drawn = [torch.randn(1, T, D, generator=made, device=device).bfloat16() for _ in range(4)]
    inputs, do = dict(zip("xri", drawn, strict=False)), drawn[3]
    most = torch.empty(D, device=device).uniform_(0.9, 0.999, generator=made)
    inputs["Lambda"] = (-most.log() / 8).expm1().log()
    bounds = {"cu_seqlens": torch.tensor([0, T // 3, T // 3, T - 5])} if packed else {}

    def solved(channels: slice, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = {
            name: x[..., channels].to(device, torch.promote_types(dtype, x.dtype)).requires_grad_()
            for name, x in inputs.items()
        }  # fmt: skip
        given = {name: x.to(device) for name, x in bounds.items()}
        o, _ = OPS["rg_lru"].chunk(**leaves, **given, unit_start=True)
        grads = torch.autograd.grad(o, [*leaves.values()], do[..., channels].to(o.device, o.dtype))
        found = {"o": o.detach(), **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)}}
        return {name: (x[..., kept] if x.shape[-1] == D else x).cpu() for name, x in found.items()}

    cpu = torch.device("cpu")
    got = solved(slice(None), device, torch.bfloat16)
    want, low = (solved(kept, cpu, dtype) for dtype in (torch.float64, torch.bfloat16))
    check_functions([got], [want], [low])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("poisoned")
def test_the_same_bits(name: str, seed: int) -> None:
    """Over calls, gradients included."""
    inputs = draw(name, 1, 1500, states=1, K=64, V=64, seed=seed)
    found = []
    for _ in range(3):
        leaves = {
            key: x.to(CUDA, torch.float32 if key in KEPT_WIDE else torch.bfloat16).requires_grad_()
            for key, x in inputs.items()
        }
        outputs = OPS[name].chunk(**leaves, output_final_state=True)
        cotangents = [torch.ones_like(x) for x in outputs]
        found.append([*outputs, *torch.autograd.grad(list(outputs), list(leaves.values()), cotangents)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("T", "beta"), [(1024, 1.9), (1024, 2.0), (16384, 1.9)])
@pytest.mark.parametrize("kind", [RWKV7, Own], ids=lambda x: x.__name__)
@pytest.mark.usefixtures("poisoned")
def test_keys_of_a_small_vocabulary(kind: type[Keys], T: int, beta: float, seed: int) -> None:
    """In generated kernels: outputs, final states and all gradients within 2 % of the token loop. Of two heads one has
    such keys."""
    name = kind.__name__.lower()
    cases = [kind(name, many, beta, T=T, H=2, V=64) for many in ((1, 4) if T > 1024 else (0, 1, 2, 4, 32, 1000))]
    cases.append(kind(name, 4, beta, T=1000, H=2, V=64, bounds=(0, 61, 61, 700, 1000)))
    cases += [kind(name, 1, beta, T=200, H=2, K=K, V=V) for K, V in ((128, 128), (96, 200), (256, 256)) if T == 1024]
    found = [f"{keys}: {x}" for keys in cases for x in wrong(keys, seed, device="cuda")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("gate", [0.002, 0.02])
@pytest.mark.parametrize("rate", [0.8, 1.0, 1.06, 1.1])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.usefixtures("poisoned")
def test_one_key_and_slow_decays(K: int, rate: float, gate: float, seed: int) -> None:
    found = wrong(RWKV7("rwkv7", 1, rate, T=4096, H=2, K=K, V=64, gate=gate), seed, device="cuda")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("T", [1024, 16384])
def test_time_of_keys_that_repeat(T: int, seed: int) -> None:
    """Prints the milliseconds of 32 heads of 64 x 64, forward and with gradients: of keys of all kinds with rates of
    0.9, which no segment is done again for, and of one key with rates of 1.9. With -s."""
    times = {}
    for many, beta in ((1000, 0.9), (1, 1.9)):
        keys = RWKV7("rwkv7", many, beta, T=T, H=32, V=64)
        given = {x: y.cuda().requires_grad_() for x, y in keys.inputs(seed).items()}
        do = torch.randn(1, T, 32, 64, device="cuda", dtype=torch.bfloat16)
        for of in ("forward", "forward and backward"):
            for i in range(5):
                if i == 2:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                o, _ = keys.call(given)
                if of != "forward":
                    torch.autograd.grad(o, [*given.values()], do)
            torch.cuda.synchronize()
            times[many, of] = (time.perf_counter() - start) / 3 * 1e3
    print(f"{T} tokens:", *(f"{of}, {many} keys: {ms:.2f} ms" for (many, of), ms in times.items()), sep="\n    ")
    assert times[1000, "forward"] < times[1, "forward"], "what need not be done again is"
