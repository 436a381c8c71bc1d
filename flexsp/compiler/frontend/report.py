"""`CheckReport`: what `check` measured on a program's functions, for people and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexsp.compiler.frontend.program import Program
from flexsp.scan.transitions import KINDS

__all__ = ["NEUTRAL", "CheckReport", "Measured"]

NEUTRAL = 1e-8
"""By how much tokens of zeros may change a state that they leave as it is."""


@dataclass
class Measured:
    """What the checks add to while they run; attributes are those of `CheckReport`."""

    leak: float = 0.0
    cuts: float | None = None
    affine: float = 0.0
    zeros: float | None = None
    grows: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class CheckReport:
    """What `flexsp.compiler.check` found. ``str`` gives it as text, a line for each check.

    Attributes:
        functions: names of chunk_mode, decay_mode and merge_mode.
        transition: how decay_mode acts on the state: "none", "scalar", "vector", "elementwise", "dense", "max-plus" or
            "sequential".
        causal: True; a program that is not raises CompileError.
        leak: the largest change of an output by later tokens, which is rounding.
        chunk_independent: whether results do not depend on where chunks end. False only with ``chunk_size``.
        cuts: the largest difference between one chunk of 8 tokens and chunks of 3 and 5, relative to the largest
            number; None if results of such chunks were not finite.
        affine: whether the state after a chunk is A S + F of the state S before it, so that ranks run side by side.
        affine_error: the largest difference from A S + F, relative to the largest number above 1; None if not affine.
        zeros_are_neutral: whether tokens of zeros leave the state as it is, so that batches may be padded with them. A
            constant decay, for one, changes the state at every token. None if results at zeros are not finite.
        grows: (input, value) of inputs at -400 or 400 where results or gradients are not finite, because they grow, as
            with a positive log gate. An input that must have one sign is tried with that one.
        sizes: sizes that were used.
        seed: of the random chunks.
        program: the functions and what is known of them, for the stages that follow.
    """

    functions: tuple[str, str, str]
    transition: str
    causal: bool
    leak: float
    chunk_independent: bool
    cuts: float | None
    affine: bool
    affine_error: float | None
    zeros_are_neutral: bool | None
    grows: tuple[tuple[str, float], ...]
    sizes: Mapping[str, int]
    seed: int
    program: Program = field(repr=False, compare=False)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {n}" for name, n in self.sizes.items())
        lines = [
            f"transition: {self.transition} ({KINDS[self.transition].description})",
            f"checked: {', '.join(self.functions)} on random chunks in float64{f', {sizes}' if sizes else ''}",
            f"causal: later tokens change outputs by at most {self.leak:.1e}",
            f"chunks: {self._chunks()}",
            f"affine: {self._affine()}",
            f"tokens of zeros: {self._zeros()}",
            f"strong inputs: {self._strong()}",
        ]
        return "\n".join(lines)

    def _chunks(self) -> str:
        if not self.chunk_independent:
            return f"results depend on where they end, by {self.cuts:.1e}, as chunk_size allows"
        if self.cuts is None:
            return "not compared, since results of 8 random tokens are not finite"
        return f"results do not depend on where they end, up to {self.cuts:.1e}"

    def _affine(self) -> str:
        if self.affine:
            return f"the state after a chunk is A S + F, up to {self.affine_error:.1e}"
        return "no, it is max(S + a, F)" if self.transition == "max-plus" else "no"

    def _zeros(self) -> str:
        if self.zeros_are_neutral is None:
            return "results are not finite"
        return "leave the state as it is" if self.zeros_are_neutral else "change the state"

    def _strong(self) -> str:
        grown = ", ".join(f"{name} at {value:g}" for name, value in self.grows)
        return f"results and gradients are finite with inputs at -400 and 400{f', but for {grown}' if grown else ''}"
