"""Value heads that share queries and keys: the delta engine reads these as they are, under the interpreter."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexsp import ops
from flexsp.testing.compare import relative_error
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.marks import quick, slow

BF16, F32 = torch.bfloat16, torch.float32
SIZES = 3, 24, 40  # value heads a key head, K, V
LARGE = 2, 256, 192
RULES = {
    "gated": (ops.chunk_gated_delta_rule, 1, True),
    "no gate": (ops.chunk_delta_rule, 1, False),
    "gates of channels": (ops.chunk_kda, 1, True),
    "product": (functools.partial(ops.chunk_gated_delta_product, num_householder=2), 2, True),
}
PACKED = {20: (0, 3, 3, 20), 90: (0, 0, 30, 30, 75, 90), 180: (0, 0, 30, 30, 175, 180)}  # documents, by tokens


def drawn(
    name: str, seed: int, T: int, dtype: torch.dtype, states: int, sizes: tuple[int, int, int] = SIZES
) -> dict[str, torch.Tensor]:  # fmt: skip
    """One sequence of two key heads."""
    _, steps, gated = RULES[name]
    group, K, V = sizes
    made = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, n, h, d, generator=made) for n, h, d in ((T, 2, K), (T * steps, 2, K), (T * steps, 2 * group, V))
    )
    given = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v}
    given["beta"] = torch.rand(1, T * steps, 2 * group, generator=made)
    if gated:
        channels = (K,) if name == "gates of channels" else ()
        given["g"] = -0.03 * torch.rand(1, T, 2 * group, *channels, generator=made)
    given = {key: x.to(F32 if key == "g" else dtype) for key, x in given.items()}
    return given | {"initial_state": torch.randn(states, 2 * group, K, V, generator=made)}


def passes(name: str, given: dict[str, torch.Tensor], do: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Outputs, final states and all gradients."""
    leaves = {key: x.clone().requires_grad_() for key, x in given.items()}
    o, final = RULES[name][0](**leaves, output_final_state=True, **options)
    outputs = [x for x in (o, final) if x is not None]
    to = [do, *([] if final is None else [torch.ones_like(final)])]
    grads = torch.autograd.grad(outputs, [*leaves.values()], to, allow_unused=True)
    found = {"o": o.detach()} | ({} if final is None else {"final": final.detach()})
    return found | {f"d{key}": dx for key, dx in zip(leaves, grads, strict=True) if dx is not None}


def summed(dx: torch.Tensor, group: int) -> torch.Tensor:
    """Gradients of heads that are one, as the engine adds them."""
    total = torch.zeros_like(dx[:, :, ::group], dtype=F32)
    for each in dx.unflatten(2, (-1, group)).unbind(3):
        total += each.float()
    return total.to(dx.dtype)


def shard(sp: Any, given: dict[str, torch.Tensor], T: int, steps: int) -> dict[str, torch.Tensor]:
    """This rank's part of T tokens; the last of two has 20 more than the other."""
    first, end = (0, (T - 20) // 2) if sp.rank == 0 else ((T - 20) // 2, T)
    rows = {x: steps if x in ("k", "v", "beta") else 1 for x in given if x != "initial_state"}
    return {x: given[x][:, first * n : end * n] for x, n in rows.items()}


def differences(
    sp: Any, name: str, seed: int, T: int, dtype: torch.dtype, norm: bool, packed: bool,
    sizes: tuple[int, int, int] = SIZES,
) -> list[str]:  # fmt: skip
    """What differs, in any bit, from a call with the queries and keys of each value head. Gradients that go through a
    norm are rounded elsewhere."""
    from flexsp.kernels import keys_in_pytorch as keys

    group, bounds = sizes[0], torch.tensor(PACKED[T]) if packed else None
    given = drawn(name, seed, T, dtype, 1 if bounds is None else len(bounds) - 1, sizes)
    options: dict[str, Any] = {"cu_seqlens": bounds}
    if sp.world_size > 1:
        given, options["sp"] = shard(sp, given, T, RULES[name][1]), sp
    made = torch.Generator().manual_seed(seed)
    do = torch.randn(*given["q"].shape[:2], *given["v"].shape[2:], generator=made).to(dtype)
    options["use_qk_l2norm_in_kernel"] = norm
    kept = keys.unit_keys
    keys.unit_keys = lambda *given: pytest.fail("queries and keys were copied before the engine")  # type: ignore[assignment]
    found = passes(name, given, do, **options)
    want = passes(name, given | {x: given[x].repeat_interleave(group, 2) for x in ("q", "k")}, do, **options)
    keys.unit_keys = kept
    want |= {f"d{x}": summed(want[f"d{x}"], group) for x in ("q", "k")}
    bound = {f"d{x}": 2 * torch.finfo(dtype).eps for x in ("q", "k") if norm}
    return sorted({*want} ^ {*found}) + [x for x in found if not alike(found[x], want[x], bound.get(x, 0.0))]


def alike(x: torch.Tensor, y: torch.Tensor, bound: float) -> bool:
    return torch.equal(x, y) or bool(relative_error(x, y) < bound)


@pytest.mark.parametrize("name", quick(RULES, "gated"))
def test_as_repeated(name: str) -> None:
    seed = random.randrange(2**31)
    for dtype, norm, packed in ((BF16, False, True), (F32, True, False)):
        assert run_ranks(differences, 1, name, seed, 90, dtype, norm, packed, env=INTERPRETED) == [[]]


@pytest.mark.parametrize("name", slow(*RULES))
def test_large_heads(name: str) -> None:
    found = run_ranks(differences, 1, name, random.randrange(2**31), 20, BF16, False, True, LARGE, env=INTERPRETED)
    assert found == [[]]


@pytest.mark.parametrize("name", quick(RULES, "gated"))
def test_over_ranks(name: str) -> None:
    """A document has several chunks on the last rank, from which gradients come to the first."""
    found = run_ranks(differences, 2, name, random.randrange(2**31), 180, BF16, True, True, env=INTERPRETED)
    assert found == [[], []]


def decoded(sp: Any, seed: int) -> list[bool]:
    """Decoding, and a call that something watches, of queries and keys as they are and of those of each value head."""
    group, given = SIZES[0], drawn("gated", seed, 20, F32, 1)
    repeated = given | {x: given[x].repeat_interleave(group, 2) for x in ("q", "k")}
    found = []
    for op in (ops.recurrent_gated_delta_rule, ops.chunk_gated_delta_rule):
        with Watched():
            pairs = [op(**x, output_final_state=True) for x in (given, repeated)]
        found += [torch.equal(a, b) for a, b in zip(*pairs, strict=True)]
    return found


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_decoding_and_dispatch_modes() -> None:
    assert run_ranks(decoded, 1, random.randrange(2**31), env=INTERPRETED) == [[True] * 4]
