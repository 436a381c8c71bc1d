"""Triton code of elementwise operators of aten, and their effect on padding."""

from __future__ import annotations

import operator
from typing import Any

import torch

from flexsp.compiler.graphs.values import Value, steady_at, zero_at

__all__ = [
    "BINARY", "COMPARISONS", "DIVISIONS", "EXPONENTIALS", "KEEPS_ZERO", "LOGIC", "ON_SIZES", "UNARY", "defined_at",
    "padding_of",
]  # fmt: skip

aten = torch.ops.aten

_NEAR_0 = "tl.where(tl.abs({{0}}) < 0.5, {}, {})"
_EXPM1 = "{0} * (1.0 + {0} * (1 / 2 + {0} * (1 / 6 + {0} * (1 / 24 + {0} * (1 / 120 + {0} * (1 / 720 + {0} / 5040))))))"
_ATANH = "{z} * (2.0 + {z2} * (2 / 3 + {z2} * (2 / 5 + {z2} * (2 / 7 + {z2} * (2 / 9 + {z2} * (2 / 11 + {z2} / 8))))))"
_Z = "({0} / (2.0 + {0}))"
_SIGN = "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))"
UNARY = {
    aten.neg.default: "-{}", aten.exp.default: "tl.exp({})", aten.exp2.default: "tl.exp2({})",
    aten.abs.default: "tl.abs({})", aten.sin.default: "tl.sin({})", aten.cos.default: "tl.cos({})",
    aten.sqrt.default: "tl.sqrt({})", aten.sigmoid.default: "tl.sigmoid({})", aten.log.default: "tl.log({})",
    aten.log2.default: "tl.log2({})", aten.rsqrt.default: "tl.rsqrt({})", aten.erf.default: "tl.erf({})",
    aten.log1p.default: _NEAR_0.format(_ATANH.format(z=_Z, z2=f"{_Z} * {_Z}"), "tl.log(1.0 + {0})"),
    aten.expm1.default: _NEAR_0.format(_EXPM1, "tl.exp({0}) - 1.0"),
    aten.reciprocal.default: "(1.0 / {})", aten.relu.default: "larger({}, 0.0)",
    aten.tanh.default: "(2.0 * tl.sigmoid(2.0 * {}) - 1.0)", aten.bitwise_not.default: "~({})",
    aten.logical_not.default: "~({})", aten.sgn.default: _SIGN, aten.sign.default: _SIGN,
}  # fmt: skip
KEEPS_ZERO = {
    aten.neg.default, aten.abs.default, aten.sin.default, aten.sqrt.default, aten.relu.default, aten.tanh.default,
    aten.sign.default, aten.sgn.default, aten.expm1.default, aten.log1p.default, aten.erf.default,
}  # fmt: skip
EXPONENTIALS = {aten.exp.default, aten.exp2.default, aten.expm1.default}
_DEFINED_AT_0 = EXPONENTIALS | {aten.sqrt.default, aten.log1p.default}
_NOT_AT_0 = {aten.log.default, aten.log2.default, aten.rsqrt.default, aten.reciprocal.default}
LOGIC = {
    aten.bitwise_and.Tensor: "{} & {}", aten.bitwise_or.Tensor: "{} | {}",
    aten.logical_and.default: "{} & {}", aten.logical_or.default: "{} | {}",
    aten.bitwise_not.default: "", aten.logical_not.default: "",
}  # fmt: skip
BINARY = {
    aten.add.Tensor: "{} + {}", aten.sub.Tensor: "{} - {}", aten.mul.Tensor: "{} * {}", aten.div.Tensor: "{} / {}",
    aten.maximum.default: "larger({}, {})", aten.minimum.default: "smaller({}, {})",
    aten.add.Scalar: "{} + {}", aten.sub.Scalar: "{} - {}", aten.mul.Scalar: "{} * {}", aten.div.Scalar: "{} / {}",
    aten.clamp_min.default: "larger({}, {})", aten.clamp_max.default: "smaller({}, {})",
    **{target: text for target, text in LOGIC.items() if text},
}  # fmt: skip
COMPARISONS = {
    getattr(getattr(aten, name), overload): "{} " + sign + " {}"
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="), ("eq", "=="), ("ne", "!="))
    for overload in ("Tensor", "Scalar")
}
BINARY |= COMPARISONS
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
_SUMS = {aten.add.Tensor, aten.add.Scalar}
_ZERO_OF_ZEROS = _SUMS | {aten.sub.Tensor, aten.sub.Scalar, aten.maximum.default, aten.minimum.default}
_ZERO_OF_ZEROS |= {aten.clamp_min.default, aten.clamp_max.default}
ON_SIZES = {
    operator.add: "({} + {})", operator.sub: "({} - {})", operator.mul: "({} * {})", operator.truediv: "({} / {})",
    operator.floordiv: "({} // {})", operator.pow: "({} ** {})", operator.neg: "(-{})", torch.sym_float: "({} * 1.0)",
}  # fmt: skip
"""Arithmetic on sizes."""


def defined_at(target: Any, x: Value) -> bool:
    """Whether a function is finite in the padding of x where x is."""
    if target in _NOT_AT_0 or target in DIVISIONS:
        return all(steady_at(x, axis) for axis in range(len(x.sizes)))
    if target in _DEFINED_AT_0:
        return all(axis in x.zero or steady_at(x, axis) for axis in range(len(x.sizes)))
    return True


def padding_of(target: Any, a: Value, b: Value, shape: tuple[str, ...]) -> dict[str, Any]:
    """What is known about the padding of a binary operation's result, as fields of its Value."""
    axes = range(len(shape))
    steady = frozenset(axis for axis in axes if steady_at(a, axis) and steady_at(b, axis))
    if target in COMPARISONS or target in LOGIC:
        return {"truth": True, "steady": steady}
    if target in _PRODUCTS:
        zero = frozenset(
            axis for axis in axes
            if (zero_at(a, axis) and (zero_at(b, axis) or not b.wild)) or (zero_at(b, axis) and not a.wild)
        )  # fmt: skip
        return {"zero": zero, "wild": a.wild or b.wild, "steady": steady}
    if target in DIVISIONS:
        zero = frozenset(axis for axis in axes if zero_at(a, axis) and not b.sizes)
        return {"zero": zero, "wild": a.wild or b.wild or not defined_at(target, b), "steady": steady}
    zeros = target in _ZERO_OF_ZEROS
    zero = frozenset(axis for axis in axes if zeros and zero_at(a, axis) and zero_at(b, axis))
    low = target in _SUMS and all(x.low or not x.wild for x in (a, b))
    low = low or (target is aten.sub.Tensor and a.low and not b.wild)
    return {"zero": zero, "wild": a.wild or b.wild, "low": low and (a.wild or b.wild), "steady": steady}
