"""Three PyTorch functions become a linear-attention variant: forward, backward and sequence parallelism."""

from flexsp.compiler.frontend.check import check
from flexsp.compiler.frontend.meta import ConstExpr, SymbTensor
from flexsp.compiler.frontend.primitives import (
    cache_result,
    decayed_scores,
    decayed_sums,
    identity,
    matmul_out_fp32,
    unit_lower_inverse,
)
from flexsp.compiler.frontend.report import CheckReport
from flexsp.compiler.linear_attention import LinearAttention
from flexsp.compiler.planning.lowering import Lowering, replaced
from flexsp.exceptions import CompileError

__all__ = [
    "CheckReport",
    "CompileError",
    "ConstExpr",
    "LinearAttention",
    "Lowering",
    "SymbTensor",
    "cache_result",
    "check",
    "decayed_scores",
    "decayed_sums",
    "identity",
    "matmul_out_fp32",
    "replaced",
    "unit_lower_inverse",
]
