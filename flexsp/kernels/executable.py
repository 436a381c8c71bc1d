"""A call worked out once for its signature (buffers, launches), then run with little host time.

A signature is what a call's tensors look like: shapes, strides, dtypes, alignment. For each there is an `Executable`:
where every buffer lies in one allocation, and the launches with their numbers. A repeated call fills in addresses.
All engines come here with a `flexsp.kernels.launch_plan.LaunchPlan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flexsp.comm.derivatives import changed
from flexsp.comm.group import SequenceParallel, get_sp
from flexsp.devices import check_heads
from flexsp.exceptions import checks_wanted
from flexsp.kernels.between import Between
from flexsp.kernels.launch_plan import LaunchPlan, Role, gradient_of
from flexsp.kernels.launch_spec import PROPAGATE, LaunchSpec, SameTokenStride
from flexsp.kernels.tail import tail_launches
from flexsp.runtime.launch import KernelLaunch, outcome
from flexsp.runtime.steps import Frame, Step, Workspace, launches_of, run_steps
from flexsp.scan.both import Scan, propagate_both
from flexsp.scan.propagate import local_launch, propagate
from flexsp.scan.transitions import KINDS, Transition

__all__ = ["CallSpec", "Executable", "SegmentScan", "aligned_16", "run_both"]

Tensors = dict[str, torch.Tensor]
Optional = torch.Tensor | None
Strides = tuple[int, int, int]
_F32 = torch.float32
_P = TypeVar("_P", bound=LaunchPlan)
_R = TypeVar("_R")
_S = TypeVar("_S")
Runner = Callable[[Sequence[Step], Frame, torch.device], bool | None]


class CallSpec:
    """What a call is given, as kernels see it.

    Heads are those of the input that has most, and so are tokens; others may have a part of them, where an engine takes
    such inputs. Outputs have the rows of the first input.

    Attributes:
        copied: inputs that kernels read from a contiguous copy.
        strides: of the inputs that have a row a token, in elements from sequence to sequence, token to token and head
            to head.
        shapes: of the inputs, without the sequences.
        layout: how the tensors lie in memory, None for those that have none.
    """

    def __init__(self, tokens: Sequence[str], dims: int, given: Tensors, initial: Optional) -> None:
        """`tokens`: inputs with a row a token, in order; `dims`: axes of the first one for one sequence."""
        lead = given[tokens[0]]
        self.tokens, self.names = tuple(tokens), tuple(given)
        self.dtypes = [x.dtype for x in given.values()]
        self.layout = None if isinstance(lead, FakeTensor) else _layout_of(given.values(), initial)
        self.device, self.dtype = lead.device, lead.dtype
        self.batched = lead.dim() > dims
        self.B = lead.shape[0] if self.batched else 1
        self.T, self.H = (max([given[x].shape[self.batched + i] for x in tokens]) for i in (0, 1))
        self.lead = (*lead.shape[: 1 + self.batched], self.H)
        check_heads("inputs", self.B, self.H)
        self.copied = [name for name, x in given.items() if not self._lies_well(name, x)]
        given = given | {name: given[name].contiguous() for name in self.copied}
        self.strides = {name: self.strides_of(given[name]) for name in tokens}
        self.shapes = {name: tuple(x.shape[self.batched if name in tokens else 0 :]) for name, x in given.items()}

    def _lies_well(self, name: str, x: torch.Tensor) -> bool:
        if name not in self.tokens:
            return x.is_contiguous()
        return x.dim() == 2 + self.batched or x.stride(-1) == 1 or x.shape[-1] == 1

    def tokens_per_row(self, name: str) -> int:
        """How many tokens there are for each row of an input."""
        rows = self.shapes[name][0]
        return self.T // rows if rows else 1

    def require_vectors(self, *tokens: str) -> None:
        """Has kernels read contiguous copies of those inputs with a row a token that do not lie `aligned_16`."""
        for name in tokens:
            at = None if self.layout is None else self.layout[self.names.index(name)]
            aligned = at is None or at[1]
            if name not in self.copied and not (aligned and aligned_16(self.strides[name])):
                rows, heads, width = self.shapes[name]
                self.copied.append(name)
                self.strides[name] = (rows * heads * width if self.B > 1 else 0, heads * width, width)

    def strides_of(self, x: torch.Tensor) -> Strides:
        """Of an input or of the outputs' gradient."""
        b, t, h = x.stride()[:3] if self.batched else (0, *x.stride()[:2])
        return (b if self.B > 1 else 0, t, h)


