"""`Lowering`: hand-written kernels in place of some or all that are generated for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from flexsp.comm.group import SequenceParallel
from flexsp.compiler.frontend.program import Program
from flexsp.exceptions import fail
from flexsp.kernels.launch_plan import Buffer, LaunchPlan
from flexsp.kernels.launch_spec import LaunchSpec

if TYPE_CHECKING:
    from flexsp.compiler.backend.generated_kernels import Generated
    from flexsp.compiler.planning.generated_plan import GeneratedPlan
    from flexsp.kernels.executable import CallSpec

__all__ = ["TensorSpec", "Lowering", "in_order", "other_inputs", "replaced"]

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of an input, without the batch axis."""

_FORMER = {"call": "plan", "buffer": "buffers"}
"""What methods were called before, with their names now. Nothing asks the former."""


class Lowering:
    """How an engine of hand-written kernels runs the calls of a program.

    It plans a whole call (`plan`), or replaces launches of a generated call (`forward`, `backward`,
    `buffers`). A generated call is a list of `LaunchSpec` (`flexsp.compiler.planning.generated_plan.GeneratedPlan`); a
    lowering gets that list and returns the list that runs. Memory, packed documents, ranks, autograd, torch.compile,
    compilation ahead of time and the cost model use the returned list. Subclass it, and give an instance to the
    variants that it runs: ``LinearAttention(..., lowerings=[...])``.

    Attributes:
        name: its name in ``explain``: one word, which no other lowering of the program has.
        chunk_size: of the programs with a ``chunk_size`` whose calls `in_pytorch` runs; None for those without.
    """

    name: str = ""
    chunk_size: int | None = None

    def plan(
        self, code: Generated, given: CallSpec, initial: bool, n_docs: int, returns_final: bool,
        sp: SequenceParallel | None,
    ) -> LaunchPlan | None:  # fmt: skip
        """A plan of its own for a whole call; None if the lowering does not take the call.

        Args:
            code: the generated kernels, with the program.
            given: shapes, dtypes and strides of the inputs.
            initial: whether this rank is given initial states.
            n_docs: number of packed documents, 0 if not packed.
            returns_final: whether this rank returns the final states.
            sp: the ranks, None for one rank.
        """
        return None

    def in_pytorch(
        self, program: Program, inputs: dict[str, torch.Tensor], initial: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, sp: SequenceParallel | None, description: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # fmt: skip
        """Outputs and final states of a call on CPU or in float64; None if the program's functions run it.

        Args:
            inputs: by name, tokens [B, T, H, ...] and parameters [H, ...], in the dtype of states.
            description: what ranks compare of the call.
        """
        return None

    def serves(self, code: Generated, inputs: Mapping[str, TensorSpec]) -> bool:
        """Whether `plan` takes all calls with such inputs, even with sizes that no kernels are generated for."""
        return False

    def refuses(self, plan: GeneratedPlan) -> str | None:
        """Why this call runs the generated launches unchanged; None if the lowering replaces some."""
        return None

    def forward(self, plan: GeneratedPlan, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        """The launches of the forward pass, given the generated ones."""
        return launches

    def backward(self, plan: GeneratedPlan, launches: list[LaunchSpec]) -> list[LaunchSpec]:
        """The launches of the backward pass, given the generated ones."""
        return launches

    def buffers(self, plan: GeneratedPlan) -> Sequence[Buffer]:
        """The buffers that this lowering adds, with names that no other buffer of the plan has. Their role is
        `Role.SAVED` if the backward pass reads what the forward pass left."""
        return ()


def replaced(launches: Sequence[LaunchSpec], phases: Mapping[str, Sequence[LaunchSpec]]) -> list[LaunchSpec]:
    """The launches, with those of each kind in `phases` replaced by its list, which may be empty.

    Raises:
        ValueError: no launch is of a kind in `phases`.
    """
    missing = sorted(phases.keys() - {x.kind for x in launches})
    if missing:
        fail("phases", f"kinds among {', '.join(dict.fromkeys(x.kind for x in launches))}", ", ".join(missing))
    return [y for x in launches for y in phases.get(x.kind, (x,))]


def other_inputs(code: Generated, names: Sequence[str]) -> str | None:
    """Why a program that has a variant's three functions may not have its kernels, or None: these take inputs of three
    dimensions with these names, and a number "scale"."""
    meta = code.program.meta
    if set(meta.tokens) != set(names) or meta.params or any(len(x.shape) != 3 for x in meta.tokens.values()):
        return f"its inputs are {', '.join(names)}, of three dimensions each"
    return None if "scale" in meta.numbers else "its scale is a number"


def in_order(lowerings: Sequence[Lowering]) -> tuple[Lowering, ...]:
    """The lowerings of a program, checked. The first that takes a call runs it.

    Raises:
        ValueError: an entry that is no Lowering, one without a name or with a method of a former name, or two of the
            same name.
    """
    if not isinstance(lowerings, (list, tuple)) or not all(isinstance(x, Lowering) for x in lowerings):
        fail("lowerings", "a list of instances of classes made from Lowering", repr(lowerings))
    for x in lowerings:
        if not isinstance(x.name, str) or not x.name.isidentifier():
            fail("lowering.name", "one word", repr(x.name))
        for former, name in _FORMER.items():
            if hasattr(x, former) and getattr(type(x), name) is getattr(Lowering, name):
                fail(f"lowerings: {x.name}", f"a method {name}, which {former} was called before", f"{former} alone")
    names = [x.name for x in lowerings]
    if len(set(names)) < len(names):
        fail("lowerings", "one of each name", ", ".join(names))
    return tuple(lowerings)
