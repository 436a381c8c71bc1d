"""Functional API: one file a family, in the layout of flash-linear-attention plus ``sp``."""

from flexsp.ops.delta_rule import chunk_delta_rule, recurrent_delta_rule
from flexsp.ops.gated_delta_product import chunk_gated_delta_product, recurrent_gated_delta_product
from flexsp.ops.gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from flexsp.ops.gdn2 import chunk_gdn2, recurrent_gdn2
from flexsp.ops.gla import chunk_gla, recurrent_gla
from flexsp.ops.hgrn import chunk_hgrn, recurrent_hgrn
from flexsp.ops.hgrn2 import chunk_hgrn2, recurrent_hgrn2
from flexsp.ops.kda import chunk_kda, recurrent_kda
from flexsp.ops.lightning import chunk_lightning_attn
from flexsp.ops.linear_attn import chunk_linear_attn
from flexsp.ops.mamba2 import mamba2_ssd
from flexsp.ops.mamba3 import Mamba3State, mamba3, recurrent_mamba3
from flexsp.ops.mlstm import chunk_mlstm, recurrent_mlstm
from flexsp.ops.retention import chunk_retention
from flexsp.ops.rg_lru import recurrent_rg_lru, rg_lru
from flexsp.ops.rwkv6 import chunk_rwkv6, recurrent_rwkv6
from flexsp.ops.rwkv7 import chunk_rwkv7, recurrent_rwkv7
from flexsp.ops.selective_scan import recurrent_selective_scan, selective_scan
from flexsp.ops.simple_gla import chunk_simple_gla, recurrent_simple_gla

__all__ = [
    "Mamba3State",
    "chunk_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_hgrn",
    "chunk_hgrn2",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_mlstm",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "mamba2_ssd",
    "mamba3",
    "recurrent_delta_rule",
    "recurrent_gated_delta_product",
    "recurrent_gated_delta_rule",
    "recurrent_gdn2",
    "recurrent_gla",
    "recurrent_hgrn",
    "recurrent_hgrn2",
    "recurrent_kda",
    "recurrent_mamba3",
    "recurrent_mlstm",
    "recurrent_rg_lru",
    "recurrent_rwkv6",
    "recurrent_rwkv7",
    "recurrent_selective_scan",
    "recurrent_simple_gla",
    "rg_lru",
    "selective_scan",
]
