"""Calls of kernels as autograd and torch.compile see them: one autograd function above two custom operators, and
another for two calls over the same tokens.

Eager calls of plain tensors run their executable and do without the operators, which cost host time. All others go
through them: calls in graphs of torch.compile, in traces, under modes, and of subclasses of tensors. The operators
know what they run by a `key`, "kind|name", and find its executable when they run. Over ranks they also mutate the
group's `order` tensor: nothing may delete, reorder or deduplicate them, since the neighbours wait for what they send.

`saved`, what the forward operator keeps for the backward one, is memory of which kernels write what they read. In
graphs of torch.compile the rest is what lay there. Elsewhere it is zeros: some compare all that operators return, such
as the aot tests of `torch.library.opcheck`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flexsp.comm.derivatives import IN_PYTORCH, changed, first_only, first_only_inside, same_place, untransformed
from flexsp.comm.group import SequenceParallel, count_failed_call, get_sp
from flexsp.kernels.table import chunk_table
from flexsp.runtime.clean_thread import run_in_clean_thread
from flexsp.runtime.recipe import step

if TYPE_CHECKING:
    from flexsp.kernels.executable import Executable

__all__ = [
    "Asked", "Part", "Saved", "Operation", "Shard", "call", "define_kind", "gradients", "in_memory", "on_fakes",
    "outputs", "plain", "run", "run_both", "serve", "wants_final",
]  # fmt: skip

Optional = torch.Tensor | None
_R = TypeVar("_R")
Saved = tuple[torch.Tensor, Optional]  # what `Operation.forward` says is kept, and the table
Shard = tuple[int, int, int]  # its first token, its end, of how many
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MANY_SIZES, _FILLED = "many sizes: ", "filled: "
_ANY = 64  # tokens
_COLUMNS = 5  # of a table of chunks


class Asked(NamedTuple):
    """A call. `n_docs`: packed documents, 0 if not packed; their boundaries are not kept for the backward pass.
    `scale`: the factor on queries. `want_final`: final states are wanted, and leave on this rank. `filled`: what is
    kept for the backward pass has zeros where nothing is written."""

    tensors: list[torch.Tensor]
    initial: Optional
    cu_seqlens: Optional
    n_docs: int
    scale: float
    want_final: bool
    group: SequenceParallel | None
    filled: bool = False


def wants_final(output_final_state: bool, cu_seqlens: Optional, sp: SequenceParallel | None) -> bool:
    """Whether this rank returns final states: with packed documents every rank does, else the last one."""
    return output_final_state and (sp is None or cu_seqlens is not None or sp.is_last)


class Operation(Protocol):
    """What the operators run for a key."""

    def forward(self, asked: Asked) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
        """Outputs, final states, what is kept for the backward pass, and the table of packed documents."""

    def backward(
        self, asked: Asked, kept: Saved, do: Optional, dfinal: Optional, wanted: Sequence[bool], want_dinitial: bool
    ) -> tuple[list[Optional], Optional]:
        """Gradients of the tensors, and of the initial states."""

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        """Empty tensors like what `forward` gives."""

    def axes(self, first: torch.Tensor) -> int:
        """Of the first tensor, how many are sequences and tokens."""


class _Kind(NamedTuple):
    make: Callable[[str], Operation]
    refusal: tuple[str, str]


_kinds: dict[str, _Kind] = {}


def define_kind(kind: str, make: Callable[[str], Operation], what: str, instead: str) -> None:
    """Keys "kind|name" stand for the operation `make(name)`. Second derivatives of calls in graphs are refused: `what`
    has none, `instead` has."""
    _kinds[kind] = _Kind(make, (what, instead))


def _operation(key: str) -> Operation:
    kind, name = _plain(key).split("|", 1)
    found = _kinds[kind].make(name)
    return _OfManySizes(found) if key.startswith(_MANY_SIZES) else found


def _refusal(key: str) -> tuple[str, str]:
    return _kinds[_plain(key).split("|", 1)[0]].refusal


def _plain(key: str) -> str:
    return key.removeprefix(_FILLED).removeprefix(_MANY_SIZES)


class _OfManySizes:
    """An operation in a graph that holds for many lengths or batches.

    The size of what a call keeps for its backward pass depends on its plan, and that on the length. So the graph sees
    the first number of it alone, a view into the memory that holds all.
    """

    def __init__(self, inner: Operation) -> None:
        self.inner = inner

    def forward(self, asked: Asked) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
        o, final, saved, table = self.inner.forward(asked)
        return o, final, _shown(saved), None if table is None else _shown(table)

    def backward(self, asked: Asked, kept: Saved, *others: Any) -> tuple[list[Optional], Optional]:
        saved, table = kept
        found = _hidden(saved), None if table is None else _hidden(table)
        return self.inner.backward(asked, found, *others)

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        """What sizes the call has that is traced decides on none that the graph sees."""
        first, axes = asked.tensors[0], self.axes(asked.tensors[0])
        o, final, saved, table = on_fakes(asked, self.inner.like_forward, axes, 1)
        states = asked.n_docs if asked.cu_seqlens is not None else first.shape[0] if axes > 1 else 1
        return (
            first.new_empty((*first.shape[:axes], *o.shape[axes:]), dtype=o.dtype),
            first.new_empty((states, *final.shape[1:]) if asked.want_final else 0, dtype=final.dtype),
            first.new_empty(1, dtype=saved.dtype),
            first.new_empty(0 if asked.cu_seqlens is None else [1] * table.dim(), dtype=table.dtype),
        )

    def axes(self, first: torch.Tensor) -> int:
        return self.inner.axes(first)


def on_fakes(asked: Asked, run: Callable[[Asked], _R], many: int = 0, many_of_others: int = 0) -> _R:
    """What `run` gives for tensors without memory like those of a call that is traced, in a thread without the tracer.

    The graph does not depend on the first `many` sizes of the tensors, nor on those of the initial states and of
    boundaries: these are as in the call that is traced.
    """

    def look(x: torch.Tensor, many: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        return tuple([_now(n) if i < many else int(n) for i, n in enumerate(x.shape)]), x.dtype, x.device

    looks = [look(x, many) for x in asked.tensors]
    others = [None if x is None else look(x, many_of_others) for x in (asked.initial, asked.cu_seqlens)]

    def now() -> _R:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in looks]
            initial, cu_seqlens = (None if x is None else torch.empty(x[0], dtype=x[1], device=x[2]) for x in others)
            call = asked._replace(tensors=tensors, initial=initial, cu_seqlens=cu_seqlens, n_docs=_docs(cu_seqlens))
            return run(call)

    return run_in_clean_thread(asked.tensors[0].device, now)  # type: ignore[no-any-return]


def _now(n: Any) -> int:
    """A size in the call that is traced; of one that nothing tells, some number."""
    if not isinstance(n, torch.SymInt):
        return int(n)
    return int(n.node.hint) if n.node.has_hint() else _ANY


def _shown(x: torch.Tensor) -> torch.Tensor:
    """The first number of a fresh tensor, or a number of its own for none."""
    return x[(slice(1),) * x.dim()] if x.numel() else x.new_zeros([1] * x.dim())


def _hidden(first: torch.Tensor) -> torch.Tensor:
    """The tensor that begins with this number and fills its memory; of one number, none.

    ValueError where hooks gave back a copy of a table's first number. Of other memory an executable knows the size.
    """
    numel = first.untyped_storage().nbytes() // first.itemsize
    numel = 0 if numel == 1 or first.storage_offset() else numel
    if first.dtype == torch.uint8:
        return first.as_strided((numel,), (1,))
    if numel == 0 or (first.dim() == 2 and numel % _COLUMNS):
        changed("memory", "of all boundaries", "the first: compile with dynamic=False beside hooks that copy")
    shape = (numel // _COLUMNS, _COLUMNS) if first.dim() == 2 else (numel,)
    return first.as_strided(shape, (shape[-1], 1)[-len(shape) :])


def table_of(executable: Executable[Any], cu_seqlens: Optional, shard: Shard) -> Optional:
    """The chunks of packed documents."""
    if cu_seqlens is None:
        return None
    last = executable.sp_id < 0 or get_sp(executable.sp_id).is_last
    return chunk_table(cu_seqlens, *shard[:2], executable.plan.chunk, last)


def outputs(
    executable: Executable[Any], asked: Asked, shard: Shard
) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
    """`Operation.forward` with an executable."""
    table = table_of(executable, asked.cu_seqlens, shard)
    return *executable.run_forward(asked.tensors, asked.initial, table, asked.filled), table


def gradients(
    executable: Executable[Any], tensors: Sequence[torch.Tensor], initial: Optional, kept: Saved, do: Optional,
    dfinal: Optional, wanted: Sequence[bool], want_dinitial: bool, **how: Any,
) -> tuple[list[Optional], Optional]:  # fmt: skip
    """`Operation.backward` with an executable. `how`: what else `Executable.run_backward` takes."""
    saved, table = kept
    if do is None:
        do = executable.empty(*executable.out, dtype=executable.dtype).zero_()
    names = frozenset([name for name, wants in zip(executable.names, wanted, strict=True) if wants])
    return executable.run_backward(tensors, initial, saved, table, do, dfinal, want_dinitial, names, **how)


# Operators ------------------------------------------------------------------------------------------------------------


def _asked(tensors, initial, cu_seqlens, n_docs, scale, want_final, sp) -> Asked:  # type: ignore[no-untyped-def]
    return Asked(tensors, initial, cu_seqlens, n_docs, scale, want_final, get_sp(sp) if sp >= 0 else None)


def _docs(cu_seqlens: Optional) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _forward(key, tensors, initial, cu_seqlens, scale, want_final, order=None, sp=-1):  # type: ignore[no-untyped-def]
    asked = _asked(tensors, initial, cu_seqlens, _docs(cu_seqlens), scale, want_final, sp)
    asked = asked._replace(filled=key.startswith(_FILLED))
    try:
        o, final, saved, table = _operation(key).forward(asked)
    except Exception as error:
        count_failed_call(error, False if asked.group is None else asked.group)
        raise
    final = o.new_empty(0, dtype=_wide(tensors)) if final is None else final
    return o, final, saved, o.new_empty(0, dtype=torch.int32) if table is None else table


def _fake_forward(key, tensors, initial, cu_seqlens, scale, want_final, order=None, sp=-1):  # type: ignore[no-untyped-def]
    asked = _asked(tensors, initial, cu_seqlens, _docs(cu_seqlens), scale, want_final, sp)
    return _operation(key).like_forward(asked)


def _backward(  # type: ignore[no-untyped-def]
    key, tensors, initial, saved, table, do, dfinal, n_docs, scale, want_final, wanted, want_dinitial,
    order=None, sp=-1,
):  # fmt: skip
    """Gradients of the tensors and of the initial states, empty unless wanted."""
    first_only_inside(*_refusal(key), do, dfinal)
    asked, kept = _asked(tensors, initial, None, n_docs, scale, want_final, sp), (saved, table)
    grads, dinitial = _operation(key).backward(asked, kept, do, dfinal, wanted, want_dinitial)
    found = []
    for x, dx, wants in zip(tensors, grads, wanted, strict=True):
        assert dx is not None or not wants  # graphs take it to be as large as x
        found.append(x.new_empty(0) if dx is None or not wants else dx.contiguous())
    return *found, tensors[0].new_empty(0, dtype=_wide(tensors)) if dinitial is None else dinitial


def _fake_backward(  # type: ignore[no-untyped-def]
    key, tensors, initial, saved, table, do, dfinal, n_docs, scale, want_final, wanted, want_dinitial,
    order=None, sp=-1,
):  # fmt: skip
    found = [x.new_empty(x.shape if wants else 0) for x, wants in zip(tensors, wanted, strict=True)]
    return *found, tensors[0].new_empty(initial.shape if want_dinitial else 0, dtype=_wide(tensors))


def _wide(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of states."""
    return functools.reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)