def aligned_16(strides: Sequence[int]) -> bool:
    """Whether all strides are multiples of 16 elements. Then Triton knows that all rows lie at multiples of 16 bytes if
    the first one does."""
    return all(n % 16 == 0 for n in strides)


@dataclass(frozen=True)
class SegmentScan:
    """The scan of a segment's own states, in two halves: with the state that enters in the first place of `states` (the
    last one if `reverse`), `launch` leaves in the last place (the first one) what goes on to the next segment."""

    states: str
    launch: KernelLaunch
    reverse: bool

    def __call__(self, frame: Frame) -> None:
        """As a step among others: the state that enters is the one that is there, and what leaves stays."""
        run_steps([self.launch], frame, frame[self.states].device)

    def run(self, frame: Frame, entering: torch.Tensor, device: torch.device) -> torch.Tensor:
        """What goes on to the next segment."""
        states = frame[self.states]
        first, last = (states[:, -1], states[:, 0]) if self.reverse else (states[:, 0], states[:, -1])
        first.copy_(entering.view(first.shape))
        run_steps([self.launch], frame, device)
        return last.clone(memory_format=torch.contiguous_format).view(entering.shape)


@dataclass(frozen=True)
class Backward:
    """Steps of one backward pass; `scratch` holds its buffers, `makes` are the gradients that it writes."""

    steps: list[Step]
    scratch: Workspace
    makes: frozenset[str]


