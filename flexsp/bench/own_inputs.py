"""Operators of the benchmarks whose inputs are not q, k, v, gates and beta: of HGRN, mLSTM, RWKV-7, Mamba-1, Mamba-3
and softmax attention.

Channels of HGRN and Mamba-1 number H V; Mamba-1 has 16 numbers of state a channel. Attention has a key head for eight
heads of queries, or one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from flexsp.bench.case import Case, Inputs, Peer, Shape, ours, theirs
from flexsp.bench.gates import Normal, log_uniform

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel

__all__ = ["OWN", "RWKV7", "xl_chunk"]

_STATE = 16
_DT = (0.001, 0.1)  # steps at initialisation
_LOWEST = -0.6065306597126334  # log gate of RWKV-7
RWKV7 = {"safe_gate": True, "lower_bound": _LOWEST, "chunk_size": 64}
"""What flash-linear-attention's layer passes to its op."""


def _hgrn(shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
    size = (shape.B, shape.T, shape.H * shape.V)
    return {"x": normal(*size).to(dtype), "g": F.logsigmoid(normal(*size) + 3).to(dtype), "do": normal(*size).to(dtype)}


def _mlstm(shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
    rows = (shape.B, shape.T, shape.H)
    wide = {name: normal(*rows, width).to(dtype) for name, width in (("q", shape.K), ("k", shape.K), ("v", shape.V))}
    return {**wide, "i": normal(*rows), "f": normal(*rows) + 3, "do": normal(*rows, shape.V).to(dtype)}


def _heads_first(x: Inputs) -> Inputs:
    """[B, H, T, ...] of [B, T, H, ...], each a leaf."""
    turned = {name: y.detach().transpose(1, 2).contiguous() for name, y in x.items()}
    return {name: y if name == "do" else y.requires_grad_() for name, y in turned.items()}


def _tokens_first(name: str, y: torch.Tensor) -> torch.Tensor:
    return y.transpose(1, 2)


def _rwkv7(shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
    rows = (shape.B, shape.T, shape.H)
    removed = F.normalize(normal(*rows, shape.K), dim=-1)
    found = {
        "r": normal(*rows, shape.K), "w": _LOWEST * normal(*rows, shape.K).sigmoid(),
        "k": normal(*rows, shape.K), "v": normal(*rows, shape.V),
        "a": -removed, "b": removed * normal(*rows, shape.K).sigmoid(), "do": normal(*rows, shape.V),
    }  # fmt: skip
    return {name: y.to(dtype) for name, y in found.items()}


def _mamba(shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
    width, tokens = shape.H * shape.V, (shape.B, shape.T)
    found = {name: normal(*tokens, width).to(dtype) for name in ("u", "delta", "z", "do")}
    found |= {name: normal(*tokens, _STATE).to(dtype) for name in ("B", "C")}
    A = -torch.arange(1.0, _STATE + 1, device=found["u"].device).expand(width, _STATE).contiguous()
    return found | {"A": A, "D": normal(width), "delta_bias": log_uniform(normal(width), *_DT).expm1().log()}


_OF_CHANNELS = ("A", "D", "delta_bias")


def _channels_first(x: Inputs) -> Inputs:
    """Tokens [B, D, T] of [B, T, D], each a leaf; what has no tokens is shared."""
    turned = {name: y if name in _OF_CHANNELS else y.detach().transpose(1, 2).contiguous() for name, y in x.items()}
    return {name: y if name == "do" else y.requires_grad_() for name, y in turned.items()}


def _tokens_last(name: str, y: torch.Tensor) -> torch.Tensor:
    return y if name in _OF_CHANNELS else y.transpose(1, 2)


def _mamba3(shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
    """Half the channels of B and C turn, by angles that all heads share."""
    rows = (shape.B, shape.T, shape.H)
    found = {name: normal(shape.B, shape.T, 1, shape.K).to(dtype) for name in ("B", "C")}
    found |= {name: normal(*rows, shape.V).to(dtype) for name in ("x", "do")}
    found |= {"dt": log_uniform(normal(*rows), *_DT), "A": -F.softplus(normal(*rows)), "trap": normal(*rows)}
    found |= {"B_bias": 1 + 0.1 * normal(shape.H, shape.K), "C_bias": 1 + 0.1 * normal(shape.H, shape.K)}
    return found | {"angles": normal(shape.B, shape.T, 1, max(shape.K // 4, 1)), "D": normal(shape.H)}


def _attention(shape: Shape, dtype: torch.dtype, normal: Normal) -> Inputs:
    keys = max(1, shape.H // 8)
    heads = {"q": (shape.H, shape.K), "k": (keys, shape.K), "v": (keys, shape.V), "do": (shape.H, shape.V)}
    return {name: normal(shape.B, shape.T, *size).to(dtype) for name, size in heads.items()}


def _ours_attention(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
    from flexsp.nn.attention import scaled_dot_product_attention

    return scaled_dot_product_attention(x["q"], x["k"], x["v"], sp=sp)


def _ours_mamba3(x: Inputs, sp: SequenceParallel | bool = False) -> torch.Tensor:
    from flexsp.ops import mamba3

    given: dict[str, Any] = {name: y for name, y in x.items() if name != "do"}
    return mamba3(**given, sp=sp)[0]


def _mamba_ssm_mamba3(x: Inputs) -> torch.Tensor:
    """Its Triton kernels, of one row of B and C; they pair neighbouring channels, as ours do."""
    op = importlib.import_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined").mamba3_siso_combined
    heads_first = {name: y.transpose(1, 2) for name, y in {**x, "ADT": x["A"] * x["dt"]}.items() if y.dim() == 3}
    y: torch.Tensor = op(
        Q=x["C"], K=x["B"], V=x["x"], ADT=heads_first["ADT"], DT=heads_first["dt"], Trap=heads_first["trap"],
        Q_bias=x["C_bias"], K_bias=x["B_bias"], Angles=x["angles"].expand(-1, -1, x["x"].shape[2], -1), D=x["D"],
    )  # fmt: skip
    return y


def xl_chunk(chunk_size: int = 128) -> Peer:
    """mlstm_kernels' op for training. Its layers have chunks of 64, and the op by itself of 128."""
    op = theirs(
        "mlstm_kernels.torch.chunkwise.triton_xl_chunk", "mlstm_chunkwise__xl_chunk",
        autocast_kernel_dtype=torch.bfloat16, chunk_size=chunk_size, eps=1e-6,
    )  # fmt: skip
    return Peer("mlstm_kernels", op, _heads_first, _tokens_first)


_SELECTIVE = theirs("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", delta_softplus=True)
OWN = (
    Case("hgrn", ours("chunk_hgrn"), theirs("fla.ops.hgrn", "chunk_hgrn"), draw=_hgrn),
    Case(
        "mlstm", ours("chunk_mlstm", head_first=False, eps=1e-6), None, draw=_mlstm,
        others={"mlstm_kernels": xl_chunk()},
    ),
    Case("rwkv7", ours("chunk_rwkv7"), theirs("fla.ops.rwkv7", "chunk_rwkv7", **RWKV7), draw=_rwkv7),
    Case(
        "mamba", ours("selective_scan", delta_softplus=True), None, draw=_mamba,
        others={"mamba_ssm": Peer("mamba_ssm", _SELECTIVE, _channels_first, _tokens_last)},
    ),
    Case(
        "mamba3", _ours_mamba3, None, draw=_mamba3,
        others={"mamba_ssm": Peer("mamba_ssm", _mamba_ssm_mamba3)},
    ),
    Case("attention", _ours_attention, None, draw=_attention),
)  # fmt: skip
