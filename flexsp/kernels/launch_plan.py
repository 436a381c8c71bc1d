"""The plan of a call: its buffers, each with a role, and its launches in order, forward and backward.

An engine makes kernels for some operators or variants, and states their calls as a `LaunchPlan`.
`flexsp.kernels.executable` runs it: it puts strides and addresses in place of the buffers' names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

import torch

from flexsp.kernels.launch_spec import Launch, LaunchSpec, copied, named, scan, zeroed

__all__ = ["Buffer", "LaunchPlan", "Layout", "Role", "SegmentedPlan", "by_name", "gradient_of"]

Layout = tuple[torch.dtype, tuple[int, ...]]
_F32 = torch.float32


class Role(Enum):
    """Where a buffer's memory comes from, and how long it is needed."""

    INPUT = "given: an input, the outputs' gradient, or the table of packed documents"
    OUTPUT = "returned: the outputs"
    GRADIENT = "returned: the gradient of an input"
    STATE_EDGE = "given or returned: states before the first token and behind the last, and their gradients"
    SAVED = "the plan's own: made by the forward pass, and read by the backward pass"
    SCRATCH = "the plan's own, of one pass"


@dataclass(frozen=True)
class Buffer:
    """A tensor as it lies in memory.

    Inputs have the names by which they are given, and "o" and "do" are the outputs and their gradient. Names that a
    plan makes up begin with "@", and those of gradients with "d_". Values that generated kernels keep of every chunk
    have their names in the code. No input may be called so.
    """

    name: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def own(self) -> bool:
        """Whether it is neither given to a call nor returned by it."""
        return self.role in (Role.SAVED, Role.SCRATCH)


def gradient_of(name: str) -> str:
    """The buffer of an input's gradient."""
    return f"d_{name}"


def by_name(*kernels: Any) -> dict[str, Any]:
    """Kernels by the names of their functions, which are those of their launches."""
    return {kernel.__name__: kernel for kernel in kernels}


