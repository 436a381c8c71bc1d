"""Functions of queries and keys. Each function here returns a component for FlexLinearAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from flexsp.grammar.mapped import Mapped

__all__ = ["FeatureMap", "elu", "identity", "map", "relu", "rope"]


@dataclass(frozen=True)
class FeatureMap:
    """A function of queries and keys; `inputs` are names of tensors that a call must give for it."""

    kind: Literal["identity", "elu", "relu", "rope", "map"]
    inputs: tuple[str, ...] = ()
    base: float = 10000.0
    function: Mapped | None = None

    @property
    def name(self) -> str:
        """The kind, for people, with the function's name."""
        return self.kind if self.function is None else f"{self.kind}({self.function.name})"


def identity() -> FeatureMap:
    """q and k as they are."""
    return FeatureMap("identity")


def elu() -> FeatureMap:
    """elu(x) + 1 (Katharopoulos et al. 2020)."""
    return FeatureMap("elu")


def relu() -> FeatureMap:
    """max(x, 0)."""
    return FeatureMap("relu")


def map(fn: Callable[[torch.Tensor], torch.Tensor]) -> FeatureMap:
    """fn(q) and fn(k), with ``fn`` of one's own: [..., K] to [..., M], a row at a time.

    ``fn`` may be an `nn.Module`, which the caller registers and trains. It runs in PyTorch, in the dtype of q, to which
    its result is cast. M is the K of all that follows: of states, of gates for each key channel, of ``scale`` if that
    is None. ``fn`` must make the features of a token of that token alone, the same every time: what looks at other
    tokens, or draws random numbers, raises ValueError at the first call of its sizes, but not in graphs of
    torch.compile. Under ``sp`` gradients of its parameters are this rank's share, as of any module. With ``bitwise``
    groups it must have no parameters.
    """
    if not callable(fn):
        raise ValueError(f"fn: expected a function of a tensor [..., K], got {fn!r}")
    return FeatureMap("map", function=Mapped(fn))


def rope(data_dependent: bool = False, base: float = 10000.0) -> FeatureMap:
    """Rotates the pairs (x_{2i}, x_{2i+1}) of q and k; K must be even.

    By position times base^{-2i/K}, or if ``data_dependent`` by the running sum of the call's ``theta`` [B, T, H, K/2]
    (radians). Positions and sums count from the start of the whole sequence, of each document where packed.

    With ``data_dependent``, inputs in half precision are computed in float32: gradients of theta are sums over all
    later tokens, of which little is left. Compiled programs (delta_rule, temporal_difference, contrastive, masks) begin
    these sums anew at every chunk, so that errors do not grow with the text. With one_step_gd the scalar-decay engine
    gives these gradients. In kernels it makes those of a chunk's tokens add up to what states tell. Roundings of
    float32 are left, which add up: in PyTorch, in gradients summed over 32,768 tokens, to 1e-4 to 4e-3.

    A final state continues in the next call, whose angles begin at 0 again: its rows, and keys that are kept beside
    it, are turned back by the angle of the last token, by position by one more. With a gate for each key channel, with
    preconditioned_gd, information and a custom transition, whose state does not turn with the keys, the state keeps
    the angle instead: [N, H, K + rows, V + columns + 1], radians in the first K/2 rows of the last column.
    """
    return FeatureMap("rope", ("theta",) if data_dependent else (), base)
