"""Every public callable with bad values for every argument: ValueError or TypeError that names it, and nothing raw."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import flexsp
from flexsp import ops
from flexsp.comm.group import SequenceParallel
from flexsp.grammar import FlexLinearAttention, decay, feature_map, transition
from flexsp.nn import (
    HGRN,
    HGRN2,
    MLSTM,
    RGLRU,
    RWKV7,
    Attention,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedRMSNorm,
    KimiDeltaAttention,
    Mamba,
    Mamba2,
    Mamba3,
    RMSNorm,
    SequenceParallelLA,
    ShortConvolution,
    SimpleGLA,
    unwrap,
)
from flexsp.nn.attention import scaled_dot_product_attention
from flexsp.testing.cases import Case, Shape
from tests.harness.layers import OF_EACH
from tests.harness.ops import ALL
from tests.variants import load

B, T, H, K, V, D = 1, 6, 2, 4, 3, 32


def sparse(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse()


TENSOR: list[Callable[[torch.Tensor], Any]] = [
    lambda x: "yes", lambda x: 1.5, lambda x: x.tolist(), sparse, lambda x: x.to("meta"), lambda x: x.unsqueeze(0),
    lambda x: x.to(torch.complex64), lambda x: x.bool(), lambda x: torch.nested.nested_tensor([x, x]),
]  # fmt: skip
FLAG = ["yes", 1, None, 0.0, torch.tensor(True)]
INTEGER = [1.5, "1", True, None, -1, float("nan")]
SIZE = [*INTEGER, 0]
NUMBER = ["1", float("nan"), True, [1.0], float("inf"), 10**400]
SP = [3, "sp", True, object()]
NOT_NEGATIVE = [*NUMBER, -1, -1e-9, None]
POSITIVE = [*NOT_NEGATIVE, 0]
OPTIONAL = {
    "flag": FLAG, "integer": INTEGER, "size": SIZE, "number": NUMBER, "sp": SP, "not negative": NOT_NEGATIVE,
    "positive": POSITIVE, "negative": [*NUMBER, 0, 1e-9, 2], "head size": [*SIZE, 257, 300],
    "value size": [*SIZE, 513, 600],
    "pairs": [*SIZE, 1, 3, 257], "fraction": [*POSITIVE, 0.25, 2],
    "expand": [*POSITIVE, 1e-3, 1e308],
    "initial": [*POSITIVE, 1e-300, 1e300], "floor": [*NOT_NEGATIVE, 1e-300, 1e300],
    "range": [
        3, None, "ab", (), (1.0,), (1, 2, 3), (5, 1), (-1, 1), (0, 1), (True, 2), ("a", 2), (1, float("nan")),
        (float("nan"), 1), (1, 1e300), (1e-300, 1), torch.tensor([1.0, 2.0]), {1: 2, 3: 4},
    ],
    "limits": [
        3, None, "ab", (), (1.0,), (1, 2, 3), (5, 1), (-1, 1), (True, 2), ("a", 2), (float("inf"), float("inf")),
        (1, float("nan")), (0, "inf"), torch.tensor([1.0, 2.0]), {1: 2, 3: 4},
    ],
    "choice": ["tanh", True, None, 0, 1.5, "SiLU", ["silu"], torch.tensor([1.0, 2.0])],
    "value heads": [*SIZE, 3], "bound": [*NUMBER, 0, 1.0], "share": [*POSITIVE, 1e-3, 1e308, 0.3],
    "activation": ["relu", True, 0, 1.5, "SiLU", ["silu"], torch.tensor([1.0, 2.0]), numpy.array(["silu", "relu"])],
    "lengths": [[True], [torch.tensor(True)], torch.tensor([True]), [1.5], [-1], [], [1, 2], 8, ["8"], [None]],
    "paths": [3, None, True, 1.5, [3], [3, "a"], [["a"]], ["a"], "a", torch.tensor([1, 2]), [b""]],
    "no size": [x for x in [*SIZE, 3] if x is not None], "limit": [x for x in SIZE if x is not None],
    "base": [x for x in POSITIVE if x is not None], "zero": [*NUMBER, None, 0.1, 1],
    "none": [*FLAG[:2], 0.0, torch.ones(2)],
    "name": ["tanh", True, 0, 1.5, "SiLU", ["silu"]],
    "module": [3, None, "a", nn.Linear, torch.ones(2)],
    "dtype": ["float32", torch.int64, 3, torch.complex64],
}  # fmt: skip


def qkv() -> dict[str, torch.Tensor]:
    return {"q": torch.rand(B, T, H, K), "k": torch.rand(B, T, H, K), "v": torch.rand(B, T, H, V)}


def bounds() -> torch.Tensor:
    return torch.tensor([0, 2, T])


COMMON = {"scale": "number", "output_final_state": "flag", "sp": "sp"}
PACKED = {"initial_state": torch.zeros(2, H, K, V), "cu_seqlens": bounds(), "cu_seqlens_cpu": bounds()}
SSD = {
    "x": torch.rand(B, T, H, V), "dt": torch.rand(B, T, H), "A": -torch.rand(H), "B": torch.rand(B, T, 1, K),
    "C": torch.rand(B, T, 1, K), "D": torch.rand(H), "dt_bias": torch.rand(H),
}  # fmt: skip
SSD3 = {
    **{name: SSD[name] for name in ("x", "dt", "B", "C", "D")}, "A": -torch.rand(B, T, H), "trap": torch.rand(B, T, H),
    "angles": torch.rand(B, T, H, 2), "B_bias": torch.rand(H, K), "C_bias": torch.rand(H, K),
}  # fmt: skip
SSD3_MIMO = SSD3 | {
    "B": torch.rand(B, T, 2, 1, K), "C": torch.rand(B, T, 2, 1, K), "B_bias": torch.rand(H, 2, K),
    "C_bias": torch.rand(H, 2, K), "mimo_x": torch.rand(H, 2, V),
}  # fmt: skip
SELECTIVE = {
    "u": torch.rand(B, T, D), "delta": torch.rand(B, T, D), "A": -torch.rand(D, K), "B": torch.rand(B, T, K),
    "C": torch.rand(B, T, K), "D": torch.rand(D), "z": torch.rand(B, T, D), "delta_bias": torch.rand(D),
}  # fmt: skip
FLEX = FlexLinearAttention(decay.gated(), feature_map.rope(data_dependent=True), transition.delta_rule())
FLEX_ROWS = FlexLinearAttention(
    decay.exponential(discretization="trapezoidal"), transition=transition.preconditioned_gd(mimo_rank=2)
)
ROWS_GIVEN = {"decay": torch.rand(B, T, H), "A": -torch.rand(H), "trap": torch.rand(B, T, H), "cu_seqlens": bounds()}
ROWS_GIVEN |= {"mimo_x": torch.rand(H, 2, V), "v": torch.rand(B, T, H, V)}
ROWS_GIVEN |= {name: torch.rand(B, T, 2, H, K) for name in "qk"}
FLEX_GIVEN = {"decay": -torch.rand(B, T, H), "theta": torch.rand(B, T, H, K // 2), "beta": torch.rand(B, T, H)}
DELTA = {**qkv(), "beta": torch.rand(B, T, H)}
GDN2 = {**qkv(), "g": torch.rand(B, T, H, K), "b": torch.rand(B, T, H, K), "w": torch.rand(B, T, H, V)}
NORM = {"use_qk_l2norm_in_kernel": "flag"}
RECURRENT = {"scale": "number", "output_final_state": "flag", "cu_seqlens": "none"}
CONVOLVED = {"use_short_conv": "flag", "conv_size": "size", "conv_bias": "flag", "norm_eps": "not negative"}
GROUPED = {
    "hidden_size": "size", "num_heads": "size", "head_dim": "head size", "num_v_heads": "value heads",
    "expand_v": "share", "allow_neg_eigval": "flag", **CONVOLVED,
}  # fmt: skip
HEADS = {"hidden_size": D, "num_heads": 2, "head_dim": 4}
CONV = ShortConvolution(D)
ONE, X = torch.rand(3, D), torch.rand(B, T, D)

# The kind of an argument by its name, for ops and layers that have no row in CALLS.
KINDS = {
    "scale": "number", "sp": "sp", "c": "positive", "hidden_size": "size", "num_heads": "size", **CONVOLVED,
    **dict.fromkeys((
        "allow_neg_eigval", "output_final_state", "reverse", "safe_gate", "state_v_first", "unit_start",
        "use_beta_sigmoid_in_kernel", "use_gate_in_kernel", "use_output_gate", "use_qk_l2norm_in_kernel",
    ), "flag"),
}  # fmt: skip

# name: (callable, its good tensors, kinds of its other arguments, other good values)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "g_gamma": (ops.chunk_simple_gla, {**qkv(), "g_gamma": -torch.rand(H)}, COMMON, {}),
    "recurrent g_gamma": (ops.recurrent_simple_gla, {**qkv(), "g_gamma": -torch.rand(H)}, {}, {}),
    "chunk_lightning_attn": (
        ops.chunk_lightning_attn, {**qkv(), **PACKED}, {**COMMON, "layer_idx": "integer", "num_layers": "size"},
        {"layer_idx": 1, "num_layers": 4},
    ),
    "chunk_linear_attn": (ops.chunk_linear_attn, {**qkv(), **PACKED}, COMMON, {"normalize": False}),
    "normalize": (ops.chunk_linear_attn, qkv(), {**COMMON, "normalize": "flag"}, {}),
    "gate in kernel": (
        ops.chunk_gated_delta_rule,
        {**DELTA, "g": torch.rand(B, T, H), "A_log": torch.rand(H), "dt_bias": torch.rand(H)}, {},
        {"use_gate_in_kernel": True},
    ),
    "gate of channels in kernel": (
        ops.chunk_kda,
        {**DELTA, "g": torch.rand(B, T, H, K), "A_log": torch.rand(H), "dt_bias": torch.rand(H, K)},
        {"lower_bound": "negative"}, {"use_gate_in_kernel": True, "lower_bound": -2.0},
    ),
    "gate of channels beside two strengths, in kernel": (
        ops.chunk_gdn2, {**GDN2, "A_log": torch.rand(H), "dt_bias": torch.rand(H, K)}, {"lower_bound": "negative"},
        {"use_gate_in_kernel": True, "lower_bound": -2.0},
    ),
    "chunk_gated_delta_product": (
        ops.chunk_gated_delta_product, {**DELTA, "g": -torch.rand(B, T, H), **PACKED},
        {**COMMON, **NORM, "num_householder": "size"}, {"num_householder": 1},
    ),
    "delta product with gates of channels": (
        ops.chunk_gated_delta_product, {**DELTA, "g": -torch.rand(B, T, H, K)}, {}, {"num_householder": 1},
    ),
    "mamba2_ssd": (
        ops.mamba2_ssd, {**SSD, "z": torch.rand(B, T, H, V), **PACKED},
        {"output_final_state": "flag", "dt_softplus": "flag", "sp": "sp", "state_v_first": "flag",
         "dt_limit": "limits"},
        {"state_v_first": False},
    ),
    "mamba2_ssd by indices": (ops.mamba2_ssd, {**SSD, "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2]])}, {}, {}),
    "seq_idx_to_cu_seqlens": (
        flexsp.seq_idx_to_cu_seqlens, {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2]])}, {"sp": "sp"}, {},
    ),
    "mamba3": (
        ops.mamba3, {**SSD3, "cu_seqlens": bounds(), "cu_seqlens_cpu": bounds()},
        {"output_final_state": "flag", "rotate_pairwise": "flag", "sp": "sp"}, {},
    ),
    "mamba3 with MIMO": (ops.mamba3, SSD3_MIMO, {}, {}),
    "recurrent_mamba3": (
        ops.recurrent_mamba3, SSD3_MIMO, {"output_final_state": "flag", "rotate_pairwise": "flag"}, {},
    ),
    "FlexLinearAttention": (
        FLEX, {**qkv(), **FLEX_GIVEN, "initial_state": PACKED["initial_state"], "cu_seqlens": bounds()}, COMMON, {},
    ),
    "FlexLinearAttention, several rows": (
        FLEX_ROWS, {**ROWS_GIVEN, "initial_state": torch.rand(bounds().numel() - 1, H, K + 1, V + 3)}, COMMON, {},
    ),
    "LinearAttention": (
        load("simple_gla").make(H, K, V),
        {**qkv(), "g": -torch.rand(B, T, H), "prev_s": PACKED["initial_state"], "cu_seqlens": bounds()}, {"sp": "sp"},
        {},
    ),
    "scaled_dot_product_attention": (
        scaled_dot_product_attention, {**qkv(), "cu_seqlens": bounds(), "cu_seqlens_cpu": bounds()},
        {"scale": "number", "sp": "sp", "is_causal": "flag", "window": "limit", "backend": "choice",
         "exchange": "choice", "dropout_p": "zero", "softcap": "none", "sinks": "none"}, {},
    ),
    "chunk_mlstm": (
        ops.chunk_mlstm,
        {**qkv(), "i": torch.rand(B, T, H), "f": torch.rand(B, T, H), "c_initial": torch.zeros(2, H, K, V),
         "n_initial": torch.zeros(2, H, K), "m_initial": torch.zeros(2, H, 1), "cu_seqlens": bounds(),
         "cu_seqlens_cpu": bounds()},
        {"scale": "number", "return_last_states": "flag", "eps": "not negative", "sp": "sp", "head_first": "flag"},
        {"head_first": False},
    ),
    "selective_scan": (
        ops.selective_scan, {**SELECTIVE, "initial_state": torch.zeros(2, D, K), "cu_seqlens": bounds(),
                             "cu_seqlens_cpu": bounds()},
        {"delta_softplus": "flag", "return_last_state": "flag", "discretization": "choice", "sp": "sp"}, {},
    ),
    "recurrent_selective_scan": (
        ops.recurrent_selective_scan, {**SELECTIVE, "initial_state": torch.zeros(B, D, K)},
        {"delta_softplus": "flag", "return_last_state": "flag", "discretization": "choice"}, {},
    ),
    "Mamba()": (
        Mamba, {}, {"hidden_size": "size", "state_size": "head size", "expand": "expand", "dt_rank": "limit",
        "conv_size": "size", "conv_bias": "flag", "bias": "flag", "dt_min": "initial", "dt_max": "initial",
        "dt_init": "choice", "dt_scale": "initial", "dt_init_floor": "floor", "discretization": "choice"},
        {"hidden_size": D},
    ),
    "recurrent_mlstm": (
        ops.recurrent_mlstm,
        {**qkv(), "i": torch.rand(B, T, H), "f": torch.rand(B, T, H), "c_initial": torch.zeros(B, H, K, V),
         "n_initial": torch.zeros(B, H, K), "m_initial": torch.zeros(B, H, 1)},
        {"scale": "number", "return_last_states": "flag", "eps": "not negative", "head_first": "flag"},
        {"head_first": False},
    ),
    "recurrent gates of columns": (
        ops.recurrent_gla, {**qkv(), "g": -torch.rand(B, T, H, K), "gv": -torch.rand(B, T, H, V)}, {}, {},
    ),
    "recurrent, gate in kernel": (
        ops.recurrent_gated_delta_rule,
        {**DELTA, "g": torch.rand(B, T, H), "A_log": torch.rand(H), "dt_bias": torch.rand(H)}, {},
        {"use_gate_in_kernel": True},
    ),
    "recurrent, gate of channels in kernel": (
        ops.recurrent_kda,
        {**DELTA, "g": torch.rand(B, T, H, K), "A_log": torch.rand(H), "dt_bias": torch.rand(H, K)},
        {"lower_bound": "negative"}, {"use_gate_in_kernel": True, "lower_bound": -2.0},
    ),
    "recurrent, gate of channels beside two strengths, in kernel": (
        ops.recurrent_gdn2, {**GDN2, "A_log": torch.rand(H), "dt_bias": torch.rand(H, K)},
        {"lower_bound": "negative"}, {"use_gate_in_kernel": True, "lower_bound": -2.0},
    ),
    "recurrent_gated_delta_product": (
        ops.recurrent_gated_delta_product,
        {**DELTA, "g": -torch.rand(B, T, H), "initial_state": torch.zeros(B, H, K, V)},
        {**RECURRENT, **NORM, "num_householder": "size"}, {"num_householder": 1},
    ),
    "GatedLinearAttention()": (
        GatedLinearAttention, {}, {"hidden_size": "size", "num_heads": "size", "num_kv_heads": "no size",
        "expand_k": "share", "expand_v": "share", "feature_map": "name", "gate_fn": "choice", "use_output_gate": "flag",
        "fuse_norm": "flag", "gate_logit_normalizer": "positive", "gate_low_rank_dim": "size", "clamp_min": "bound",
        **CONVOLVED},
        {"hidden_size": D, "num_heads": 2},
    ),
    "HGRN2()": (
        HGRN2, {}, {"hidden_size": "size", "num_heads": "limit", "expand_ratio": "limit", **CONVOLVED},
        {"hidden_size": D, "expand_ratio": 8},
    ),
    "HGRN()": (HGRN, {}, {"hidden_size": "size", "expand_ratio": "share", **CONVOLVED}, {"hidden_size": D}),
    "RGLRU()": (
        RGLRU, {},
        {"hidden_size": "size", "lru_width": "limit", "num_heads": "size", "conv_size": "size", "unit_start": "flag"},
        {"hidden_size": D},
    ),
    "RWKV7()": (
        RWKV7, {}, {"hidden_size": "size", "head_dim": "limit", "layer_idx": "integer", "num_hidden_layers": "size",
        "elementwise_affine": "flag", "norm_eps": "not negative", **dict.fromkeys(
            ("value_dim", "decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"), "limit")},
        {"hidden_size": D, "head_dim": 8},
    ),
    "RWKV7() of heads": (RWKV7, {}, {"num_heads": "size"}, {"hidden_size": D, "head_dim": None, "num_heads": 2}),
    "MLSTM()": (
        MLSTM, {}, {"hidden_size": "size", "num_heads": "size", "qk_dim_factor": "share", "v_dim_factor": "share",
        "use_bias": "flag", "gate_soft_cap": "base", "eps": "not negative", **CONVOLVED},
        {"hidden_size": D, "num_heads": 2},
    ),
    "ShortConvolution": (CONV, {"x": X, "cu_seqlens": bounds()}, {}, {}),
    "ShortConvolution since": (CONV, {"x": X, "since": torch.arange(T)}, {}, {}),
    "ShortConvolution.prefill": (CONV.prefill, {"x": X, "cache": CONV.init_cache(B)}, {}, {}),
    "ShortConvolution.step": (CONV.step, {"x": ONE, "cache": CONV.init_cache(3)}, {}, {}),
    "Attention()": (
        Attention, {}, {"hidden_size": "size", "num_heads": "size", "num_kv_heads": "no size", "head_dim": "limit",
        "head_v_dim": "limit", "window": "limit", "qk_norm": "flag", "qkv_bias": "flag", "rope_theta": "base",
        "rope_dim": "no size", "norm_eps": "not negative"},
        {"hidden_size": D, "num_heads": 2, "qk_norm": True},
    ),
    "ShortConvolution.init_cache": (CONV.init_cache, {}, {"batch": "size", "dtype": "dtype"}, {"batch": 1}),
    "RMSNorm": (RMSNorm(D), {"x": X}, {}, {}),
    "GatedRMSNorm": (GatedRMSNorm(D), {"x": X, "gate": X}, {}, {}),
    "SimpleGLA()": (
        SimpleGLA, {}, {"hidden_size": "size", "num_heads": "size", "head_k_dim": "head size",
        "head_v_dim": "value size", "conv_size": "size", "use_short_conv": "flag", "conv_bias": "flag",
        "use_output_gate": "flag", "gate_logit_normalizer": "positive", "norm_eps": "not negative",
        "expand_k": "expand", "expand_v": "expand"},
        {"hidden_size": D, "num_heads": 2},
    ),
    "SimpleGLA() of given heads": (
        SimpleGLA, {}, {"head_k_dim": "head size", "head_v_dim": "value size", "expand_k": "positive",
        "expand_v": "positive"},
        {"hidden_size": D, "num_heads": 3, "head_k_dim": 1, "head_v_dim": 256},
    ),
    "Mamba2()": (
        Mamba2, {}, {"hidden_size": "size", "head_dim": "value size", "state_size": "head size", "n_groups": "size",
        "expand": "expand", "conv_size": "size", "conv_bias": "flag", "norm_eps": "not negative", "dt_min": "initial",
        "dt_max": "initial", "dt_init_floor": "floor", "A_init_range": "range", "use_bias": "flag",
        "conv_init": "base", "hidden_act": "choice", "D_has_hdim": "flag", "rmsnorm": "flag",
        "norm_before_gate": "flag", "dt_limit": "limits"},
        {"hidden_size": D, "head_dim": 16, "state_size": 16},
    ),
    "Mamba3()": (
        Mamba3, {}, {"hidden_size": "size", "head_dim": "head size", "state_size": "pairs", "n_groups": "size",
        "expand": "expand", "is_mimo": "flag", "is_outproj_norm": "flag", "use_bias": "flag",
        "norm_eps": "not negative", "A_floor": "not negative", "rope_fraction": "fraction", "dt_min": "initial",
        "dt_max": "initial", "dt_init_floor": "floor"},
        {"hidden_size": D, "head_dim": 16, "state_size": 16},
    ),
    "Mamba3() with MIMO": (
        Mamba3, {}, {"mimo_rank": "size", "state_size": "pairs"},
        {"hidden_size": D, "head_dim": 16, "state_size": 16, "is_mimo": True},
    ),
    "DeltaNet()": (
        DeltaNet, {}, {"hidden_size": "size", "num_heads": "size", "expand_k": "share", "expand_v": "share",
        "use_beta": "flag", "use_gate": "flag", "allow_neg_eigval": "flag", "qk_activation": "choice",
        "qk_norm": "choice", **CONVOLVED},
        {"hidden_size": D, "num_heads": 2},
    ),
    "GatedDeltaNet()": (
        GatedDeltaNet, {}, {**GROUPED, "use_gate": "flag", "output_gate_activation": "choice"}, HEADS,
    ),
    "GatedDeltaNet2()": (GatedDeltaNet2, {}, GROUPED, HEADS),
    "KimiDeltaAttention()": (KimiDeltaAttention, {}, {**GROUPED, "safe_gate": "flag", "lower_bound": "bound"}, HEADS),
    "KimiDeltaAttention() of safe gates": (
        KimiDeltaAttention, {}, {"lower_bound": "bound"}, {**HEADS, "safe_gate": True, "lower_bound": -5},
    ),
    "GatedDeltaProduct()": (
        GatedDeltaProduct, {}, {**GROUPED, "use_output_gate": "flag", "use_forget_gate": "flag",
        "num_householder": "size"}, HEADS,
    ),
    "ShortConvolution()": (
        ShortConvolution, {}, {"dim": "size", "width": "size", "bias": "flag", "activation": "activation",
        "init": "base"}, {"dim": D},
    ),
    "RMSNorm()": (RMSNorm, {}, {"dim": "size", "eps": "not negative", "group_size": "size"}, {"dim": D}),
    "GatedRMSNorm()": (
        GatedRMSNorm, {}, {"dim": "size", "eps": "not negative", "group_size": "size", "gate_first": "flag",
        "activation": "choice"},
        {"dim": D},
    ),
    "sp.shard": (SequenceParallel().shard, {"x": X}, {"dim": "integer"}, {"dim": 1}),
    "sp.gather": (SequenceParallel().gather, {"y": X}, {"dim": "integer"}, {"dim": 1}),
    "sp.partition": (SequenceParallel().partition, {}, {"total": "integer"}, {"total": 8}),
    "sp.set_lengths": (SequenceParallel().set_lengths, {}, {"lengths": "lengths"}, {"lengths": [8]}),
    "SequenceParallelLA": (
        partial(SequenceParallelLA, nn.Linear(D, D), SequenceParallel()), {}, {"allow": "paths"}, {"allow": []},
    ),
    "unwrap": (unwrap, {}, {"module": "module"}, {"module": nn.Linear(D, D)}),
    "verify": (partial(flexsp.verify, nn.Linear(D, D), SequenceParallel()), {"x": X}, {"dim": "integer"}, {"dim": 1}),
}  # fmt: skip


def row_of(op: Callable[..., Any], case: Case) -> tuple[Any, dict[str, Any], dict[str, str], dict[str, Any]]:
    """The row of an op with the arguments of its case; those that are no tensors are known by their names."""
    parameters = inspect.signature(op).parameters
    packed = "sp" in parameters
    given = case.inputs(Shape(B=B, T=T, H=H, K=K, V=V, states=2 if packed else B), seed=0)
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    if packed:
        tensors |= {"cu_seqlens": bounds(), "cu_seqlens_cpu": bounds()}
    kinds = KINDS if packed else {**KINDS, "cu_seqlens": "none"}
    others = {name: x for name, x in given.items() if name not in tensors}
    return op, tensors, {name: kinds[name] for name in parameters if name in kinds}, others


for case in ALL.values():
    name = getattr(case.op, "__name__", "")
    for op_name in (name, f"recurrent_{name.removeprefix('chunk_')}"):
        if getattr(ops, name, None) is case.op and op_name in ops.__all__:
            CALLS.setdefault(op_name, row_of(getattr(ops, op_name), case))
for layer_name, (cls, options, width) in OF_EACH.items():
    named = [name for name in inspect.signature(cls).parameters if name in KINDS]
    CALLS.setdefault(f"{layer_name}()", (cls, {}, {name: KINDS[name] for name in named}, options))
    if cls is not ShortConvolution:
        layer = cls(**options)
        CALLS[layer_name] = layer, {"x": torch.rand(B, T, width), "cu_seqlens": bounds()}, {}, {}
        CALLS[f"{layer_name}.step"] = layer.step, {"x": torch.rand(3, width)}, {}, {"cache": layer.init_cache(3)}
        CALLS[f"{layer_name}.init_cache"] = layer.init_cache, {}, {"batch": "size"}, {"batch": 1}
MAY_BE_NONE = {"head_k_dim", "head_v_dim", "group_size", "num_v_heads"}
# Tensors of any dtype, or of any number of axes.
ANY_TENSOR = {"sp.shard": 5, "sp.gather": 5, "verify": 5, "RMSNorm": 0, "GatedRMSNorm": 0}
NEGATIVE_IS_GOOD = {("sp.shard", "dim"), ("sp.gather", "dim")}


def bad_values(name: str) -> Iterator[tuple[str, Any]]:
    _, tensors, kinds, _ = CALLS[name]
    for argument, x in tensors.items():
        for at, change in enumerate(TENSOR):
            if name in ANY_TENSOR and (at == 5 or (at in (6, 7) and ANY_TENSOR[name])):
                continue
            yield argument, change(x)
    for argument, kind in kinds.items():
        for value in OPTIONAL[kind]:
            if value is None and argument in MAY_BE_NONE:
                continue
            if type(value) is int and value == -1 and (name, argument) in NEGATIVE_IS_GOOD:
                continue
            yield argument, value


@pytest.mark.parametrize("name", CALLS)
def test_names_the_argument(name: str) -> None:
    call, tensors, _, others = CALLS[name]
    call(**tensors, **others)
    raw = []
    for argument, value in bad_values(name):
        shown = f"{argument}={type(value).__name__} {value if not isinstance(value, torch.Tensor) else value.layout}"
        try:
            call(**{**tensors, **others, argument: value})
        except (ValueError, TypeError) as error:
            if not str(error).startswith((f"{argument}:", f"{argument}[", "inputs:")):
                raw.append(f"{shown}: {type(error).__name__}: {str(error)[:120]}")
        except Exception as error:
            raw.append(f"{shown}: {type(error).__name__}: {str(error)[:120]}")
        else:
            raw.append(f"{shown}: accepted")
    assert not raw, "\n".join(raw)


IN_ROWS_ELSEWHERE = {("mamba3", "initial_state"), ("recurrent_mamba3", "initial_state")}  # tests/ops/test_mamba3.py


def test_every_argument_of_an_op_has_a_row() -> None:
    given: dict[Any, set[str]] = {}
    for call, tensors, kinds, _ in CALLS.values():
        given[call] = given.get(call, set()) | {*tensors, *kinds}
    parameters = {(name, x) for name in ops.__all__ for x in inspect.signature(getattr(ops, name)).parameters}
    missing = {(name, x) for name, x in parameters if x not in given.get(getattr(ops, name), set())}
    missing = {(name, x) for name, x in missing if name != "Mamba3State"}
    remedy = "expected rows in flexsp/testing/cases.py for ops, and in KINDS here for arguments that are no tensors"
    assert missing == IN_ROWS_ELSEWHERE, f"{remedy}: {sorted(missing - IN_ROWS_ELSEWHERE)}"


def test_every_layer_has_rows() -> None:
    """Of its arguments, and of a call."""
    public = [getattr(flexsp.nn, name) for name in flexsp.nn.__all__]
    layers = {x for x in public if isinstance(x, type) and issubclass(x, nn.Module)} - {SequenceParallelLA}
    assert layers - {call for call, *_ in CALLS.values()} == set()
    assert layers - {type(call) for call, *_ in CALLS.values()} == set()