class LaunchPlan(ABC):
    """Buffers and launches of the calls of one signature: shapes, dtypes, and which states come in and go out.

    Attributes:
        name: of the operator or variant, for messages.
        description: what ranks compare of the call.
        tiling: how the call is cut into chunks and segments, and what tiles kernels have.
        B, T, H: sequences, tokens of this rank, heads.
        n_docs: packed documents, 0 if not packed.
        chunk: tokens of a chunk.
        n_chunks, n_seg: chunks and segments of a head. Kernels are not launched where there are no chunks.
        initial: initial states are given on this rank.
        returns_final: final states are wanted, and leave on this rank.
        sparse: kernels write a part of the final states and of the gradients of initial ones. Their memory is zeroed
            first.
        optional: inputs whose gradients are left out where nobody wants them.
        by_head: inputs with one number a token, whose gradients kernels write in float32 as [B, H, T].
        by_token: parameters [H] whose gradients kernels leave for every token, in float32 as [B, H, T].
        aligned_gradient: kernels read rows of inputs and of the outputs' gradient in vectors of 16 bytes. Those that do
            not lie so are copied.
        surely_fits: a block is known to have the shared memory that each kernel needs. Otherwise kernels are compiled
            before the first launch, to find out.
        scanned: states enter segments from elsewhere, by way of the scan.
        filler: the buffer that stands for a pointer which a kernel does not use.
        kernels: by the name of a launch, for those that do not name their kernel.
    """

    name: str
    description: str
    tiling: Any
    B: int
    T: int
    H: int
    n_docs: int
    chunk: int
    n_chunks: int
    n_seg: int
    initial: bool
    returns_final: bool
    sparse: bool = False
    optional: frozenset[str] = frozenset()
    by_head: frozenset[str] = frozenset()
    by_token: frozenset[str] = frozenset()
    aligned_gradient: bool = False
    surely_fits: bool = True
    scanned: bool = True
    filler: ClassVar[str] = "q"
    kernels: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        """Stores as plain attributes what every call reads, since a property costs host time in each call."""
        for name in ("B", "T", "H", "n_docs", "chunk", "n_chunks", "n_seg"):
            vars(self)[name] = getattr(self.tiling, name)
        vars(self).update(self.settled())

    def settled(self) -> dict[str, Any]:
        """Attributes that depend on the call."""
        return {}

    # Buffers

    @property
    @abstractmethod
    def state(self) -> tuple[int, ...]:
        """Shape of the state of a head."""

    @property
    @abstractmethod
    def scan_shape(self) -> tuple[str, tuple[int, int, int, int, int]]:
        """The kind of transition that the scan composes, and B, segments, H, rows and columns of states."""

    @abstractmethod
    def declare(self) -> Iterable[Buffer]:
        """The buffers, without the states at the edges and the table. A later one takes the place of an earlier one of
        the same name."""

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """All of them, by name."""
        edges = self.n_docs or self.B, self.H, *self.state
        shared = [
            Buffer("@table", Role.INPUT, torch.int32, (self.n_chunks, 5)),
            *(Buffer(x, Role.STATE_EDGE, _F32, edges) for x in ("@initial", "@final", "@dinitial", "@dfinal")),
        ]
        return {x.name: x for x in (*shared, *self.declare())}

    def token_buffers(self, inputs: Mapping[str, Layout], outputs: Layout) -> list[Buffer]:
        """Inputs with a row a token and their gradients, the outputs and the gradient of these."""
        return [
            *(Buffer(name, Role.INPUT, *layout) for name, layout in inputs.items()),
            *(Buffer(gradient_of(name), Role.GRADIENT, *layout) for name, layout in inputs.items()),
            Buffer("o", Role.OUTPUT, *outputs),
            Buffer("do", Role.INPUT, *outputs),
        ]

    def own(self, name: str) -> bool:
        return self.buffers[name].own

    def saved(self, name: str) -> bool:
        return self.buffers[name].role is Role.SAVED

    def memory(self, launches: Iterable[LaunchSpec]) -> dict[str, Buffer]:
        """Buffers of the plan's own that launches need."""
        names = dict.fromkeys(name for x in launches for name in named(*x.pointers))
        return {name: self.buffers[name] for name in names if self.own(name)}

    # Launches

    @abstractmethod
    def forward(self) -> list[LaunchSpec]:
        """Launches of the forward pass."""

    @abstractmethod
    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str] = ()) -> list[LaunchSpec]:
        """Launches of the backward pass, with gradients of final states or not, for those of initial ones or not, and
        with those of the `wanted` of the optional inputs."""

    def kernel(self, spec: LaunchSpec) -> Any:
        """The kernel of a launch that does not name it."""
        return self.kernels[spec.kind]

    def look(self, frame: Any) -> None:  # noqa: B027  (most plans have nothing to look at)
        """Under FLEXSP_CHECK=1: ValueError where what the forward pass left is wrong. May synchronise."""

    def check_order(self, launches: Iterable[LaunchSpec], kept: Collection[str] = ()) -> set[str]:
        """Buffers of the plan's own that the launches write; `kept` are those that an earlier pass left.

        Raises:
            ValueError: a launch reads a buffer of the plan's own that nothing before it wrote.
        """
        written = {*kept}
        for spec in launches:
            for name in spec.reads:
                if self.own(name) and name not in written:
                    raise ValueError(
                        f"{self.name}: expected a launch before {spec.kind!r} to write {name!r}, which it reads, or "
                        "the forward pass to save it; got none"
                    )
            written.update(name for name in spec.writes if self.own(name))
        return written

    def check_results(self, launches: Sequence[LaunchSpec], names: Collection[str]) -> None:
        """That the launches write what the call returns, `names`.

        Raises:
            ValueError: nothing writes one of them. Without tokens too: there a kernel's launch, which then does not
                run, is what says that a tensor of no tokens, or a sum over none of them, is a result.
        """
        unwritten = sorted(set(names).difference(*[x.writes for x in launches]))
        if unwritten:
            kinds = [x.kind for x in launches]
            raise ValueError(f"{self.name}: expected launches that write {', '.join(unwritten)}, got only {kinds}")

    # What launches are made of

    def launch(
        self, kind: str, how: Launch, grid: tuple[int, ...], pointers: Sequence[str | None], writes: Sequence[str],
        numbers: Sequence[int | float | str], constants: Mapping[str, Any], *, reads: Sequence[str] | None = None,
        in_place: Collection[str] = (), kernel: Any = None,
    ) -> LaunchSpec:  # fmt: skip
        """A kernel whose last pointer is the table of packed documents.

        Args:
            pointers: the others, None where the kernel uses none.
            reads: of these; None for those that it does not write, and those that it writes `in_place`.
        """
        if reads is None:
            reads = [x for x in dict.fromkeys(named(*pointers)) if x not in writes or x in in_place]
        table = "@table" if self.n_docs else self.filler
        constants = {"PACKED": self.n_docs > 0, **constants}
        return LaunchSpec(
            kind, how, grid, (*(x or self.filler for x in pointers), table), tuple(reads), tuple(writes),
            tuple(numbers), constants, how.options, kernel=kernel,
        )  # fmt: skip

    def in_walk(self, edge: str | None) -> str | None:
        """`edge` if walks over chunks read or write these states themselves. None if they are the first or last slot of
        the scan's states, where they are copied to or from."""
        return edge if self.n_docs or not self.scanned else None

    def copied_unless_packed(self, to: str, source: str, *, slots: tuple[int | None, int | None]) -> list[LaunchSpec]:
        return [] if self.n_docs else [copied(to, source, *slots)]

    def without_tokens(self, launches: list[LaunchSpec], first: Sequence[LaunchSpec]) -> list[LaunchSpec]:
        """The forward pass of a shard without tokens: `first` writes its transition, which changes no state."""
        if not self.scanned:
            last = copied("@final", "@initial") if self.initial else zeroed("@final")
            return [*launches, *([last] if self.returns_final else [])]
        given = [copied("@states", "@initial", 0)] if self.initial and not self.n_docs else []
        left = [copied("@final", "@states", None, -1)] if self.returns_final else []
        return [*first, *given, *launches, *left]

    def backward_without_tokens(
        self, launches: list[LaunchSpec], first: Sequence[LaunchSpec], dfinal: bool, dinitial: bool
    ) -> list[LaunchSpec]:
        """The backward pass of a shard without tokens, as `without_tokens`."""
        if not self.scanned:
            last = copied("@dinitial", "@dfinal") if dfinal else zeroed("@dinitial")
            return [*launches, *([last] if dinitial else [])]
        given = [copied("@dstates", "@dfinal", -1)] if dfinal and not self.n_docs else []
        left = [copied("@dinitial", "@dstates", None, 0)] if dinitial else []
        return [*first, *given, *launches, *left]


