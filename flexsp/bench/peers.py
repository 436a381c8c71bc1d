"""Other libraries over ranks, beside flexsp in `flexsp bench scale --peers`: delta rules, and attention of torch.

Each cuts a sequence with an object of its own, a context. Delta rules gather what all ranks do to the state; torch's
attention passes keys and values around.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from flexsp.bench.cases import Inputs, Op

__all__ = ["peer_over_ranks"]

_MODULES = {"fla": "fla", "flashqla": "flash_qla", "torch": "torch"}
"""By name, the module that is imported."""
_OVER_RANKS = {
    "fla": {"gated_delta_rule": "gated_delta_rule", "gated_delta_rule_shared_keys": "gated_delta_rule", "kda": "kda"},
    "flashqla": {"gated_delta_rule": "gated_delta_rule", "gated_delta_rule_shared_keys": "gated_delta_rule"},
    "torch": {"attention": "attention"},
}
"""Cases of `flexsp.bench.cases` that a library runs over ranks, and the op's name there."""


def peer_over_ranks(
    peer: str, case: str, T: int, world: int, heads: int, promised: Mapping[str, Any]
) -> tuple[Op, ...] | None:
    """The op on one rank, and over all of them with T tokens each; None where the library has it not. The last one has
    shards as ours are: torch's second one is faster, since each rank has a piece from both ends. On one rank
    flash-linear-attention calls FlashQLA where that is installed, over ranks its own kernels; `promised` are arguments
    for it that say what gates are given.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    name = _OVER_RANKS[peer].get(case)
    if name is None:
        return None
    module = _MODULES[peer]
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"peers: expected the module {module!r} of {peer!r} to be installed")
    if peer == "torch":
        return _attention, _Ring(balanced=True), _Ring(balanced=False)
    op = getattr(importlib.import_module("flash_qla" if peer == "flashqla" else f"fla.ops.{name}"), f"chunk_{name}")
    ends = torch.tensor([0, T * world], device="cuda")
    if peer == "fla":
        cut = importlib.import_module("fla.ops.cp").build_cp_context(ends, group=dist.group.WORLD)
    else:
        own = importlib.import_module("flash_qla.ops.gated_delta_rule.chunk.cp")
        cut = own.build_cp_context(
            ends, enable_inter=True, enable_intra=True, group=dist.group.WORLD, num_v_heads=heads, chunk_size=64,
            is_train=True,
        )  # fmt: skip

    given = promised if peer == "fla" else {}

    def run(x: Inputs, **how: Any) -> torch.Tensor:
        o: torch.Tensor = op(**{key: y for key, y in x.items() if key != "do"}, **given, **how)[0]
        return o

    return run, lambda x: run(x, cp_context=cut)


def _attention(x: Inputs) -> torch.Tensor:
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    o: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


class _Ring:
    """torch's ring attention. What is called `within` a context of torch's, in both passes, goes over all ranks."""

    def __init__(self, balanced: bool) -> None:
        self.balanced = balanced
        self.mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options

        _cp_options.enable_load_balance = self.balanced
        cut = torch.empty(2 * self.mesh.size(), device="cuda")  # it insists on a tensor that it cuts
        with context_parallel(self.mesh, buffers=[cut], buffer_seq_dims=[0], no_restore_buffers={cut}):
            yield

    def __call__(self, x: Inputs) -> torch.Tensor:
        return _attention(x)
