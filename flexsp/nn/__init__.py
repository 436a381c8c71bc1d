"""Layers built on `flexsp.ops`, and the wrapper that makes any such layer sequence parallel."""

from flexsp.nn.attention import Attention, AttentionCache
from flexsp.nn.conv import ShortConvolution
from flexsp.nn.delta_layers import DeltaNet, GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, KimiDeltaAttention
from flexsp.nn.gated_layers import HGRN, HGRN2, RGLRU, GatedLinearAttention
from flexsp.nn.layers import Mamba2, SimpleGLA
from flexsp.nn.mamba import Mamba
from flexsp.nn.mamba3 import Mamba3
from flexsp.nn.mlstm import MLSTM
from flexsp.nn.norm import GatedRMSNorm, RMSNorm
from flexsp.nn.recurrent import LayerCache
from flexsp.nn.rwkv7 import RWKV7
from flexsp.nn.verify import Verification, verify
from flexsp.nn.wrapper import SequenceParallelLA, unwrap

__all__ = [
    "HGRN",
    "HGRN2",
    "MLSTM",
    "RGLRU",
    "RWKV7",
    "Attention",
    "AttentionCache",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "LayerCache",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "RMSNorm",
    "SequenceParallelLA",
    "ShortConvolution",
    "SimpleGLA",
    "Verification",
    "unwrap",
    "verify",
]
