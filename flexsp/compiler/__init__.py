"""Three PyTorch functions become a linear-attention variant: forward, backward and sequence parallelism."""

from flexsp.compiler.linear_attention import LinearAttention
from flexsp.compiler.lowering import Lowering, register_lowering, replaced
from flexsp.compiler.meta import ConstExpr, SymbTensor
from flexsp.compiler.primitives import (
    cache_result,
    decayed_scores,
    decayed_sums,
    identity,
    matmul_out_fp32,
    unit_lower_inverse,
)
from flexsp.compiler.trace import CompileError

__all__ = [
    "CompileError",
    "ConstExpr",
    "LinearAttention",
    "Lowering",
    "SymbTensor",
    "cache_result",
    "decayed_scores",
    "decayed_sums",
    "identity",
    "matmul_out_fp32",
    "register_lowering",
    "replaced",
    "unit_lower_inverse",
]