_lib = torch.library.Library("flexsp", "FRAGMENT")
_defining = threading.Lock()


def _define(name: str, inputs: str, outputs: int, real: Any, fake: Any) -> tuple[Any, Any]:
    """An operator on one rank, and over ranks."""
    made = []
    for suffix, more in (("", ""), ("_sp", ", Tensor(a!) order, int sp")):
        _lib.define(f"{name}{suffix}({inputs}{more}) -> ({', '.join(['Tensor'] * outputs)})")
        _lib.impl(f"{name}{suffix}", real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flexsp::{name}{suffix}", fake, lib=_lib)
        made.append(getattr(torch.ops.flexsp, f"{name}{suffix}"))
    return made[0], made[1]


_INPUTS = "str key, Tensor[] tensors, Tensor? initial"
_KEPT = "Tensor saved, Tensor? table, Tensor? do, Tensor? dfinal"
_ASKED = "float scale, bool want_final"
_forwards = _define("forward", f"{_INPUTS}, Tensor? cu_seqlens, {_ASKED}", 4, _forward, _fake_forward)
_backwards: dict[int, tuple[Any, Any]] = {}  # by the number of tensors: what mutates a tensor cannot return a list


def serve(tensors: int) -> None:
    """Defines the operator for backward passes of calls with this number of tensors."""
    with _defining:
        if tensors not in _backwards:
            inputs = f"{_INPUTS}, {_KEPT}, SymInt n_docs, {_ASKED}, bool[] wanted, bool want_dinitial"
            _backwards[tensors] = _define(f"backward_{tensors}", inputs, tensors + 1, _backward, _fake_backward)


def _call(pair: tuple[Any, Any], sp: int, *inputs: Any) -> Any:
    return pair[0](*inputs) if sp < 0 else pair[1](*inputs, get_sp(sp).order, sp)


# Calls ----------------------------------------------------------------------------------------------------------------


def plain(*tensors: Any) -> bool:
    """Whether these are tensors as they lie in memory, or None, and nothing looks at the operators of a call now."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch.jit.is_tracing():
        return False
    return in_memory(*tensors)


def in_memory(*tensors: Any) -> bool:
    """Whether these are tensors as they lie in memory, or None."""
    return all([x is None or (type(x) in _TENSORS and not x.is_neg() and not x._is_zerotensor()) for x in tensors])


def _dtypes(tensors: Sequence[torch.Tensor], initial: Optional) -> list[torch.dtype | None]:
    return [*[x.dtype for x in tensors], None if initial is None else initial.dtype]


class _Function(torch.autograd.Function):
    """A call; `direct` is its executable and table, None where the operators find them.

    `anchor` makes autograd record the node on every rank under `sp`.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, Optional]:
        # torch.compile takes a forward that has as many parameters as `apply` has arguments for one without ctx. So
        # all are one parameter: with two tensors there would be seven of each.
        direct, asked, anchor, initial, cu_seqlens, *tensors = given
        key, sp, n_docs, scale, want_final = asked
        if direct is None:
            o, final, saved, table = _call(_forwards, sp, key, tensors, initial, cu_seqlens, scale, want_final)
            table = table if n_docs else None
            final = final if want_final else None
        else:
            executable, table = direct
            o, final, saved = executable.run_forward(tensors, initial, table)
        ctx.save_for_backward(*tensors, initial, saved, table)
        ctx.executable = None if direct is None else direct[0]
        if key is not None and not torch.compiler.is_compiling():
            ctx.operation = _operation(key)  # which must not end before the backward pass
        ctx.asked = asked
        ctx.number = get_sp(sp).number() if sp >= 0 else 0
        ctx.device, ctx.dtypes = tensors[0].device, _dtypes(tensors, initial)
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do, dfinal):  # type: ignore[no-untyped-def]
        key, sp, n_docs, scale, want_final = ctx.asked
        refusal = _refusal(key) if ctx.executable is None else (ctx.executable.plan.name, IN_PYTORCH)
        first_only(*refusal)  # before a checkpoint computes anything again
        untransformed(*refusal, do, dfinal)
        *tensors, initial, saved, table = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            same_place(ctx.device, *tensors, initial, saved, table)
            if _dtypes(tensors, initial) != ctx.dtypes:
                changed("dtypes", ctx.dtypes, _dtypes(tensors, initial))
            do, dfinal = [x.detach() if x is not None and x.requires_grad else x for x in (do, dfinal)]
        wanted = [*ctx.needs_input_grad[-len(tensors) :]]
        want_dinitial, kept = initial is not None and ctx.needs_input_grad[3], (saved, table)
        with contextlib.nullcontext() if sp < 0 else get_sp(sp).answering(ctx.number):
            if ctx.executable is not None and (key is None or plain(do, dfinal, *tensors)):
                executable = ctx.executable.of(tensors, initial)
                do, dfinal = [x if x is None else x.resolve_neg() for x in (do, dfinal)]
                grads, dinitial = gradients(executable, tensors, initial, kept, do, dfinal, wanted, want_dinitial)
            else:
                given = key, tensors, initial, *kept, do, dfinal, n_docs, scale, want_final, wanted, want_dinitial
                *grads, dinitial = _call(_backwards[len(tensors)], sp, *given)
        grads = [dx if wants else None for dx, wants in zip(grads, wanted, strict=True)]
        return None, None, None, dinitial if want_dinitial else None, None, *grads


