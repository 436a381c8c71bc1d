"""Hand-written code in place of what is generated for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from flexsp.exceptions import fail
from flexsp.kernels.launches import Buffer, Call, LaunchSpec

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.compiler.frontend.program import Program
    from flexsp.compiler.planning.launches import GeneratedCall
    from flexsp.kernels.executable import CallSpec

__all__ = ["TensorSpec", "Lowering", "in_order", "replaced"]

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of an input, without the sequences."""


class Lowering:
    """How an engine of hand-written kernels runs the calls of a program.

    It may state a whole call (`call`), or replace launches of a generated one (`forward`, `backward`, `buffer`).
    A generated call is a list of `LaunchSpec` (`flexsp.compiler.planning.launches.GeneratedCall`). A lowering is given
    that list and returns the one that is run. Memory, packed documents, ranks, autograd, torch.compile, compilation
    ahead of time and the cost model go by what it returns. Subclass it and give an instance to the variants that it
    runs, as ``LinearAttention(..., lowerings=[...])``.

    Attributes:
        name: what ``explain`` calls it; one word, that of no other lowering of the program.
        saved: those of its own buffers that the backward pass reads.
    """

    name: str = ""
    saved: frozenset[str] = frozenset()

    def call(
        self, code: Generated, given: CallSpec, initial: bool, docs: int, ends: bool, sp: SequenceParallel | None
    ) -> Call | None:  # fmt: skip
        """A call with a plan, buffers and launches of its own; None where it has none for such a call.

        Args:
            code: the generated kernels, with the program.
            given: what the inputs look like.
            initial: initial states are given on this rank.
            docs: packed documents, 0 if not packed.
            ends: final states leave on this rank.
            sp: the ranks, None for one.
        """
        return None

    def in_pytorch(
        self, program: Program, inputs: dict[str, torch.Tensor], initial: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None, text: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # fmt: skip
        """Outputs and final states of a call on CPU or in float64; None where the functions themselves run.

        Args:
            inputs: by name, tokens [B, T, H, ...] and parameters [H, ...], in the dtype of states.
            text: what ranks compare of the call.
        """
        return None

    def serves(self, code: Generated, inputs: Mapping[str, TensorSpec]) -> bool:
        """Whether `call` runs all calls with such inputs, by name, where no kernels are generated for their sizes."""
        return False

    def refuses(self, call: GeneratedCall) -> str | None:
        """Why such a call runs the generated launches alone, or None."""
        return None

    def forward(self, call: GeneratedCall, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        """The launches of the forward pass, of those that are generated."""
        return launches

    def backward(self, call: GeneratedCall, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        """The launches of the backward pass, of those that are generated."""
        return launches

    def buffer(self, call: GeneratedCall, name: str) -> Buffer:
        """A buffer of its own, whose name begins with "own."."""
        raise NotImplementedError(f"{self.name}: no buffer {name!r}")


def replaced(launches: Sequence[LaunchSpec], phases: Mapping[str, Sequence[LaunchSpec]]) -> list[LaunchSpec]:
    """Launches where `phases` says by kind what is run in place of one: nothing, if empty.

    Raises:
        ValueError: a kind that is not launched.
    """
    missing = sorted(phases.keys() - {x.kind for x in launches})
    if missing:
        fail("phases", f"kinds among {', '.join(dict.fromkeys(x.kind for x in launches))}", ", ".join(missing))
    return [y for x in launches for y in phases.get(x.kind, (x,))]


def in_order(lowerings: Sequence[Lowering]) -> tuple[Lowering, ...]:
    """What a program carries of these: the first that takes a call runs it.

    Raises:
        ValueError: no Lowering, one without a name, or two of one name.
    """
    if not isinstance(lowerings, (list, tuple)) or not all(isinstance(x, Lowering) for x in lowerings):
        fail("lowerings", "a list of instances of classes made from Lowering", repr(lowerings))
    for x in lowerings:
        if not isinstance(x.name, str) or not x.name.isidentifier():
            fail("lowering.name", "one word", repr(x.name))
    names = [x.name for x in lowerings]
    if len(set(names)) < len(names):
        fail("lowerings", "one of each name", ", ".join(names))
    return tuple(lowerings)
