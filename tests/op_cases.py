"""Random inputs of the ops that `flexsp.testing.cases` leaves out, for tests that compare an op with itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from flexsp import ops
from flexsp.testing.cases import Case, Shape

__all__ = ["OTHER_CASES"]

Made = dict[str, Any]
Random = torch.Generator
CHANNELS, NUMBERS = 8, 4  # of the ops without heads; a channel's numbers in the selective scan


def _normal(r: Random, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=r, dtype=torch.float64)


def _share(r: Random, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=r, dtype=torch.float64)


def _rows(s: Shape, r: Random, names: str = "qkv", gate: str = "") -> Made:
    """Rows [B, T, H, K], v [B, T, H, V], and log gates of the channels of keys."""
    made: Made = {x: _normal(r, s.B, s.T, s.H, s.V if x == "v" else s.K) for x in names}
    if gate:
        made[gate] = F.logsigmoid(_normal(r, s.B, s.T, s.H, s.K))
    if s.states:
        made["initial_state"] = _normal(r, s.states, s.H, s.K, s.V)
    return made


def _rwkv6(s: Shape, r: Random) -> Made:
    return _rows(s, r, "rkv", "w") | {"u": _normal(r, s.H, s.K)}


def _rwkv7(s: Shape, r: Random) -> Made:
    made = _rows(s, r, "rkvab", "w")
    return made | {x: 0.3 * made[x] for x in "ab"}


def _vector(s: Shape, r: Random, lru: bool = False) -> Made:
    shape = s.B, s.T, CHANNELS
    made: Made = {"x": _normal(r, *shape)}
    if lru:
        made |= {"r": _normal(r, *shape), "i": _normal(r, *shape), "Lambda": _normal(r, CHANNELS)}
    else:
        made["g"] = F.logsigmoid(_normal(r, *shape))
    if s.states:
        made["initial_state"] = _normal(r, s.states, CHANNELS)
    return made


def _selective(s: Shape, r: Random) -> Made:
    made: Made = {x: _normal(r, s.B, s.T, CHANNELS) for x in ("u", "delta", "z")}
    made |= {x: _normal(r, s.B, s.T, NUMBERS) for x in "BC"} | {x: _normal(r, CHANNELS) for x in ("D", "delta_bias")}
    made["A"] = -_share(r, CHANNELS, NUMBERS)
    if s.states:
        made["initial_state"] = _normal(r, s.states, CHANNELS, NUMBERS)
    return made


def _selective_op(output_final_state: bool = False, **given: Any) -> Any:
    return ops.selective_scan(**given, delta_softplus=True, return_last_state=output_final_state)


def _mamba3(s: Shape, r: Random, R: int = 0) -> Made:
    """R rows a token (MIMO), or 0. Two groups, two angles."""
    rows = (R,) if R else ()
    made: Made = {"x": _normal(r, s.B, s.T, s.H, s.V), "D": _normal(r, s.H)}
    made |= {x: _normal(r, s.B, s.T, *rows, 2, s.K) for x in "BC"}
    made |= {"dt": _share(r, s.B, s.T, s.H), "A": -_share(r, s.B, s.T, s.H), "trap": _normal(r, s.B, s.T, s.H)}
    made["angles"] = _normal(r, s.B, s.T, s.H, 2)
    made |= {x: _normal(r, s.H, *rows, s.K) for x in ("B_bias", "C_bias")}
    if R:
        made["mimo_x"] = _normal(r, s.H, R, s.V)
    if s.states:
        shapes = (s.H, 2), (s.H, s.K, s.V), (R or 1, s.H, s.K), (s.H, s.V)
        made["initial_state"] = tuple(_normal(r, s.states, *shape) for shape in shapes)
    return made


def _mamba3_op(initial_state: Any = None, **given: Any) -> Any:
    state = None if initial_state is None else ops.Mamba3State(*initial_state)
    return ops.mamba3(**given, initial_state=state)


def _mlstm(s: Shape, r: Random) -> Made:
    made = _rows(s, r) | {x: _normal(r, s.B, s.T, s.H) for x in "if"}
    if s.states:
        made["initial_state"] = made["initial_state"], _normal(r, s.states, s.H, s.K), _normal(r, s.states, s.H, 1)
    return made


def _mlstm_op(initial_state: Any = (None, None, None), output_final_state: bool = False, **given: Any) -> Any:
    c, n, m = initial_state
    return ops.chunk_mlstm(**given, c_initial=c, n_initial=n, m_initial=m, return_last_states=output_final_state, head_first=False)


def _case(op: Any, make: Any, tokens: str) -> Case:
    return Case(op, None, make, tokens=tuple(tokens.split()))  # type: ignore[arg-type]


OTHER_CASES: dict[str, Case] = {
    "gla": _case(ops.chunk_gla, partial(_rows, gate="g"), "q k v g"),
    "hgrn2": _case(ops.chunk_hgrn2, partial(_rows, names="qv", gate="g"), "q v g"),
    "rwkv6": _case(ops.chunk_rwkv6, _rwkv6, "r k v w"),
    "rwkv7": _case(ops.chunk_rwkv7, _rwkv7, "r k v w a b"),
    "hgrn": _case(ops.chunk_hgrn, _vector, "x g"),
    "rg_lru": _case(ops.rg_lru, partial(_vector, lru=True), "x r i"),
    "selective_scan": _case(_selective_op, _selective, "u delta B C z"),
    "mamba3": _case(_mamba3_op, _mamba3, "x dt A B C trap angles"),
    "mamba3_mimo": _case(_mamba3_op, partial(_mamba3, R=2), "x dt A B C trap angles"),
    "mlstm": _case(_mlstm_op, _mlstm, "q k v i f"),
}
"""`oracle` is None."""
