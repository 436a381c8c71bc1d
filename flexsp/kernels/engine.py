"""The one entry of hand-written kernels: from the tensors of a call to its launches.

An `Engine` says what is special about a set of kernels: the names of a call's tensors, how a call is cut, and its
`LaunchPlan`, which lists its buffers and launches. The way from a call to these is here, and it is the same for all.
Calls of plain tensors run an executable, which is looked up by what the tensors look like. Calls in graphs of
torch.compile, in traces and under modes go through the operators of `flexsp.kernels.operators`, which find the engine
by its key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from flexsp.comm.derivatives import IN_PYTORCH, untransformed
from flexsp.comm.group import SequenceParallel
from flexsp.comm.transport import in_kernel
from flexsp.exceptions import asks_for_kernels
from flexsp.kernels import operators
from flexsp.kernels.between import Between
from flexsp.kernels.launch_plan import LaunchPlan
from flexsp.kernels.operators import Asked, Saved, Shard
from flexsp.runtime.kept import keep

if TYPE_CHECKING:
    from flexsp.kernels.executable import Executable

__all__ = ["Engine", "asks_for_kernels", "last_in_backward_chain", "neighbours", "register"]

Optional = torch.Tensor | None
_E = TypeVar("_E", bound="Engine")
_CALLS = 256  # signatures that are kept, of each engine, and forms


class Engine(ABC):
    """Calls of one form of one set of kernels.

    Attributes:
        kind: one word for the set of kernels, known to no other.
        title: what messages call it.
        form: what these calls have in common, as text. Operators in graphs know them by the key "kind|form".
        names: of the tensors, in order.
        params: those of them that have no row a token.
        rows: of the tensors for a token of `SequenceParallel.lengths`.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    form: str
    names: tuple[str, ...]
    params: frozenset[str] = frozenset()
    rows: int = 1
    _executables: ClassVar[dict[Any, Executable[Any]]]
    _engines: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls._executables, cls._engines = {}, {}

    @classmethod
    def of(cls: type[_E], form: str) -> _E:
        """The engine of this form, made once."""
        found: _E | None = cls._engines.get(form)
        if found is None:
            found = cls(form)
            keep(cls._engines, form, found, _CALLS)
        return found

    @abstractmethod
    def __init__(self, form: str) -> None: ...

    @abstractmethod
    def tiling(self, asked: Asked) -> Any:
        """How the call is cut into segments and tiles: the same object for the same sizes, which may be symbolic."""

    @abstractmethod
    def plan(self, tiling: Any, asked: Asked, dq_first: bool) -> LaunchPlan:
        """Buffers and launches of the call. `dq_first`: it is `last_in_backward_chain`."""

    # What the operators ask for

    def forward(self, asked: Asked) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
        return operators.outputs(self.executable(asked), asked, self._shard(asked))

    def backward(self, asked: Asked, kept: Saved, *others: Any) -> tuple[list[Optional], Optional]:
        return operators.gradients(self.executable(asked), asked.tensors, asked.initial, kept, *others)

    def axes(self, first: torch.Tensor) -> int:
        return 2

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        from flexsp.kernels.launch_plan import Role
        from flexsp.runtime.steps import Workspace

        plan, first = self.plan(self.tiling(asked), asked, False), asked.tensors[0]
        o, final, saved = plan.buffers["o"], plan.buffers["@final"], Workspace()
        for x in plan.buffers.values():
            if x.role is Role.SAVED:
                saved.add(x.name, x.dtype, *x.shape)
        return (
            first.new_empty(o.shape, dtype=o.dtype),
            first.new_empty(final.shape if asked.want_final else 0, dtype=final.dtype),
            first.new_empty(saved.nbytes, dtype=torch.uint8),
            first.new_empty(plan.buffers["@table"].shape if asked.n_docs else 0, dtype=torch.int32),
        )

    # Calls

    @classmethod
    def run(
        cls, form: str, tensors: list[torch.Tensor], initial: Optional, cu_seqlens: Optional, *,
        output_final_state: bool, sp: SequenceParallel | None, scale: float = 1.0,
    ) -> tuple[torch.Tensor, Optional]:  # fmt: skip
        """Outputs and final states of tensors already validated, differentiable.

        Args:
            scale: the factor on queries.
        """
        untransformed(cls.title, IN_PYTORCH)
        want_final = operators.wants_final(output_final_state, cu_seqlens, sp)
        initial = None if initial is None else initial.contiguous()
        if sp is not None and sp.segment:
            return cls._in_segments(form, tensors, initial, sp, scale, want_final)
        key = f"{cls.kind}|{form}"
        if not operators.plain(*tensors, initial, cu_seqlens):
            return operators.call(key, tensors, initial, cu_seqlens, want_final=want_final, sp=sp, scale=scale)
        n_docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        group = sp if sp is not None and sp.world_size > 1 else None
        engine, asked = cls.of(form), Asked(tensors, initial, cu_seqlens, n_docs, scale, want_final, group)
        return operators.run(engine.executable(asked), key, tensors, initial, cu_seqlens, engine._shard(asked), scale)

    @classmethod
    def run_both(
        cls, first: tuple[str, list[torch.Tensor], Optional], second: tuple[str, list[torch.Tensor], Optional],
        cu_seqlens: Optional, *, output_final_state: bool, sp: SequenceParallel | None, scale: float = 1.0,
    ) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:  # fmt: skip
        """Outputs and final states of two calls (form, tensors, initial states) over the same tokens, whose states the
        ranks exchange together. All tensors are `plain`."""
        untransformed(cls.title, IN_PYTORCH)
        want_final = operators.wants_final(output_final_state, cu_seqlens, sp)
        n_docs = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        group, parts = sp if sp is not None and sp.world_size > 1 else None, []
        shard: Shard | None = None
        for form, tensors, initial in (first, second):
            initial = None if initial is None else initial.contiguous()
            engine, asked = cls.of(form), Asked(tensors, initial, cu_seqlens, n_docs, scale, want_final, group)
            shard = engine._shard(asked) if shard is None else shard  # which ranks may ask each other for
            parts.append(operators.Part(engine.executable(asked), f"{cls.kind}|{form}", tensors, initial))
        assert shard is not None
        return operators.run_both(parts[0], parts[1], cu_seqlens, shard, scale)

    @classmethod
    def _in_segments(
        cls, form: str, tensors: list[torch.Tensor], initial: Optional, sp: SequenceParallel, scale: float,
        want_final: bool,
    ) -> tuple[torch.Tensor, Optional]:  # fmt: skip
        from flexsp.kernels.segments import run_in_segments

        engine, between = cls.of(form), cast("SequenceParallel", Between(sp.device))

        def make(some: Sequence[torch.Tensor]) -> Executable[Any]:
            return engine.executable(Asked([*some], None, None, 0, scale, False, between))

        shared = [name in engine.params for name in engine.names]
        return run_in_segments(sp, tensors, shared, initial, make, want_final, rows=engine.rows)

    def executable(self, asked: Asked) -> Executable[Any]:
        """How the call runs, worked out once for calls that look alike."""
        tiling, group = self.tiling(asked), asked.group
        dq_first = last_in_backward_chain(group)
        looks = [
            None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0)
            for x in (*asked.tensors, asked.initial)
        ]
        # A tiling's id stands for it, since its hash costs host time. The executable keeps its tiling alive, so that no
        # other one gets this id.
        key = (
            id(tiling), asked.tensors[0].device, self.form, *looks, asked.scale, asked.want_final, dq_first,
            -1 if group is None else group.id,
        )  # fmt: skip
        found = self._executables.get(key)
        if found is None:
            plan = self.plan(tiling, asked, dq_first)
            found = self._make(plan, dict(zip(self.names, asked.tensors, strict=True)), asked.initial, group)
            keep(self._executables, key, found, _CALLS)
        return found

    def _make(
        self, plan: LaunchPlan, given: dict[str, torch.Tensor], initial: Optional, sp: SequenceParallel | None
    ) -> Executable[Any]:  # fmt: skip
        from flexsp.kernels.executable import CallSpec, Executable  # they need Triton

        looks = CallSpec([name for name in given if name not in self.params], 3, given, initial)
        if plan.aligned_gradient:
            looks.require_vectors(*(name for name, x in given.items() if x.dim() == 4))
        return Executable(plan, looks, sp, lambda others, state, group: self._make(plan, others, state, group))

    def _shard(self, asked: Asked) -> Shard:
        """Which rows of how many these are; ranks tell each other where documents are packed."""
        T = asked.tensors[0].shape[1]
        return asked.group.shard_range(T, self.rows) if asked.n_docs and asked.group is not None else (0, T, T)


def register(engine: type[Engine], numbers_of_tensors: Iterable[int]) -> None:
    """Makes an engine known to the operators, and how many tensors its calls may have."""
    operators.define_kind(engine.kind, engine.of, engine.title, IN_PYTORCH)
    for number in numbers_of_tensors:
        operators.serve(number)


def neighbours(sp: SequenceParallel | None) -> tuple[bool, bool]:
    """Whether a rank waits for states of this one, and whether one waits for their gradients."""
    return (False, False) if sp is None else (not sp.is_last, sp.rank > 0)


def last_in_backward_chain(sp: SequenceParallel | None) -> bool:
    """Whether this is the rank at which gradients of states end: no other one waits for it. So it computes dq, which
    needs no dS, before it waits for its own neighbour."""
    return sp is not None and sp.rank == 0 and in_kernel(sp)