class SegmentedPlan(LaunchPlan):
    """Calls that are always cut into segments: summarize -> scan -> output, and the same backward.

    States at the edges of segments are "@states" and "@dstates" [B, segments + 1, H, ...]. Where documents are packed,
    walks read and write the states of each document, and "@cut" says in which segments one begins; else the states of a
    sequence are the first and the last of these.

    Attributes:
        neighbours: whether a rank waits for states of this one, and whether one waits for their gradients.
    """

    neighbours: tuple[bool, bool] = (True, True)

    @property
    def carried(self) -> str | None:
        """Transitions of segments, for the scan."""
        return "@decay"

    @property
    def cut(self) -> str | None:
        return "@cut" if self.n_docs else None

    @abstractmethod
    def summarize(self, initial: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        """What segments leave, with documents' `initial` states; `zero` is written as the state before the first.
        `onward`: what the last one leaves is read."""

    @abstractmethod
    def output(self, initial: str | None, final: str | None) -> list[LaunchSpec]:
        """The outputs, and states of documents."""

    @abstractmethod
    def summarize_backward(self, last: str | None, *, zero: bool, onward: bool) -> list[LaunchSpec]:
        """The same backward, with gradients of documents' final states, `last`. `onward`: of the first segment."""

    def before_scan(self, last: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        """Gradients that need none of states, where they are made while the neighbour's states are on their way."""
        return []

    @abstractmethod
    def gradients(self, last: str | None, to: str | None, wanted: Collection[str]) -> list[LaunchSpec]:
        """Gradients of the inputs, and of documents' initial states, `to`."""

    def sums(self, wanted: Collection[str]) -> Sequence[str]:
        """Gradients that are sums over tokens, zero where there are none."""
        return ()

    def states_of_segments(self, role: Role = Role.SAVED) -> list[Buffer]:
        """`role`: of the states; they are saved where gradients read them."""
        shape = self.B, self.n_seg + 1, self.H, *self.state
        return [
            Buffer("@states", role, _F32, shape),
            Buffer("@dstates", Role.SCRATCH, _F32, shape),
            *([Buffer("@cut", Role.SAVED, torch.int32, (self.B, self.n_seg))] if self.n_docs else []),
        ]

    def forward(self) -> list[LaunchSpec]:
        given, final = "@initial" if self.initial else None, "@final" if self.returns_final else None
        return [
            *self.summarize(
                self.in_walk(given), zero=self.n_docs > 0 or not self.initial,
                onward=self.neighbours[0] or self.returns_final,
            ),
            *([] if self.n_chunks else [zeroed("@states", *named(self.carried))]),
            *(self.copied_unless_packed("@states", "@initial", slots=(0, None)) if given else []),
            scan("@states", self.carried, self.cut, reverse=False),
            *self.output(self.in_walk(given), self.in_walk(final)),
            *(self.copied_unless_packed("@final", "@states", slots=(None, self.n_seg)) if final else []),
        ]

    def backward(self, dfinal: bool, dinitial: bool, wanted: Collection[str] = ()) -> list[LaunchSpec]:
        last, to = self.in_walk("@dfinal" if dfinal else None), self.in_walk("@dinitial" if dinitial else None)
        return [
            *self.summarize_backward(
                last, zero=self.n_docs > 0 or not dfinal, onward=self.neighbours[1] or dinitial
            ),
            *([] if self.n_chunks else [zeroed("@dstates", *self.sums(wanted))]),
            *(self.copied_unless_packed("@dstates", "@dfinal", slots=(self.n_seg, None)) if dfinal else []),
            *self.before_scan(last, wanted),
            scan("@dstates", self.carried, self.cut, reverse=True),
            *self.gradients(last, to, wanted),
            *(self.copied_unless_packed("@dinitial", "@dstates", slots=(None, 0)) if dinitial else []),
        ]