class Executable(Generic[_P]):
    """How calls of one signature run: the launches of `plan`, with the strides of their tensors and with memory.

    `remake` gives the executable for inputs and initial states of the same shapes and other strides, and for a group
    of ranks. It keeps none of these alive. `engine` is the name of the lowering that plans the whole call.
    """

    constant_in_recipes = True

    def __init__(
        self, plan: _P, given: CallSpec, sp: SequenceParallel | None,
        remake: Callable[[Tensors, Optional, SequenceParallel | None], Executable[_P]], engine: str | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.given, self.remake, self.engine = plan, given, remake, engine
        outputs = plan.buffers["o"]
        self.device, self.dtype, self.names = given.device, outputs.dtype, given.names
        self.gradients = [(name, gradient_of(name)) for name in self.names]
        self.others: dict[Any, Executable[_P]] = {}
        self._blanks: dict[Any, torch.Tensor] = {}
        self.sp_id = -1 if sp is None else sp.id
        self.of_segment = isinstance(sp, Between)
        self.chained = sp is not None and sp.world_size > 1
        self.out = (*given.lead, outputs.shape[-1])
        self.edge = plan.buffers["@final"].shape
        self.partly = (plan.n_docs > 0 and self.chained) or plan.sparse  # edges may not be written whole
        self.saved, self.scratch = Workspace(), Workspace()
        launches = plan.forward()
        plan.check_results(launches, ["o", *(["@final"] if plan.returns_final else [])])
        self._kept = frozenset(name for name in plan.check_order(launches) if plan.saved(name))
        self._reserve(launches, {Role.SAVED: self.saved, Role.SCRATCH: self.scratch})
        self.both = Workspace(self.saved, self.scratch)
        self.forward = [*self._steps(launches, (0, 0, 0)), *self._tails({"o": _rows_of(self.out[given.batched :])})]
        self.backwards: dict[Any, Backward] = {}
        self._has_look = type(plan).look is not LaunchPlan.look
        self.precompiled = 0  # passes: the forward one, and the backward one

    # Steps

    def _reserve(self, launches: Sequence[LaunchSpec], workspaces: dict[Role, Workspace]) -> None:
        """Memory for what the launches need besides what they are given, by its role."""
        for name, x in self.plan.memory(launches).items():
            if name not in self.saved.places:
                workspaces[x.role].add(name, x.dtype, *x.shape)

    def _steps(self, launches: Iterable[LaunchSpec], do: Strides) -> list[Step]:
        """`do`: strides of the outputs' gradient."""
        strides = self.given.strides | {"do": do}
        programs = self.plan.n_chunks * self.plan.B * self.plan.H
        return [self._step(x, strides) for x in launches if programs or x.host is not None or x.kind == PROPAGATE]

    def _step(self, spec: LaunchSpec, strides: dict[str, Strides]) -> Step:
        if spec.host is not None:
            return _in_pytorch(spec)
        if spec.kind == PROPAGATE:
            return self._propagate(spec)
        numbers = [n for x in spec.numbers for n in (strides[x] if isinstance(x, str) else (x,))]
        constants = {name: x.of(strides) if isinstance(x, SameTokenStride) else x for name, x in spec.constants.items()}
        kernel = self.plan.kernel(spec) if spec.kernel is None else spec.kernel
        return KernelLaunch(kernel, spec.grid, spec.pointers, numbers, constants, dict(spec.options))

    def _propagate(self, spec: LaunchSpec) -> Step:
        states, carried, cut = spec.pointers
        (kind, shape), reverse = self.plan.scan_shape, spec.constants["REVERSE"]
        kind = KINDS[kind].adjoint or kind if reverse else kind
        sp_id = self.sp_id if self.chained and not self.of_segment else -1
        found = propagate_step(str(states), carried, cut, shape, kind, reverse, sp_id, self.plan.description)
        if self.of_segment and isinstance(found, KernelLaunch):
            return SegmentScan(str(states), found, reverse)
        return found

    def _gradients_of_tokens(self, makes: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Gradients with a row a token, of those that are made, with their shapes as [heads, tokens, row]."""
        given, plan = self.given, self.plan
        return {
            grad: _rows_of(given.shapes[name]) if name in {*given.tokens} - plan.by_head else (given.H, given.T, 1)
            for name, grad in self.gradients if grad in makes and name in {*given.tokens, *plan.by_token}
        }  # fmt: skip

    def _tails(self, tensors: dict[str, tuple[int, ...]]) -> list[Step]:
        """What writes zeros behind the last document in these tensors [heads, tokens, row]."""
        plan = self.plan
        if not plan.n_docs or not plan.T:
            return []
        return [*tail_launches(plan.n_chunks, [(name, x, plan.T // x[1]) for name, x in tensors.items()])]

    def of(self, tensors: Sequence[torch.Tensor], initial: Optional) -> Executable[_P]:
        """The executable to go on with: another where hooks on saved tensors gave back tensors that lie otherwise."""
        layout = _layout_of(tensors, initial)
        if layout == self.given.layout:
            return self
        if layout not in self.others:
            if len(self.others) >= 16:
                self.others.clear()
            given, sp = dict(zip(self.names, tensors, strict=True)), get_sp(self.sp_id) if self.sp_id >= 0 else None
            self.others[layout] = self.remake(given, initial, sp)
        return self.others[layout]

    def backward(
        self, do: torch.Tensor, dfinal: Optional, dinitial: bool, wanted: frozenset[str] | None = None
    ) -> Backward:
        """Steps for gradients of outputs and final states that lie so, with or without those of initial states, and for
        gradients of these inputs, None for all."""
        optional = self.plan.optional
        asked = optional if wanted is None else optional & wanted
        key = (*(None if x is None else (x.stride(), x.data_ptr() % 16 == 0) for x in (do, dfinal)), dinitial, asked)
        found = self.backwards.get(key)
        if found is None:
            if len(self.backwards) >= 16:
                self.backwards.clear()
            launches, workspace = self.plan.backward(dfinal is not None, dinitial, asked), Workspace()
            self.plan.check_order(launches, self._kept)
            results = [grad for name, grad in self.gradients if name not in optional - asked]
            self.plan.check_results(launches, [*results, *(["@dinitial"] if dinitial else [])])
            self._reserve(launches, dict.fromkeys(Role, workspace))
            makes = frozenset(name for x in launches for name in x.writes)
            steps = [*self._steps(launches, self.given.strides_of(do)), *self._tails(self._gradients_of_tokens(makes))]
            found = self.backwards[key] = Backward(steps, workspace, makes)
        return found

    # Calls

    def launches(
        self, tensors: Sequence[torch.Tensor], initial: Optional, backward: bool
    ) -> Iterator[tuple[KernelLaunch, Frame]]:
        """The launches of a call and, without their memory, what they are compiled for.

        Of the backward pass for contiguous gradients of the outputs and none of final states; where the plan is not
        sure to fit, also for those.
        """

        def like(*shape: int, dtype: torch.dtype = _F32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        given = dict(zip(self.names, tensors, strict=True))
        given |= {name: like(1, dtype=given[name].dtype) for name in self.given.copied}
        given |= {"o": like(*self.out, dtype=self.dtype), "@table": like(1, dtype=torch.int32)}
        given |= dict.fromkeys(("@final", "@dinitial"), like(1))
        given["@initial"] = initial if initial is not None and initial.is_contiguous() else like(1)
        saved = self.saved, like(self.saved.nbytes, dtype=torch.uint8)
        scratch = self.scratch, like(self.scratch.nbytes, dtype=torch.uint8)
        for each in launches_of(self.forward):
            yield each, Frame(given, (saved, scratch))
        if backward:
            given["do"] = given["o"]
            given |= {
                grad: like(1, dtype=self._gradient_type(name, given[name]))
                for name, grad in self.gradients if name in self.given.tokens
            }  # fmt: skip
            given["@dfinal"] = like(1)
            wanted = frozenset(name for name, x in zip(self.names, tensors, strict=True) if x.requires_grad)
            for dfinal in (None,) if self.plan.surely_fits else (None, given["@dfinal"]):
                back = self.backward(given["do"], dfinal, initial is not None and initial.requires_grad, wanted)
                frame = Frame(given, (saved, (back.scratch, like(back.scratch.nbytes, dtype=torch.uint8))))
                for each in launches_of(back.steps):
                    yield each, frame

    def precompile(
        self, tensors: Sequence[torch.Tensor], initial: Optional, backward: bool = True
    ) -> list[Future[Any]]:  # fmt: skip
        """Starts to compile, once and on a GPU, what a call and its backward pass launch. Where the plan is not sure to
        fit, this waits for it: that a kernel of the backward pass does not is said before the first is launched."""
        if self.precompiled > backward or self.device.type != "cuda":
            return []
        found = [each.prepare(frame, self.device.index) for each, frame in self.launches(tensors, initial, backward)]
        if not self.plan.surely_fits:
            for each in found:
                outcome(each)
        self.precompiled = 1 + backward
        return found

    def empty(self, *shape: int, dtype: torch.dtype = _F32) -> torch.Tensor:
        """Contiguous memory, made like a tensor that has none: from sizes it takes twice the host's time."""
        like = self._blanks.get((shape, dtype))
        if like is None:
            with torch.inference_mode(False):  # it outlasts it
                like = torch.empty(1, dtype=dtype, device=self.device).expand(shape)
                like.untyped_storage().resize_(0)
            self._blanks[shape, dtype] = like
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    def inputs(self, tensors: Sequence[torch.Tensor], initial: Optional, table: Optional) -> Tensors:
        found = dict(zip(self.names, tensors, strict=True))
        for name in self.given.copied:
            found[name] = found[name].clone(memory_format=torch.contiguous_format)
        if initial is not None:
            found["@initial"] = initial.contiguous()
        if table is not None:
            found["@table"] = table
        return found

    def run_forward(
        self, tensors: Sequence[torch.Tensor], initial: Optional, table: Optional, filled: bool = False,
        last: bool = False, run: Runner | None = None,
    ) -> tuple[torch.Tensor, Optional, torch.Tensor]:  # fmt: skip
        """(o, final states, what the backward pass reads: if ``filled`` with zeros where nothing is written).

        Args:
            last: there is no backward pass, and one piece of memory for all.
            run: runs the steps in place of `run_steps`. If it returns True, they run later.
        """
        given = self.inputs(tensors, initial, table)
        o = given["o"] = self.empty(*self.out, dtype=self.dtype)
        final = None
        if self.plan.returns_final:
            final = given["@final"] = self._edge()
        kept = self.both if last else self.saved
        saved = self.empty(kept.nbytes, dtype=torch.uint8)
        if filled:
            saved.zero_()
        workspaces = [(kept, saved)]
        if self.scratch.nbytes and not last:
            workspaces.append((self.scratch, self.empty(self.scratch.nbytes, dtype=torch.uint8)))
        frame = Frame(given, workspaces)
        if run is None:
            run_steps(self.forward, frame, self.device)
        elif run(self.forward, frame, self.device):
            return o, final, saved
        if self._has_look and checks_wanted():
            self.plan.look(frame)
        return o, final, saved

    def _edge(self) -> torch.Tensor:
        """States of documents or sequences."""
        x = self.empty(*self.edge)
        return x.zero_() if self.partly else x

    def run_backward(
        self, tensors: Sequence[torch.Tensor], initial: Optional, saved: torch.Tensor, table: Optional,
        do: torch.Tensor, dfinal: Optional, want_dinitial: bool, wanted: frozenset[str] | None = None,
        run: Runner | None = None,
    ) -> tuple[list[Optional], Optional]:  # fmt: skip
        """Gradients of the inputs, and of the initial states.

        Args:
            wanted: inputs whose gradients are needed, None for all; those of others may be None.
            run: runs the steps in place of `run_steps`.
        """
        frame, back, dinitial = self.begun_backward(
            tensors, initial, saved, table, do, dfinal, want_dinitial, wanted
        )  # fmt: skip
        (run or run_steps)(back.steps, frame, self.device)
        return self.gradients_in(frame, back, tensors), dinitial

    def begun_backward(
        self, tensors: Sequence[torch.Tensor], initial: Optional, saved: torch.Tensor, table: Optional,
        do: torch.Tensor, dfinal: Optional, want_dinitial: bool, wanted: frozenset[str] | None = None,
    ) -> tuple[Frame, Backward, Optional]:  # fmt: skip
        """The memory of a backward pass, its steps, and the memory of gradients of the initial states."""
        well = do.stride(-1) == 1 or do.shape[-1] == 1
        if self.plan.aligned_gradient:
            well = well and do.data_ptr() % 16 == 0 and aligned_16(self.given.strides_of(do))
        do = do if well else do.clone(memory_format=torch.contiguous_format)
        saved, table = self._as_kept(saved, initial, table)
        given = self.inputs(tensors, initial, table) | {"do": do}
        if dfinal is not None:
            given["@dfinal"] = dfinal.to(_F32).contiguous()
        dinitial = None
        if want_dinitial:
            dinitial = given["@dinitial"] = self._edge()
        back = self.backward(do, given.get("@dfinal"), want_dinitial, wanted)
        by_head = self.plan.by_head
        for (name, grad), x in zip(self.gradients, tensors, strict=True):
            if name in self.given.tokens and grad in back.makes:
                shape = (self.given.B, self.given.H, self.given.T) if name in by_head else x.shape
                given[grad] = self.empty(*shape, dtype=self._gradient_type(name, x))
        scratch = self.empty(back.scratch.nbytes, dtype=torch.uint8)
        return Frame(given, ((self.saved, saved), (back.scratch, scratch))), back, dinitial

    def gradients_in(self, frame: Frame, back: Backward, tensors: Sequence[torch.Tensor]) -> list[Optional]:
        """Those of the inputs, once the steps have run; None where none is made."""
        return [
            self._gradient(frame[grad], name, x) if grad in back.makes else None
            for (name, grad), x in zip(self.gradients, tensors, strict=True)
        ]

    def _as_kept(self, saved: torch.Tensor, initial: Optional, table: Optional) -> tuple[torch.Tensor, Optional]:
        """What the forward pass left, as kernels read it; ValueError where hooks on saved tensors gave back others."""
        if saved.dtype != torch.uint8 or saved.numel() != self.saved.nbytes:
            changed("memory", f"{self.saved.nbytes} x {torch.uint8}", f"{saved.numel()} x {saved.dtype}")
        types = (torch.int32, _F32)
        if any([x is not None and x.dtype != kept for x, kept in zip((table, initial), types, strict=True)]):
            got = [None if x is None else x.dtype for x in (table, initial)]
            changed("dtypes of chunk table and states", types, got)
        if not saved.is_contiguous() or saved.data_ptr() % 16:
            saved = saved.clone(memory_format=torch.contiguous_format)
        return saved, None if table is None else table.contiguous()

    def _gradient_type(self, name: str, x: torch.Tensor) -> torch.dtype:
        return _F32 if name in self.plan.by_head else x.dtype

    def _gradient(self, found: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
        if name in self.plan.by_head:
            dx = found.transpose(1, 2).to(x.dtype)
            return dx if self.given.batched else dx[0]
        return found if name in self.given.tokens else found.sum((0, 2)).to(x.dtype)


def _rows_of(shape: Sequence[int]) -> tuple[int, ...]:
    """A tensor of one sequence, tokens first, as [heads, tokens, row] of one head."""
    return 1, shape[0], math.prod(shape[1:])


def propagate_step(
    states: str, a: str | None, cut: str | None, shape: tuple[int, int, int, int, int], kind: str, reverse: bool,
    sp_id: int, call: str = "",
) -> Step:  # fmt: skip
    """`propagate` on named tensors: over segments, and over the ranks of the group `sp_id` (-1: none).

    Args:
        a, cut: of the `Transition`.
        shape: B, NSEG, H, K, V.
        kind: of the transition.
        call: the op that needs it, the same text on every rank.
    """
    B, n_seg, H, K, V = shape
    if sp_id >= 0:
        return _OverRanks(states, a, cut, (B, -1, H, K, V), kind, reverse, sp_id, call)
    kernel, grid, numbers, constants, options = local_launch(B, n_seg, H, K, V, kind, cut is not None, reverse)
    return KernelLaunch(kernel, (*grid, 1, 1), [states, a, cut, *[None] * 6], numbers, constants, options)


@dataclass(frozen=True)
class _OverRanks:
    """A scan over ranks as a step; attributes are those of `propagate_step`."""

    states: str
    a: str | None
    cut: str | None
    shape: tuple[int, ...]
    kind: str
    reverse: bool
    sp_id: int
    call: str

    def __call__(self, frame: Frame) -> None:
        propagate(*self.of(frame), get_sp(self.sp_id), reverse=self.reverse, call=self.call)

    def of(self, frame: Frame) -> tuple[torch.Tensor, Transition]:
        through = Transition(self.kind, *(None if name is None else frame[name] for name in (self.a, self.cut)))
        return frame[self.states].view(self.shape), through


def run_both(first: Callable[[Runner], _R], second: Callable[[Runner], _S]) -> tuple[_R, _S]:
    """What two passes over the same tokens return, each of which is given what runs its steps; over ranks, their states
    travel together."""
    found: list[_S] = []

    def outer(steps: Sequence[Step], frame: Frame, device: torch.device) -> None:
        def inner(others: Sequence[Step], beside: Frame, _: torch.device) -> None:
            _run_together((steps, frame), (others, beside), device)

        found.append(second(inner))

    return first(outer), found[0]


def _run_together(
    first: tuple[Sequence[Step], Frame], second: tuple[Sequence[Step], Frame], device: torch.device
) -> None:  # fmt: skip
    scans = []
    for steps, frame in (first, second):
        at, scan = next(((i, x) for i, x in enumerate(steps) if isinstance(x, _OverRanks)), (len(steps), None))
        run_steps(steps[:at], frame, device)
        scans += [] if scan is None else [(at, scan, Scan(*scan.of(frame)))]
    if not scans:
        return
    (_, one, first_scan), (_, two, second_scan) = scans
    call = f"{one.call} and {two.call}"
    propagate_both(first_scan, second_scan, get_sp(one.sp_id), reverse=one.reverse, call=call)
    for (steps, frame), (at, *_) in zip((first, second), scans, strict=True):
        run_steps(steps[at + 1 :], frame, device)


def _in_pytorch(spec: LaunchSpec) -> Step:
    host, names = spec.host, spec.pointers
    assert host is not None
    return lambda frame: host(*(frame[str(name)] for name in names))


def _layout_of(tensors: Iterable[Optional], initial: Optional) -> tuple[Any, ...]:
    """How tensors lie in memory."""
    return tuple([None if x is None else (x.stride(), x.data_ptr() % 16 == 0) for x in (*tensors, initial)])
