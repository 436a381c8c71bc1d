"""Delta rules and RWKV-7 in bfloat16 whose keys repeat or are alike, with beta beyond 1: kernels, those of the engine
for delta rules and generated ones, against token loops in float64.

A reflection (beta 2) lets no error decay, so that rounded inverses of chunks would be off by any factor: see
`flexsp.kernels.delta.exact` and `flexsp.compiler.backend.exact`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from flexsp.compiler.planning.generated_plan import GeneratedPlan
from flexsp.compiler.planning.tiling import choose_tiling
from flexsp.testing.compare import (
    DRAWS,
    WIDE,
    RoundedProducts,
    a_rounding_off,
    check_functions,
    low_precision,
    relative_error,
)
from flexsp.testing.ranks import run_ranks
from tests import variants
from tests.harness.generated import MANY_SEGMENTS, differentiated
from tests.harness.interpreted import INTERPRETED, poisoned
from tests.harness.keys import (
    BOUND,
    NAMES,
    Keys,
    check_equal_entries,
    error_of_steps,
    inverse_of_alike,
    roundings_of_equal_entries,
    wrong,
)
from tests.harness.keys_of_programs import GDN2, RWKV7, Own
from tests.marks import quick

GENERATED = ("gated, generated", "rwkv7", "own")


def of_kernels(sp: Any, cases: list[Keys], seed: int, bound: float = BOUND) -> list[str]:
    found = []
    for keys in cases:
        with poisoned(keys.segments, keys.H, keys.device):
            found += [f"{keys}: {x}" for x in wrong(keys, seed, sp if keys.lengths else None, bound=bound)]
    return found


LESS: dict[str, Any] = {"K": 24, "generated": True}
CASES = {
    "delta": [Keys("delta", 4, 1.9, T=67, H=2), Keys("delta", 1, T=66, bounds=(0, 20, 20, 66))],
    "gated": [Keys("gated", 2, T=140, segments=MANY_SEGMENTS, bounds=(0, 66, 140)),
              Keys("gated", 1, T=70, K=32, H=2, B=2, segments=MANY_SEGMENTS)],
    "kda": [Keys("kda", 1, T=66), Keys("kda", 1, T=20, K=32, H=4, group=2, B=2),
            Keys("kda", 0, 1.9, T=40, bounds=(0, 33, 40))],
    "product": [Keys("product", 1, T=36, bounds=(0, 33, 36))],
    "kda product": [Keys("kda product", 1, T=36, bounds=(0, 33, 36)),
                    Keys("kda product", 1, T=20, K=32, H=4, group=2, B=2)],
    "kda product, generated": [Keys("kda product", 4, T=36, bounds=(0, 33, 36), **LESS)],
    "delta, generated": [Keys("delta", 4, 1.9, T=67, H=2, V=17, **LESS)],
    "gated, generated": [Keys("gated", 1, T=40, bounds=(0, 4, 4, 40), **LESS)],
    "kda, generated": [Keys("kda", 1, 1.9, T=40, **LESS)],
    "product, generated": [Keys("product", 4, T=36, bounds=(0, 33, 36), **LESS)],
    "rwkv7": [RWKV7("rwkv7", 1, T=40, bounds=(0, 4, 4, 40), **LESS), RWKV7("rwkv7", 1, 1.0, T=70, gate=0.002, **LESS)],
    "rwkv7, heads": [RWKV7("rwkv7", 4, 1.9, T=44, H=2, **LESS), RWKV7("rwkv7", 1, 1.9, T=70, **LESS)],
    "gdn2": [GDN2("gdn2", 1, 1.9, T=36, bounds=(0, 4, 36), **LESS)],
    "gdn2, heads": [GDN2("gdn2", 4, 1.9, T=44, H=2, **LESS), GDN2("gdn2", 0, T=70, **LESS)],
    "own": [Own("own", 1, T=36, H=3, bounds=(0, 4, 36), **LESS), Own("own", 4, T=12, V=64, generated=True)],
    "large": [Keys("gated", 1, K=256, V=130), Keys("kda", 1, K=200, V=256)],
    "longer": [Keys(name, many, T=300) for name in NAMES for many in (1, 4)],
    "short documents": [
        kind(name, 1, rate, T=4 * n, bounds=(0, n, 2 * n, 3 * n, 4 * n), **LESS)
        for kind, name in ((RWKV7, "rwkv7"), (Own, "own")) for n, rate in ((5, 2.0), (20, 1.1))
    ],
}


@pytest.mark.parametrize("what", quick(CASES, "delta", "gated", "kda", "kda product", *GENERATED))
def test_against_token_loops(what: str, seed: int) -> None:
    (found,) = run_ranks(of_kernels, 1, CASES[what], seed, env=INTERPRETED)
    assert not found, found


def in_panels(sp: Any, seed: int) -> list[str]:
    from flexsp.kernels.delta.base_plan import BasePlan

    with mock.patch.object(BasePlan, "_exact_columns", 16):
        return of_kernels(sp, [Keys("gated", 1, T=9, K=24, V=20), Keys("kda", 1, T=9, K=24, V=36)], seed)


def test_values_in_panels(seed: int) -> None:
    """Gradients where a program has a part of the values' columns at a time, as it has beside many channels."""
    (found,) = run_ranks(in_panels, 1, seed, env=INTERPRETED)
    assert not found, found


