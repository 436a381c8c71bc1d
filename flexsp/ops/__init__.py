"""Functional API: one file a family, in the layout of flash-linear-attention plus ``sp``."""

from flexsp.ops.lightning import chunk_lightning_attn
from flexsp.ops.linear_attn import chunk_linear_attn
from flexsp.ops.mamba2 import mamba2_ssd
from flexsp.ops.retention import chunk_retention
from flexsp.ops.simple_gla import chunk_simple_gla, recurrent_simple_gla

__all__ = [
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "mamba2_ssd",
    "recurrent_simple_gla",
]
