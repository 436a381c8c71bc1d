"""Nine variants as programs of three functions: `flexsp.variants.gla.make(H, K, V, dtype)` is a `LinearAttention`."""

from flexsp.variants import (
    deltanet,
    gated_deltanet,
    gla,
    gla_own_bias,
    hgrn,
    linear,
    retnet,
    simple_gla,
    vector_gated_delta,
)

__all__ = [
    "deltanet",
    "gated_deltanet",
    "gla",
    "gla_own_bias",
    "hgrn",
    "linear",
    "retnet",
    "simple_gla",
    "vector_gated_delta",
]