def judged(sp: Any, cases: list[Keys], seed: int) -> None:
    """By chunks in PyTorch, on data that is a rounding off and with products of operands in bfloat16."""
    for keys in cases:
        given, made = keys.inputs(seed), torch.Generator().manual_seed(seed + 1)
        shapes = (*given["q"].shape[:2], keys.H, keys.V), given["initial_state"].shape
        ends = [tuple(torch.randn(x, generator=made).bfloat16().double() for x in shapes) for _ in range(DRAWS)]
        with poisoned(keys.segments, keys.H):
            found = differentiated(lambda x, keys=keys: keys.call(x), dict(given), ends[:1])
        want = differentiated(lambda x, keys=keys: keys.loop(x), {x: y.double() for x, y in given.items()}, ends)
        off = {x: y if x in WIDE else a_rounding_off(y, made, torch.bfloat16) for x, y in given.items()}
        ends = [tuple(a_rounding_off(x, made, torch.bfloat16) for x in each) for each in ends]
        with RoundedProducts(torch.bfloat16):
            low = differentiated(lambda x, keys=keys: keys.loop(x, low_precision), off, ends)
        check_functions(found, want, low)


@pytest.mark.parametrize("name", quick(NAMES, "gated"))
def test_steps_that_do_not_reflect(name: str, seed: int) -> None:
    """With beta up to 1 such keys stay in chunks, and round as those do."""
    run_ranks(judged, 1, [Keys(name, 0, 0.7), Keys(name, 1, 1.0)], seed, env=INTERPRETED)


@pytest.mark.parametrize("name", quick(("delta", "gated", "kda", "delta, generated"), "delta"))
def test_one_step_size(name: str, seed: int) -> None:
    """Tokens that all have one key and one step size, which is no number of bfloat16: an inverse's entries are equal,
    and their roundings must not add up over a chunk. Beyond 1 such tokens go one by one."""
    more = LESS if "generated" in name else {}
    name = name.removesuffix(", generated")
    one = Keys(name, 1, (random.randrange(200, 250) + 0.48) / 256, T=128, gate=0.0, **more)
    # Gradients of so few steps are up to 0.15 off, where roundings add up 0.4; `test_equal_entries_of_an_inverse` is
    # the sharp test.
    (found,) = run_ranks(of_kernels, 1, [one], seed, 0.25, env=INTERPRETED)
    assert not found, found
    few = Keys(name, random.choice((1, 2)), random.uniform(1.06, 1.3), H=2, **more)
    (found,) = run_ranks(of_kernels, 1, [few], seed, env=INTERPRETED)
    assert not found, found


def steps_off(sp: Any, keys: Keys, seed: int) -> float:
    with poisoned(keys.segments, keys.H):
        return error_of_steps(keys, seed)


@pytest.mark.parametrize("name", quick(("delta", "gated", "kda"), "gated"))
def test_gradients_of_steps(name: str, seed: int) -> None:
    """With one key that nearly all of a state's gradient is orthogonal to: dbeta is as exact as dv."""
    (found,) = run_ranks(steps_off, 1, Keys(name, 1, 1.0, T=400, V=32, gate=0.0), seed, env=INTERPRETED)
    assert found <= BOUND


@pytest.mark.parametrize("name", quick(("delta", "gated", "kda"), "gated"))
def test_over_ranks(name: str, seed: int) -> None:
    """A rank without tokens; documents over ranks."""
    given: dict[str, Any] = {"T": 50, "K": 32, "lengths": (30, 0, 20)}
    # Of several heads: the gradients of beta of one, twenty numbers on a rank, are at the bound for some seeds.
    cases = [Keys(name, 1, 1.9, **given, H=3), Keys(name, 4, **given, bounds=(0, 35, 50))]
    found = run_ranks(of_kernels, 3, cases, seed, env=INTERPRETED)
    assert not any(found), found


