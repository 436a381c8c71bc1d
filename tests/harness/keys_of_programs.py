"""Keys that repeat and reflect in programs whose kernels are generated: RWKV-7, Gated DeltaNet-2, and one of a user's
own."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from flexsp import ops
from flexsp.compiler import ConstExpr, LinearAttention, SymbTensor, cache_result, identity, unit_lower_inverse
from flexsp.testing import oracles
from tests.harness.keys import Keys
from tests.harness.vector_gates import rwkv7

__all__ = ["GDN2", "RWKV7", "Own"]


class RWKV7(Keys):
    """Its rates are beta, and its gates those of channels. Where a rate would turn the state round and let it grow, as
    it reads what has not decayed yet, it is the largest that does not."""

    def named(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        q, k, v, beta, g = given.values()
        rate = torch.minimum(beta, 1.0 + g.exp().amin(-1)).unsqueeze(-1)
        return {"r": q, "w": g, "k": k, "v": v, "a": -k, "b": (k * rate).to(self.dtype)}

    def call(self, given: dict[str, torch.Tensor], **more: Any) -> Any:
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["r"].device)} if self.bounds else {}
        return ops.chunk_rwkv7(**given, **bounds, **more, output_final_state=True)

    def loop(self, given: dict[str, torch.Tensor], engine: oracles.Engine = oracles.token_loop) -> Any:
        return rwkv7(**given, cu_seqlens=torch.tensor(self.bounds) if self.bounds else None, engine=engine)


class GDN2(Keys):
    """Its strengths of erasing are up to a tenth less than beta, in every channel by something else."""

    def named(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        beta, made = given.pop("beta").unsqueeze(-1), torch.Generator().manual_seed(self.T)
        less, write = (torch.rand(1, self.T, self.H, n, generator=made) for n in (self.K, self.V))
        return given | {"b": (beta * (1 - 0.1 * less)).to(self.dtype), "w": write.to(self.dtype)}

    def call(self, given: dict[str, torch.Tensor], **more: Any) -> Any:
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["q"].device)} if self.bounds else {}
        return ops.chunk_gdn2(**given, **bounds, **more, output_final_state=True)

    def loop(self, given: dict[str, torch.Tensor], engine: oracles.Engine = oracles.token_loop) -> Any:
        return oracles.gdn2(**given, cu_seqlens=torch.tensor(self.bounds) if self.bounds else None, engine=engine)


class Own(Keys):
    """A program of a user's own: a delta rule with a parameter [H, K] of signs, whose outputs are s sigmoid(s) of what
    is read, and so not linear in the state."""

    def named(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return given | {"w": torch.tensor([1.0, -1.0]).repeat(self.H, self.K // 2)}

    def call(self, given: dict[str, torch.Tensor], **more: Any) -> Any:
        given = dict(given)
        bounds = {"cu_seqlens": torch.tensor(self.bounds, device=given["q"].device)} if self.bounds else {}
        initial = given.pop("initial_state")
        made = LinearAttention(self.meta, _own_chunk, _own_decay, _own_merge)
        return made(prev_s=initial, **given, **bounds, **more)

    @property
    def meta(self) -> dict[str, Any]:
        h, k, v = ConstExpr("H", self.H), ConstExpr("K", self.K), ConstExpr("V", self.V)
        rows = {x: SymbTensor(["T", h, k], self.dtype) for x in "qk"} | {"v": SymbTensor(["T", h, v], self.dtype)}
        return rows | {"beta": SymbTensor(["T", h]), "w": SymbTensor([h, k]), "prev_s": SymbTensor(["NS", h, k, v])}

    def loop(self, given: dict[str, torch.Tensor], engine: oracles.Engine = oracles.token_loop) -> Any:
        starts, states, o = [*self.bounds] or [0, self.T], [], []
        for n, (start, end) in enumerate(itertools.pairwise(starts)):
            S = given["initial_state"][n]
            for t in range(start, end):
                key = given["k"][0, t] * given["w"]
                error = given["v"][0, t] - (key.unsqueeze(-1) * S).sum(-2)
                S = S + (given["beta"][0, t].unsqueeze(-1) * key).unsqueeze(-1) * error.unsqueeze(-2)
                o.append((given["q"][0, t].unsqueeze(-1) * S).sum(-2))
            states.append(S)
        read = torch.stack(o).unsqueeze(0)
        return read * read.sigmoid(), torch.stack(states)


def _own_chunk(k: Any, v: Any, beta: Any, w: Any) -> Any:
    keys = k * w
    p = keys * beta[:, None]
    inverse = unit_lower_inverse(identity(k, k.size(0)) + (keys @ p.T).tril(-1))
    cache_result(inverse @ v, "u")
    cache_result(inverse @ keys, "y")
    return p.T @ (inverse @ v)


def _own_decay(prev_s: Any, k: Any, beta: Any, w: Any, y: Any, chunk_state: Any) -> Any:
    return prev_s - (k * w * beta[:, None]).T @ (y @ prev_s) + chunk_state


def _own_merge(q: Any, k: Any, beta: Any, w: Any, u: Any, y: Any, chunk_state: Any) -> Any:
    read = (q @ (k * w * beta[:, None]).T).tril() @ (u - y @ chunk_state) + q @ chunk_state
    return read * read.sigmoid()