def call(
    key: str, tensors: Sequence[torch.Tensor], initial: Optional, cu_seqlens: Optional, *, want_final: bool,
    sp: SequenceParallel | None, scale: float = 1.0,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Outputs and final states of a call through the operators, differentiable; traced by torch.compile.

    Args:
        want_final: final states are wanted, and leave on this rank.
    """
    group = sp if sp is not None and sp.world_size > 1 else None
    sp_id = -1 if group is None else group.id
    if not torch.compiler.is_dynamo_compiling():
        key = _FILLED + key
    elif not _sizes_known(*tensors, initial, cu_seqlens):
        key = _MANY_SIZES + key
    if not torch.is_grad_enabled():
        given = key, list(tensors), initial, cu_seqlens, scale, want_final
        o, final, *_ = _call(_forwards, sp_id, *given)
        return o, final if want_final else None
    anchor = None if group is None else group.anchor
    asked = key, sp_id, _docs(cu_seqlens), scale, want_final
    return _Function.apply(None, asked, anchor, initial, cu_seqlens, *tensors)


def _sizes_known(*tensors: Optional) -> bool:
    """Whether the graph that is being made holds for these sizes alone."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return all([has_static_value(n) for x in tensors if x is not None for n in x.shape])


@step
def run(
    executable: Executable[Any], key: str | None, tensors: Sequence[torch.Tensor], initial: Optional,
    cu_seqlens: Optional, shard: Shard, scale: float = 1.0,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Outputs and final states of a call of `plain` tensors with this executable, differentiable.

    `key`: what stands for the call in operators; None where they would not find this executable.
    """
    sp = get_sp(executable.sp_id) if executable.chained else None
    table, plan = table_of(executable, cu_seqlens, shard), executable.plan
    backward = torch.is_grad_enabled() and (
        executable.chained or any([x.requires_grad for x in tensors]) or (initial is not None and initial.requires_grad)
    )
    if backward or not plan.surely_fits:
        executable.precompile(tensors, initial, backward)
    if not backward:
        return executable.run_forward(tensors, initial, table, last=True)[:2]
    sp_id, anchor = (-1, None) if sp is None else (sp.id, sp.anchor)
    asked = key, sp_id, plan.n_docs, scale, plan.returns_final
    return _Function.apply((executable, table), asked, anchor, initial, None, *tensors)


# Two calls ------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One of two calls: what `run` takes of it."""

    executable: Executable[Any]
    key: str
    tensors: Sequence[torch.Tensor]
    initial: Optional


class _BothFunction(torch.autograd.Function):
    """Two calls of the same tokens as `_Function` does one, each with its executable and the table."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Optional, ...]:
        executables, tables, asked, _, first, second, *tensors = given
        n, (_, sp, *_) = len(executables[0].names), asked[0]
        parts = (tensors[:n], first, tables[0]), (tensors[n:], second, tables[1])
        (o, final, saved), (o2, final2, saved2) = _run_together(
            *(functools.partial(each.run_forward, *part) for each, part in zip(executables, parts, strict=True))
        )  # fmt: skip
        ctx.save_for_backward(*tensors, first, saved, tables[0], second, saved2, tables[1])
        ctx.executables, ctx.asked = executables, asked
        ctx.operations = [_operation(key) for key, *_ in asked]  # which must not end before the backward pass
        ctx.number = get_sp(sp).number() if sp >= 0 else 0
        ctx.device, ctx.dtypes = tensors[0].device, [*_dtypes(tensors, first), *_dtypes((), second)]
        ctx.set_materialize_grads(False)
        return o, final, o2, final2

    @staticmethod
    def backward(ctx: Any, do, dfinal, do2, dfinal2):  # type: ignore[no-untyped-def]
        refusal = ctx.executables[0].plan.name, IN_PYTORCH
        first_only(*refusal)
        untransformed(*refusal, do, dfinal, do2, dfinal2)
        *tensors, initial, saved, table, initial2, saved2, table2 = ctx.saved_tensors
        same_place(ctx.device, *tensors, initial, saved, table, initial2, saved2, table2)
        if (dtypes := [*_dtypes(tensors, initial), *_dtypes((), initial2)]) != ctx.dtypes:
            changed("dtypes", ctx.dtypes, dtypes)
        grads_in = [x.detach() if x is not None and x.requires_grad else x for x in (do, dfinal, do2, dfinal2)]
        n, needs = len(ctx.executables[0].names), ctx.needs_input_grad
        wanted, sp = [*needs[-len(tensors) :]], ctx.asked[0][1]
        want_dinitials = [x is not None and needs[i] for i, x in ((4, initial), (5, initial2))]
        parts = (
            (tensors[:n], initial, (saved, table), *grads_in[:2], wanted[:n], want_dinitials[0]),
            (tensors[n:], initial2, (saved2, table2), *grads_in[2:], wanted[n:], want_dinitials[1]),
        )
        with contextlib.nullcontext() if sp < 0 else get_sp(sp).answering(ctx.number):
            if plain(*grads_in, *tensors):
                executables = [x.of(*part[:2]) for x, part in zip(ctx.executables, parts, strict=True)]
                found = _gradients_of_both(executables, parts)
            else:
                found = []
                for (key, _, n_docs, scale, want_final), part in zip(ctx.asked, parts, strict=True):
                    xs, start, kept, dy, dlast, wants, want_dinitial = part
                    given = key, xs, start, *kept, dy, dlast, n_docs, scale, want_final, wants, want_dinitial
                    *grads, dstart = _call(_backwards[len(xs)], sp, *given)
                    found.append((grads, dstart))
        grads = [*found[0][0], *found[1][0]]
        grads = [dx if wants else None for dx, wants in zip(grads, wanted, strict=True)]
        dinitials = [x if wants else None for (_, x), wants in zip(found, want_dinitials, strict=True)]
        return None, None, None, None, *dinitials, *grads


def _run_together(first: Callable[..., Any], second: Callable[..., Any]) -> tuple[Any, Any]:
    """What both return; they take `run`, which runs their steps."""
    from flexsp.kernels.executable import run_both as together  # it needs Triton

    return together(lambda run: first(run=run), lambda run: second(run=run))


def _gradients_of_both(executables: Sequence[Executable[Any]], parts: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    passes = []
    for executable, (tensors, initial, kept, do, dfinal, *wants) in zip(executables, parts, strict=True):
        do, dfinal = [x if x is None else x.resolve_neg() for x in (do, dfinal)]
        passes.append(functools.partial(gradients, executable, tensors, initial, kept, do, dfinal, *wants))
    return _run_together(*passes)


@step
def run_both(
    first: Part, second: Part, cu_seqlens: Optional, shard: Shard, scale: float = 1.0
) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
    """Outputs and final states of two calls over the same tokens, as `run` gives each; ranks exchange the states of
    both together, in both directions."""
    parts, executables = (first, second), (first.executable, second.executable)
    chained = first.executable.chained
    tables = [table_of(x, cu_seqlens, shard) for x in executables]
    given = [x for part in parts for x in (*part.tensors, part.initial) if x is not None]
    backward = torch.is_grad_enabled() and (chained or any([x.requires_grad for x in given]))
    for part in parts:
        if backward or not part.executable.plan.surely_fits:
            part.executable.precompile(part.tensors, part.initial, backward)
    if not backward:
        passes = [
            functools.partial(x.executable.run_forward, x.tensors, x.initial, table, last=True)
            for x, table in zip(parts, tables, strict=True)
        ]
        (o, final, _), (o2, final2, _) = _run_together(*passes)
        return o, final, o2, final2
    sp = get_sp(executables[0].sp_id) if chained else None
    sp_id, anchor = (-1, None) if sp is None else (sp.id, sp.anchor)
    asked = [(x.key, sp_id, x.executable.plan.n_docs, scale, x.executable.plan.returns_final) for x in parts]
    inputs = first.initial, second.initial, *first.tensors, *second.tensors
    return _BothFunction.apply(executables, tables, asked, anchor, *inputs)