@pytest.mark.parametrize("name", quick(("rwkv7", "gated"), "rwkv7"))
def test_generated_over_ranks(name: str, seed: int) -> None:
    """What a shard hands on is exact, in both directions."""
    kind = RWKV7 if name == "rwkv7" else Keys
    found = run_ranks(of_kernels, 2, [kind(name, 1, T=40, lengths=(22, 18), **LESS)], seed, env=INTERPRETED)
    assert not any(found), found


def sizes_of_inverses(sp: Any, repeats: bool, seed: int) -> list[list[float]]:
    """Of a chunk of up to 64 tokens of generated kernels, for each of `KEYS`: by the kernel, with a smaller number
    there before, with a larger one, and in float64."""
    from flexsp.compiler.backend.intrinsic_kernels import inverse_kernel

    draw, found = torch.Generator().manual_seed(seed), []
    for many, K, rate, tokens in KEYS:
        keys = torch.nn.functional.normalize(torch.randn(many, K, generator=draw), dim=-1)
        k = keys[torch.randint(0, many, (64,), generator=draw)]
        k[tokens:] = 0.0
        x = (rate * (k @ k.T)).tril(-1)
        table = torch.tensor([[0, tokens, 0, 1, 1]], dtype=torch.int32)
        whole = torch.linalg.inv(x.double() + torch.eye(64, dtype=torch.float64)).tril(-1).square().sum()
        if x.square().sum() > 4 * tokens:
            whole *= 1.225
        if repeats and x.square().sum() > 16 * tokens:
            whole *= -1
        made = []
        for before, more in ((float("nan"), False), (0.5, True), (-1e9, True)):
            gain, y = torch.full((1,), before), torch.full((64, 64), float("nan"))
            packed = tokens < 64
            flags = {"C": 64, "GAIN": True, "MORE": more, "REPEATS": repeats, "DITHERED": False, "PACKED": packed}
            flags["PDL"] = False
            inverse_kernel[(1, 1)](x.clone(), y, gain, table if packed else None, 64, **flags)
            made.append(gain.item())
        found.append([*made, whole.item()])
    return found


KEYS = [
    (1000, 64, 1.0, 64), (1000, 32, 0.9, 64), (4, 64, 1.0, 64), (1, 64, 1.0, 64), (1, 64, 1.05, 64), (1, 64, 1.9, 64),
    (4, 64, 2.0, 64), (1, 64, 1.0, 20), (1, 64, 1.1, 20), (1, 64, 2.1, 3), (1, 64, 0.75, 64), (1, 64, 0.65, 64),
]  # fmt: skip


@pytest.mark.parametrize("repeats", [False, True])
def test_which_segments_of_generated_kernels(repeats: bool, seed: int) -> None:
    """With unit keys and rates up to 1 none is because of its size, nor in short documents. Where few keys repeat a
    program may ask for it."""
    from flexsp.kernels.delta.exact import LIMIT

    (found,) = run_ranks(sizes_of_inverses, 1, repeats, seed, env=INTERPRETED)
    for (many, _, rate, tokens), (first, second, third, want) in zip(KEYS, found, strict=True):
        assert abs(first - want) <= 1e-4 * abs(want) + 1e-4 and first == second and third == -1e9
        assert (abs(first) > tokens * float(LIMIT.value)) == (rate > 1)
        assert (first < 0) == (repeats and rate**2 * tokens / many > 32)


