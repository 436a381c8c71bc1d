"""Every layer of `flexsp.nn`, with arguments that keep it small."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
    KimiDeltaAttention,
    Mamba,
    Mamba2,
    Mamba3,
    ShortConvolution,
    SimpleGLA,
)

# The class, its arguments, and the width of its input [B, T, width].
LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any], int]] = {
    "conv": (ShortConvolution, {"dim": 6, "width": 4, "bias": True}, 6),
    "conv-wide": (ShortConvolution, {"dim": 5, "width": 9, "activation": None}, 5),
    "conv-one-tap": (ShortConvolution, {"dim": 5, "width": 1}, 5),
    "gla": (SimpleGLA, {"hidden_size": 24, "num_heads": 2, "head_k_dim": 16, "head_v_dim": 20}, 24),
    "gla-bare": (
        SimpleGLA,
        {"hidden_size": 32, "num_heads": 2, "use_short_conv": False, "use_output_gate": False},
        32,
    ),
    "mamba2": (Mamba2, {"hidden_size": 32, "head_dim": 16, "state_size": 16, "n_groups": 2}, 32),
    "mamba2-options": (
        Mamba2,
        {"hidden_size": 32, "head_dim": 16, "state_size": 8, "use_bias": True, "hidden_act": "gelu", "conv_init": 0.4,
         "D_has_hdim": True, "rmsnorm": False, "dt_limit": (0.01, 0.05)}, 32,
    ),
    "mamba3-bare": (
        Mamba3,
        {"hidden_size": 16, "head_dim": 8, "state_size": 8, "is_mimo": True, "mimo_rank": 2, "use_bias": True}, 16,
    ),
    "delta": (DeltaNet, {"hidden_size": 16, "num_heads": 2, "expand_v": 1.25, "use_gate": True}, 16),
    "delta-bare": (
        DeltaNet, {"hidden_size": 16, "num_heads": 2, "use_short_conv": False, "qk_activation": "elu"}, 16,
    ),
    "gated-delta": (GatedDeltaNet, {"hidden_size": 16, "num_heads": 1, "head_dim": 8, "num_v_heads": 2}, 16),
    "kda": (KimiDeltaAttention, {"hidden_size": 16, "num_heads": 1, "head_dim": 8, "num_v_heads": 2}, 16),
    "gdn2": (GatedDeltaNet2, {"hidden_size": 16, "num_heads": 1, "head_dim": 8, "num_v_heads": 2}, 16),
    "delta-product": (GatedDeltaProduct, {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "expand_v": 1.5}, 16),
    "vector-gla": (
        GatedLinearAttention,
        {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "expand_k": 1, "use_short_conv": True}, 16,
    ),
    "hgrn2-bare": (HGRN2, {"hidden_size": 16, "expand_ratio": 8}, 16),
    "hgrn": (HGRN, {"hidden_size": 16, "use_short_conv": True}, 16),
    "mamba": (Mamba, {"hidden_size": 16, "state_size": 4, "bias": True}, 16),
    "mlstm": (MLSTM, {"hidden_size": 16, "num_heads": 2, "use_short_conv": True, "use_bias": True}, 16),
    "rg-lru": (RGLRU, {"hidden_size": 12, "lru_width": 16, "num_heads": 2}, 12),
    "rwkv7": (RWKV7, {"hidden_size": 16, "head_dim": 8, "value_dim": 24}, 16),
    "attention": (
        Attention, {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "qkv_bias": True}, 16,
    ),
    "attention-window": (
        Attention,
        {"hidden_size": 12, "num_heads": 3, "head_dim": 5, "head_v_dim": 4, "window": 6, "rope_dim": 4}, 12,
    ),
    "attention-without-positions": (Attention, {"hidden_size": 12, "num_heads": 2, "rope_theta": None}, 12),
}  # fmt: skip

OF_EACH: dict[str, tuple[type[nn.Module], dict[str, Any], int]] = {}
"""The first of each class, by its name; tests/ops/test_validation.py fails for a public layer that has none."""
for row in LAYERS.values():
    OF_EACH.setdefault(row[0].__name__, row)


def make(name: str, seed: int) -> nn.Module:
    """With parameters that are no longer the ones and zeros that some begin as, so that each shows."""
    cls, options, _ = LAYERS[name]
    torch.manual_seed(seed)
    layer = cls(**options).double()
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.3 * torch.randn_like(x) * (x.dim() == 1 or not x.any()))
    return layer
