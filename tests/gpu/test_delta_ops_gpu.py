"""The ops of the delta rules on one GPU against the token loop in float64, with all that comes before the kernels."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from flexsp.devices import H200
from flexsp.kernels.delta import calls, tiling
from flexsp.ops import _programs, chunk_gated_delta_product, chunk_gated_delta_rule
from flexsp.ops._recipe import forget
from flexsp.testing.cases import PROGRAM_CASES, Shape
from flexsp.testing.compare import WIDE, low_precision, relative_error
from tests.gpu.judge import CUDA, DTYPES, Sums, assert_right, assert_same
from tests.harness.keys import BOUND, Keys, drawn, error_of_steps, inverse_of_alike, passes, unlike, wrong
from tests.harness.keys import NAMES as RULES
from tests.harness.keys_of_programs import GDN2

LENGTHS = (61, 0, 64, 1, 77, 0)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", PROGRAM_CASES)
@pytest.mark.usefixtures("poisoned")
def test_against_the_token_loop(name: str, dtype: torch.dtype, packed: bool, seed: int) -> None:
    against_the_token_loop(name, dtype, packed, 64, 48, seed)


@pytest.mark.parametrize("size", [(256, 256), (192, 128), (64, 256), (96, 192)], ids=str)
@pytest.mark.parametrize("name", PROGRAM_CASES)
@pytest.mark.usefixtures("poisoned")
def test_large_heads(name: str, size: tuple[int, int], seed: int) -> None:
    against_the_token_loop(name, torch.bfloat16, True, *size, seed)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("size", [(64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("name", [name for name in PROGRAM_CASES if "gdn2" in name])
@pytest.mark.usefixtures("poisoned")
def test_two_strengths_in_gluon(name: str, size: tuple[int, int], packed: bool, seed: int) -> None:
    against_the_token_loop(name, torch.bfloat16, packed, *size, seed)


def against_the_token_loop(name: str, dtype: torch.dtype, packed: bool, K: int, V: int, seed: int) -> None:
    case, bounds = PROGRAM_CASES[name], torch.tensor([0, *itertools.accumulate(LENGTHS)])
    T, N = (int(bounds[-1]), len(LENGTHS)) if packed else (150, 2)
    made = case.inputs(Shape(B=1 if packed else 2, T=T, H=2, K=K, V=V, states=N), seed)
    constants = {key: made.pop(key) for key in case.constants}
    leaves = {key: x.to(torch.float32 if key in WIDE else dtype) for key, x in made.items()}

    def call(function: Any, **more: Any) -> Any:
        def run(given: dict[str, torch.Tensor]) -> Any:
            cu = {"cu_seqlens": bounds.to(given["q"].device)} if packed else {}
            o, final = function(**given, **constants, **cu, **more)
            return o, final

        return run

    draw = torch.Generator().manual_seed(seed)
    do = torch.randn(*leaves["q"].shape[:2], 2, V, generator=draw).bfloat16().double()
    dfinal = torch.randn(N, 2, K, V, generator=draw).bfloat16().double()
    op = call(case.op, output_final_state=True)
    sums = Sums(case.shared, call(case.oracle, engine=low_precision), case.draws)
    apart = sums if case.shared and dtype == torch.float32 else None
    assert_right(op, call(case.oracle), op, leaves, do, dfinal, dtype, seed, sums=apart)


@pytest.mark.parametrize("T", [150, 20000])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    ("n", "gated", "packed"), [(2, True, False), (3, True, True), (2, False, True), (3, False, False)]
)
def test_keys_of_tokens(
    n: int, gated: bool, packed: bool, dtype: torch.dtype, T: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Long heads are cut into segments, the same ones here. Rows of queries between zeros give the same bits."""
    monkeypatch.setattr(tiling, "_parts", lambda gates, *_: n if gates else 1)
    tiling.tiling_of.cache_clear()
    try:
        keys_of_tokens(n, gated, packed, dtype, T, seed)
    finally:
        tiling.tiling_of.cache_clear()