def chosen(sp: Any, packed: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Of two heads, whose chunks of 64, 64 and 22 tokens are in two segments: those done token by token. And of three
    heads whose chunks are in one segment, where programs ask for it."""
    from flexsp.kernels.delta.exact import choose

    gain = torch.tensor([[1.0, 80.1, 27.4], [79.9, 79.9, 27.6]])
    table = torch.tensor([[64 * c, (64, 64, 22)[c], 0, 0, 0] for c in range(3)], dtype=torch.int32)
    exact, asked = torch.full((2, 3), -1, dtype=torch.int32), torch.full((3, 3), -1, dtype=torch.int32)
    choose[(2, 2)](gain, exact, table, 150, 3, 2, C=64, PACKED=packed, PDL=False)
    gain = torch.tensor([[-20.0, 9.0, 5.0], [-20.0, 9.0, -5.0], [-20.0, -0.5, -0.5]])
    choose[(3, 1)](gain, asked, table, 150, 3, 3, C=64, PACKED=packed, PDL=False)
    return exact.tolist(), asked.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_done_token_by_token(packed: bool) -> None:
    """Each token may add 1.25: short chunks less. What lies behind the last chunk does not count. Gains are negative
    where a program asks: for half of the tokens."""
    (found,) = run_ranks(chosen, 1, packed, env=INTERPRETED)
    assert found == ([[1, 1, 0], [0, 0, 1]], [[0] * 3, [1] * 3, [0] * 3])


@pytest.mark.parametrize("kernel", ["channel_inverse", "wy_inverse", "inverse_kernel"])
def test_equal_entries_of_an_inverse(kernel: str) -> None:
    """Their roundings do not add up."""
    step = (random.randrange(180, 250) + 0.48) / 256
    (found,) = run_ranks(roundings_of_equal_entries, 1, step, kernel, env=INTERPRETED)
    check_equal_entries(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_which_generated_inverses_are_dithered(dtype: torch.dtype) -> None:
    """Those whose products round to bfloat16."""
    code, sizes = variants.load("deltanet").make(2, 16, 16, dtype).kernels, {"K": 16, "V": 16}
    call = GeneratedPlan(code, choose_tiling(code, sizes, 2, 500, 0, dtype), sizes, 1, 2, 500, 0, dtype)
    found = [x.constants["DITHERED"] for x in call.forward() if x.kind == "inverse_kernel"]
    assert found == [dtype == torch.bfloat16]


def state_error_of_model(step: float, few: bool, rounded: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Of the delta rule in chunks of 64 in float64, whose operands are rounded as kernels round them, and inverses by
    `rounded`; the mean of four texts of 256 tokens."""
    def near(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().double()

    errors = []
    for seed in range(4):
        made = torch.Generator().manual_seed(seed)
        keys = torch.nn.functional.normalize(torch.randn(1 if few else 256, 128, generator=made), dim=-1)
        keys, values = near(keys.expand(256, -1)), near(torch.randn(256, 32, generator=made))
        state, exact = torch.zeros(2, 128, 32, dtype=torch.float64)
        for k, v in zip(keys, values, strict=True):
            exact = exact + torch.outer(k, step * (v - k @ exact))
        for k, v in zip(keys.split(64), values.split(64), strict=True):
            inverse = rounded(torch.linalg.inv(torch.eye(64, dtype=torch.float64) + (step * k @ k.T).tril(-1)))
            state = state + near(step * k).T @ near(inverse @ near(v - k @ near(state)))
        errors.append(float(relative_error(state, exact)))
    return sum(errors) / len(errors)


def test_what_dithering_is_for() -> None:
    """The figures of docs/math.md, section 7, "Keys that are alike"."""
    def nearest(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().double()

    def by_threshold(x: torch.Tensor) -> torch.Tensor:
        (found,) = run_ranks(by_kernel, 1, x.float(), env=INTERPRETED)
        return found.double()

    found = {(step, few): [state_error_of_model(step, few, x) for x in (nearest, by_threshold)]
             for step, few in ((0.9, True), (1.02, True), (0.9, False))}  # fmt: skip
    percent = {key: [round(100 * x, 1 if key[1] is False else 0) for x in both] for key, both in found.items()}
    assert percent == {(0.9, True): [6, 2], (1.02, True): [23, 4], (0.9, False): [0.4, 0.4]}, found


def by_kernel(sp: Any, x: torch.Tensor) -> torch.Tensor:
    from tests.harness.dithering import dithered_numbers

    return dithered_numbers(sp, x)


def test_dithered_numbers() -> None:
    """Each to a neighbour in bfloat16, on average to itself; those of bfloat16, infinity and NaN stay."""
    x = torch.randn(64, 64)
    x[:, 0] = x[0] = 1.0 + 0.3 * 2**-7
    x[5, :8] = x[1, :8].bfloat16().float()
    x[6, :4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    x[7, :3] = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    (y,) = run_ranks(by_kernel, 1, x, env=INTERPRETED)
    assert torch.equal(y[5, :8], x[5, :8]) and torch.equal(y[6, :4], x[6, :4]) and y[7, :3].isnan().all()
    rest = x[8:], y[8:]
    assert torch.equal(y.bfloat16().float().nan_to_num(), y.nan_to_num())
    assert ((rest[1] - rest[0]).abs() < 2**-7 * rest[0].abs()).all()
    for line in (y[0], y[8:, 0]):
        assert abs((line - x[0, 0]).mean() * 2**7) < 0.08 and line.unique().numel() == 2


def test_inverses_of_keys_that_are_alike(seed: int) -> None:
    """They make what was rounded before larger. Nothing is left of that above the diagonal."""
    ((error, rounding, above),) = run_ranks(inverse_of_alike, 1, seed, env=INTERPRETED)
    assert error <= 2 * rounding and above == 0, (error, rounding, above)
