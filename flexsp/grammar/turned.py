"""Gradients of angles in compiled programs whose rows were turned by running sums of `theta`.

Rows are turned before the program, by sums from the start of the text, and not for autograd. The program takes `theta`
[B, T, H, K/2], radians that each token adds, as one more input. Its functions do not read it; this engine gives its
gradient. Autograd's would be a sum over all later tokens, of which little is left, and roundings of rows and of their
gradients would add up over the text.

Turning all tokens from one on, and the last state, is the same as turning back the state that it finds. So later tokens
of the chunk are summed up, and all others are -<J S, dS> of the state S behind the chunk and its gradient: nothing is
carried from chunk to chunk (docs/math.md, section 18).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler import Lowering
from flexsp.compiler.frontend import functions
from flexsp.compiler.frontend.program import Program
from flexsp.kernels.launch_plan import Buffer, Role, gradient_of
from flexsp.kernels.launch_spec import Launch, LaunchSpec, copied, named
from flexsp.kernels.rotary import rotate, turn_rows
from flexsp.scan.chunks import states_between
from flexsp.scan.transitions import Transition

if TYPE_CHECKING:
    from flexsp.compiler.planning.generated_plan import GeneratedPlan

__all__ = ["THETA", "TurnedRows"]

THETA = "theta"
_CHUNK = 64  # tokens, in PyTorch
_PAIRS = 16  # of a program
_COLUMNS = 64  # that it holds at a time
_ENDED = "@ended"
Tensor = torch.Tensor
Optional = torch.Tensor | None


@dataclass(frozen=True)  # programs with equal ones share kernels
class TurnedRows(Lowering):
    """The generated launches, and one more that gives the gradient of `theta`.

    Attributes:
        rows: two or three inputs [B, T, H, K] whose pairs of channels 2 i and 2 i + 1 the caller has turned.
        chunk_size: that of the program, or None.
        of_token: how many of T are a token of `sp.set_lengths`.
    """

    rows: tuple[str, ...]
    chunk_size: int | None = None
    of_token: int = 1
    name = "generated_with_angles"

    def buffers(self, plan: GeneratedPlan) -> list[Buffer]:
        edges = plan.n_docs or plan.B, plan.H, *plan.state
        return [Buffer(_ENDED, Role.SAVED, torch.float32, edges)]

    def forward(self, plan: GeneratedPlan, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        return [*launches, copied(_ENDED, "@final")] if self._keeps_ends(plan) else launches

    def backward(self, plan: GeneratedPlan, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        from flexsp.kernels.angles import angle_grads
        from flexsp.kernels.run import power_of_2

        K, V = plan.state
        pairs = min(_PAIRS, power_of_2(K // 2))
        rows = (*self.rows, self.rows[0])[:3]
        of_rows = [y for x in rows for y in (x, gradient_of(x))]
        states, ended = "@states" if plan.scanned else None, _ENDED if self._keeps_ends(plan) else None
        given = [*of_rows, "@entering", "@leaving", states, ended]
        how, to, filler = Launch(0, 4, 1), gradient_of(THETA), "@entering"
        constants: dict[str, Any] = {
            "K": K, "V": V, "BP": pairs, "BV": min(_COLUMNS, power_of_2(V)), "C": plan.chunk,
            "THIRD": len(self.rows) > 2, "SEGMENTS": plan.scanned, "PACKED": plan.n_docs > 0,
        }  # fmt: skip
        mine = LaunchSpec(
            angle_grads.__name__, how, (plan.n_chunks, plan.B * plan.H, -(-(K // 2) // pairs)),
            (*(x or filler for x in given), to, "@table" if plan.n_docs else None), tuple(dict.fromkeys(named(*given))),
            (to,), (*rows, plan.T, plan.H, plan.n_chunks, plan.n_seg), constants, how.options, kernel=angle_grads,
        )  # fmt: skip
        return [*launches, mine]

    def _keeps_ends(self, plan: GeneratedPlan) -> bool:
        """Whether states behind the last tokens are needed, and are no edge of a segment."""
        assert plan.returns_final or plan.scanned
        return plan.n_docs > 0 or not plan.scanned

    def in_pytorch(
        self, program: Program, inputs: dict[str, Tensor], initial: Optional, cu_seqlens: Optional,
        sp: SequenceParallel | None, description: str,
    ) -> tuple[Tensor, Optional]:  # fmt: skip
        chunk = self.chunk_size or _CHUNK
        state = inputs[self.rows[0]].shape[-1], inputs["v"].shape[-1]
        bounds = None if cu_seqlens is None else cu_seqlens.tolist()
        made = functools.partial(_Chunks, self.rows)
        return functions.run(
            program, inputs, {}, initial, state, bounds, chunk, sp, self.of_token, description, made
        )  # fmt: skip


class _Chunks(functions.LocalChunks):
    """Chunks whose rows are turned once more by nothing, for the gradient: by sums over their own tokens. The states
    that they leave are turned back by the sum over all of these."""

    def __init__(self, rows: tuple[str, ...], *given: Any) -> None:
        super().__init__(*given)
        ends = []
        for values in self.inputs:
            angle = values[THETA].cumsum(1)
            values.update({name: rotate(values[name], angle - angle.detach()) for name in rows})
            ends.append(angle[:, -1])
        none = self.zero.new_zeros(*self.lead, 1, self.tokens[THETA].shape[-1])
        self.angles = self.in_order(ends, none)  # of chunks, [B, H, chunks, K/2]

    def behind(self, chunk: int, S: Tensor) -> Tensor:
        return turn_rows(S, -self.angles[:, :, chunk])

    def states(self, initial: Optional) -> Any:
        return functools.partial(self.walk, initial)

    def through(self) -> Transition:
        if self.program.transition == "sequential":
            return super().through()
        one = functions.unit_transition(self.zero)
        if self.begins:
            return Transition.of(self.zero, torch.zeros_like(one), kind="dense")
        unit = one.unsqueeze(2).expand(-1, -1, len(self.chunks), -1, -1)
        A = self.factors
        A = unit if A is None else A if self.program.transition == "dense" else A * unit
        back = (self.angles.detach() - self.angles).unsqueeze(-2)
        A = rotate(A.transpose(-1, -2), back).transpose(-1, -2)
        return Transition.of(
            self.zero, states_between(A, torch.zeros_like(A), one, None, dense=True)[:, :, -1], kind="dense"
        )