def keys_of_tokens(n: int, gated: bool, packed: bool, dtype: torch.dtype, T: int, seed: int) -> None:
    bounds = torch.tensor([0, 61, 61, 125, T], device=CUDA) if packed else None
    given = drawn(seed, T, n, gated, dtype, 4 if packed else 1, 128, 64)
    assert unlike({name: x.to(CUDA) for name, x in given.items()}, n, gated, bounds) == []


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.usefixtures("poisoned")
def test_parts_of_heads(n: int, packed: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as where a backward pass goes through the same segments at once."""
    T, seen = 20000 + n, []
    bounds = torch.tensor([0, 61, 61, 125, T], device=CUDA) if packed else None
    given = {
        name: x.to(CUDA) for name, x in drawn(seed, T, n, True, torch.bfloat16, 4 if packed else 1, 128, 64).items()
    }
    found = []
    for together in (False, True):

        def planned(*args: Any, together: bool = together) -> tiling.Tiling:
            made = tiling.tiling_of(*args)
            made = replace(made, per_part=made.n_seg) if together else made
            seen.append(len(made.parts))
            return made

        _programs._program.cache_clear()  # its executables have the plan
        forget()
        monkeypatch.setattr(calls, "tiling_of", planned)
        found.append(passes(chunk_gated_delta_product, given, num_householder=n, cu_seqlens=bounds))
    _programs._program.cache_clear()
    assert seen == [n, 1]
    assert_same(found[::-1])


def test_heads_that_the_engine_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Hopper: kernels that are generated do."""
    monkeypatch.setattr(tiling, "of_device", lambda device: replace(H200, capability=(8, 0)))
    q, k, v = torch.randn(3, 1, 8, 2, 256, device=CUDA).unbind(0)
    g, beta = -torch.rand(1, 8, 2, device=CUDA), torch.rand(1, 8, 2, device=CUDA)
    k = torch.nn.functional.normalize(k, dim=-1)
    want, _ = chunk_gated_delta_rule(*(x.double() for x in (q, k, v, g, beta)))
    assert relative_error(chunk_gated_delta_rule(q, k, v, g, beta)[0], want) < 1e-4


@pytest.mark.parametrize("size", [(64, 64), (128, 128), (96, 200), (96, 192)], ids=str)
@pytest.mark.parametrize("beta", [1.5, 1.9, 2.0])
@pytest.mark.parametrize("name", [*RULES, "gdn2"])
@pytest.mark.usefixtures("poisoned")
def test_keys_of_a_small_vocabulary(name: str, beta: float, size: tuple[int, int], seed: int) -> None:
    """Of two heads one has such keys; outputs, final states and all gradients within 2 % of the token loop."""
    given: dict[str, Any] = {"beta": beta, "H": 2, "K": size[0], "V": size[1]}
    kind = GDN2 if name == "gdn2" else Keys
    cases = [kind(name, many, T=1024, **given) for many in (0, 1, 2, 4, 32, 1000)]
    cases.append(kind(name, 4, T=1000, bounds=(0, 61, 61, 700, 1000), **given))
    found = [f"{keys}: {x}" for keys in cases for x in wrong(keys, seed, device="cuda")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("V", [16, 64, 128])
@pytest.mark.parametrize("name", ["delta", "gated", "kda"])
@pytest.mark.usefixtures("poisoned")
def test_gradients_of_steps(name: str, V: int, seed: int) -> None:
    """One key with beta 1: dbeta is as exact as dv, of kernels in Triton and in Gluon."""
    assert error_of_steps(Keys(name, 1, 1.0, T=500, K=max(64, V), V=V, gate=0.0), seed, "cuda") <= BOUND


@pytest.mark.parametrize("K", [32, 64, 128])
@pytest.mark.parametrize("name", ["delta", "gated", "kda", "gdn2"])
@pytest.mark.usefixtures("poisoned")
def test_one_step_size(name: str, K: int, seed: int) -> None:
    """Tokens that all have one key and one step size, which is no number of bfloat16: roundings of an inverse's equal
    entries do not add up over a chunk. Beyond 1 such tokens go one by one. With 32 keys kernels are in Triton."""
    kind: Any = GDN2 if name == "gdn2" else Keys
    cases = [(kind(name, 1, (random.randrange(200, 250) + 0.48) / 256, T=1000, K=K, V=64, gate=0.0), 0.1)]
    cases += [(kind(name, many, random.uniform(1.06, 1.3), T=1000, H=2, K=K, V=64), BOUND) for many in (1, 2)]
    found = [f"{keys}: {x}" for keys, bound in cases for x in wrong(keys, seed, device="cuda", bound=bound)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("gluon", [False, True])
@pytest.mark.parametrize("K", [64, 128])
def test_inverses_of_keys_that_are_alike(K: int, gluon: bool, seed: int) -> None:
    error, rounding, above = inverse_of_alike(None, seed, K, "cuda", gluon)
    assert error <= 2 * rounding and above == 0, (error, rounding, above)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("size", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("name", ["gated", "kda"])
@pytest.mark.usefixtures("poisoned")
def test_steps_that_do_not_reflect(name: str, size: tuple[int, int], packed: bool, seed: int) -> None:
    """With beta up to 1 keys that repeat stay in chunks, and round as chunks in PyTorch with inverses in float32 do."""
    T, bounds = 200, (0, 61, 61, 200) if packed else ()
    for many, beta in itertools.product((1, 4), (0.9, 1.0)):
        keys = Keys(name, many, beta, T=T, K=size[0], V=size[1], bounds=bounds)
        leaves, draw = keys.inputs(seed), torch.Generator().manual_seed(seed)
        shapes = (1, T, keys.H, keys.V), leaves["initial_state"].shape
        do, dfinal = (torch.randn(shape, generator=draw).bfloat16().double() for shape in shapes)
        calls = keys.call, keys.loop, partial(keys.loop, engine=low_precision)
        assert_right(*calls, leaves, do, dfinal, keys.dtype, seed)


@pytest.mark.parametrize("many", [1, 4, 1000])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("poisoned")
def test_reflections_of_a_long_text(name: str, many: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error grows with the text; of one segment, and of several where heads are cut."""
    for long in (tiling.LONG, 16):
        monkeypatch.setattr(tiling, "LONG", long)
        tiling.tiling_of.cache_clear()
        forget()
        try:
            found = wrong(Keys(name, many, T=8192, K=64, V=64), seed, device="cuda")
        finally:
            tiling.tiling_of.cache_clear()
        assert not found, (long, found)
