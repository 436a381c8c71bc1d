"""Other libraries' delta rules over ranks, beside flexsp's in `flexsp bench scale --peers`.

Each cuts a sequence with an object of its own, a context, and gathers what all ranks do to the state.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from flexsp.bench.cases import Inputs, Op

__all__ = ["peer_over_ranks"]

_MODULES = {"fla": "fla", "flashqla": "flash_qla"}
"""By name, the module that is imported."""
_OVER_RANKS = {
    "fla": {"gated_delta_rule": "gated_delta_rule", "gated_delta_rule_shared_keys": "gated_delta_rule", "kda": "kda"},
    "flashqla": {"gated_delta_rule": "gated_delta_rule", "gated_delta_rule_shared_keys": "gated_delta_rule"},
}
"""Cases of `flexsp.bench.cases` that a library runs over ranks, and the op's name there."""


def peer_over_ranks(peer: str, case: str, T: int, world: int, heads: int) -> tuple[Op, ...] | None:
    """The op on one rank, and over all of them with T tokens each; None where the library has it not. On one rank
    flash-linear-attention calls FlashQLA where that is installed, over ranks its own kernels.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    name = _OVER_RANKS[peer].get(case)
    if name is None:
        return None
    module = _MODULES[peer]
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"peers: expected the module {module!r} of {peer!r} to be installed")
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

    def run(x: Inputs, **how: Any) -> torch.Tensor:
        o: torch.Tensor = op(**{key: y for key, y in x.items() if key != "do"}, **how)[0]
        return o

    return run, lambda x: run(x, cp_context=cut)
