"""Variants as programs of three functions: `flexsp.variants.gla.make(H, K, V, dtype)` is a `LinearAttention`."""

from flexsp.variants import (
    deltanet,
    gated_deltanet,
    gdn2,
    gla,
    gla_outer_gates,
    gla_own_bias,
    hgrn,
    hgrn2,
    linear,
    retnet,
    rwkv6,
    rwkv7,
    simple_gla,
    vector_gated_delta,
    vector_state,
)

__all__ = [
    "deltanet",
    "gated_deltanet",
    "gdn2",
    "gla",
    "gla_outer_gates",
    "gla_own_bias",
    "hgrn",
    "hgrn2",
    "linear",
    "retnet",
    "rwkv6",
    "rwkv7",
    "simple_gla",
    "vector_gated_delta",
    "vector_state",
]
