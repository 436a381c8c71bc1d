"""A function of one's own of queries and keys, and the check that it treats tokens one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexsp.comm.derivatives import transformed
from flexsp.exceptions import check_dense, fail
from flexsp.kernels.operators import plain

__all__ = ["Mapped"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_B, _T = 2, 3  # of the random tokens that are looked at
# Of the largest feature. What looks at other tokens is off by more; products of other sizes, under autocast, by less.
_TOLERANCE, _IN_FLOAT64 = 2.0**-4, 1e-8


class Mapped:
    """Calls ``fn`` on queries and keys [B, T, ..., H, K].

    Attributes:
        has_parameters: whether its results had gradients for something else than rows; known after the first call.
    """

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.fn, self.has_parameters = fn, False
        self._looked_at: set[Any] = set()

    @property
    def name(self) -> str:
        return str(getattr(self.fn, "__name__", type(self.fn).__name__))

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The features of the argument ``name``, in its dtype.

        Raises:
            ValueError: x is no floating tensor, fn gives another shape, or it does not treat tokens one by one.
        """
        check_dense(name, x, "a floating tensor [B, T, ..., H, K]")
        if x.dtype not in _FLOATS or x.dim() < 4:
            fail(name, "a floating tensor [B, T, ..., H, K]", f"{list(x.shape)} of {x.dtype}")
        found = self._called(x)
        if plain(x, found) and not transformed():  # elsewhere there are no numbers to look at, or not now
            key = x.shape[2:], x.dtype, x.device
            if key not in self._looked_at:
                self._look(x)
                self._looked_at.add(key)
        return found

    def _called(self, x: torch.Tensor) -> torch.Tensor:
        found = self.fn(x)
        if not isinstance(found, torch.Tensor):
            fail(f"feature_map.map({self.name})", "a tensor as result", type(found).__name__)
        if found.shape[:-1] != x.shape[:-1] or not found.is_floating_point():
            expected = f"floating features {list(x.shape[:-1])} + [M] of rows {list(x.shape)}"
            fail(f"feature_map.map({self.name})", expected, f"{list(found.shape)} of {found.dtype}")
        return found.to(x.dtype)

    def _look(self, like: torch.Tensor) -> None:
        """ValueError unless each of some random tokens has the same features apart from the others.

        Over ranks, in packed documents and in decoding a token stands beside other tokens than it does here.
        """
        made = torch.Generator(device="cpu").manual_seed(0)
        x = torch.randn(_B, _T, *like.shape[2:], generator=made).to(like)
        with torch.inference_mode(False), torch.enable_grad():
            whole = self._called(x)
        self.has_parameters = self.has_parameters or whole.requires_grad
        with torch.no_grad():
            apart = [torch.cat([self._called(row[:, t : t + 1]) for t in range(_T)], 1) for row in x.split(1)]
            largest = float(whole.abs().nan_to_num(0.0, 0.0).amax())
            most = (_IN_FLOAT64 if x.dtype == torch.float64 else _TOLERANCE) * largest
            if not torch.allclose(whole, torch.cat(apart), rtol=0.0, atol=most, equal_nan=True):
                fail(
                    f"feature_map.map({self.name})", "a function that makes a token's features of that token alone",
                    "other features where the token stands among others",
                )  # fmt: skip
