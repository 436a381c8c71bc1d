"""Hand-written code in place of what is generated for a program."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flexsp.exceptions import fail
from flexsp.kernels.launches import Buffer, Call, LaunchSpec

if TYPE_CHECKING:
    from flexsp.comm.group import SequenceParallel
    from flexsp.compiler.engine import Generated
    from flexsp.compiler.frontend.program import Program
    from flexsp.compiler.planning.launches import GeneratedCall
    from flexsp.kernels.recipe import Given

__all__ = ["Looks", "Lowering", "lowering_named", "lowering_of", "register_lowering", "replaced"]

Looks = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of an input, without the sequences."""
Functions = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], Callable[..., torch.Tensor]]


class Lowering:
    """How an engine of hand-written kernels runs the calls of a program.

    It may state a whole call (`call`), or replace launches of a generated one (`forward`, `backward`, `buffer`).
    A generated call is a list of `LaunchSpec` (`flexsp.compiler.planning.launches.GeneratedCall`). A lowering is given
    that list and returns the one that is run. Memory, packed documents, ranks, autograd, torch.compile, compilation
    ahead of time and the cost model go by what it returns. Subclass it and give an instance to `register_lowering`.

    Attributes:
        name: what ``explain`` calls it; one word, known to no other lowering.
        saved: those of its own buffers that the backward pass reads.
    """

    name: str = ""
    saved: frozenset[str] = frozenset()

    def call(
        self, code: Generated, given: Given, initial: bool, docs: int, ends: bool, sp: SequenceParallel | None
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

    def serves(self, code: Generated, inputs: Mapping[str, Looks]) -> bool:
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


_by_functions: dict[Functions, Lowering] = {}
_by_name: dict[str, Lowering] = {}


def register_lowering(lowering: Lowering, *functions: Callable[..., torch.Tensor]) -> None:
    """Has variants made of these three functions (chunk, decay, merge: the objects themselves) run by it on GPUs.

    Raises:
        ValueError: not three functions, no name, or a name or functions that another lowering has.
    """
    if len(functions) != 3 or not all(callable(x) for x in functions):
        fail("functions", "chunk, decay and merge", f"{len(functions)} arguments")
    if not isinstance(lowering, Lowering):
        fail("lowering", "an instance of a class made from Lowering", repr(lowering))
    if not isinstance(lowering.name, str) or not lowering.name.isidentifier():
        fail("lowering.name", "one word", repr(lowering.name))
    chunk, decay, merge = functions
    others = _by_name.get(lowering.name, lowering), _by_functions.get((chunk, decay, merge), lowering)
    for other in others:
        if other is not lowering:
            fail("lowering", "a name and functions that no other has", f"those of {other.name!r}")
    _by_name[lowering.name] = _by_functions[chunk, decay, merge] = lowering


def lowering_of(*functions: Any) -> str | None:
    """Name of the lowering of these three functions, None if there is none."""
    try:
        found = _by_functions.get((functions[0], functions[1], functions[2]))
    except TypeError:  # objects without a hash
        return None
    return None if found is None else found.name


def lowering_named(name: str) -> Lowering:
    """The lowering of this name, which another process may have registered: ValueError where it is not known here."""
    if name not in _by_name:  # those of the shipped variants
        importlib.import_module("flexsp.variants")
    if name not in _by_name:
        fail("lowering", f"one that this process registers ({', '.join(_by_name) or 'none'})", repr(name))
    return _by_name[name]
