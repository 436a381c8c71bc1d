"""Softmax attention over ranks, for hybrid models: a function, and the layer `flexsp.nn.Attention`."""

from flexsp.nn.attention.function import scaled_dot_product_attention
from flexsp.nn.attention.layer import Attention, AttentionCache

__all__ = ["Attention", "AttentionCache", "scaled_dot_product_attention"]
