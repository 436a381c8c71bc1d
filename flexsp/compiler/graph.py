"""A variant's call in a graph of torch.compile: two custom operators, forward and backward, whatever runs inside them.

As in kernels/diagonal/op.py, those over ranks also mutate the group's `order` tensor, so that no compiler drops or
reorders one. Eager calls do not come here. A graph holds for one length: what an operator keeps for its backward pass
has a size that depends on the plan, and another length has another plan.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexsp.comm.derivatives import IN_PYTORCH, first_only, first_only_inside
from flexsp.comm.group import SequenceParallel, abandon, get_sp
from flexsp.compiler.elsewhere import elsewhere

if TYPE_CHECKING:
    from flexsp.compiler.linear_attention import LinearAttention

__all__ = ["call", "kept", "name_of"]

Optional = torch.Tensor | None
_variants: WeakValueDictionary[str, LinearAttention] = WeakValueDictionary()
_lasting: set[LinearAttention] = set()  # that graphs know
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
_NO_SECOND = ("a variant in a graph of torch.compile", "without torch.compile, " + IN_PYTORCH)
_defining = threading.Lock()


def name_of(variant: LinearAttention) -> str:
    """What graphs hold in place of the object.

    No number, which torch.compile would take for one of many, and different for what may differ in the sizes that the
    operators return: Inductor's cache on disk tells graphs of two processes apart by it.
    """
    digest = hashlib.sha256(f"{variant.likeness()} {_package()}".encode()).hexdigest()[:16]
    name = f"variant {digest} {next(_numbers[digest])}"
    _variants[name] = variant
    n = len(variant.names)
    with _defining:
        if n not in _backwards:
            _backwards[n] = _define(f"variant_backward_{n}", f"{_INPUTS}, {_GRADS}", n + 1, _backward, _fake_backward)
    return name


@functools.cache
def _package() -> str:
    """Of this package's own code, which decides on plans and with them on sizes."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kept(make: Callable[[], LinearAttention]) -> tuple[str, tuple[str, ...]]:
    """The name of a variant that lives as long as this process, and the names of its inputs in order."""
    variant = elsewhere(torch.device("cpu"), make)
    _lasting.add(variant)
    return variant.graph_name, variant.names


def _group(sp: int) -> SequenceParallel | None:
    return get_sp(sp) if sp >= 0 else None


def _forward(variant, tensors, initial, cu_seqlens, order=None, sp=-1):  # type: ignore[no-untyped-def]
    group = _group(sp)
    try:
        return _run_forward(_variants[variant], tensors, initial, cu_seqlens, group)
    except Exception as error:
        abandon(error, group if group is not None else False)
        raise


def _run_forward(  # type: ignore[no-untyped-def]
    model, tensors, initial, cu_seqlens, group
) -> tuple[torch.Tensor, ...]:
    call, shard, bounds = model.prepared(tensors, initial, cu_seqlens, group)
    if call.recipe is None:
        given = dict(zip(model.names, tensors, strict=True)), initial, bounds, group
        o, final = elsewhere(tensors[0].device, torch.no_grad()(lambda: model.in_pytorch(call, *given)))
        saved = table = o.new_empty(0)
        final = None if final is None else final.clone(memory_format=torch.contiguous_format)  # may be `initial` itself
    else:
        from flexsp.kernels.recipe import table_of

        table = table_of(call.recipe, cu_seqlens, shard)
        o, final, saved = call.recipe.run_forward(tensors, initial, table)
    empty = torch.empty(0, dtype=torch.int32, device=o.device)
    final = torch.empty(0, dtype=call.wide, device=o.device) if final is None else final
    return o.contiguous(), final, saved.view(torch.uint8), empty if table is None or not table.numel() else table


def _backward(variant, tensors, initial, cu_seqlens, saved, table, do, dfinal, want_dinitial, order=None, sp=-1):  # type: ignore[no-untyped-def]
    """Gradients of the tensors, and of the initial states (empty unless wanted)."""
    first_only_inside(*_NO_SECOND, do, dfinal)
    model, group = _variants[variant], _group(sp)
    call, _, bounds = model.prepared(tensors, initial, cu_seqlens, group)
    if call.recipe is None:
        again = model, call, tensors, initial, bounds, group, do, dfinal, want_dinitial
        return elsewhere(tensors[0].device, lambda: _again(*again))
    recipe = call.recipe
    if do is None:
        do = recipe.empty(*recipe.out, dtype=recipe.dtype).zero_()
    found = None if cu_seqlens is None else table
    grads, dinitial = recipe.run_backward(tensors, initial, saved, found, do, dfinal, want_dinitial)
    return *grads, saved.new_empty(0, dtype=call.wide) if dinitial is None else dinitial


def _again(  # type: ignore[no-untyped-def]
    model, call, tensors, initial, bounds, group, do, dfinal, want_dinitial
) -> tuple[torch.Tensor, ...]:
    """Gradients of the functions in PyTorch, which are called again: a graph keeps no other graph."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    state = None if initial is None else initial.detach().requires_grad_(want_dinitial)
    outputs = model.in_pytorch(call, dict(zip(model.names, leaves, strict=True)), state, bounds, group)
    asked = [*leaves, state] if want_dinitial else leaves
    pairs = [(y, dy) for y, dy in zip(outputs, (do, dfinal), strict=True) if y is not None]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], asked, [torch.zeros_like(y) if dy is None else dy for y, dy in pairs],
        materialize_grads=True,
    )  # fmt: skip
    found = [g.clone(memory_format=torch.contiguous_format) for g in grads]
    return (*found,) if want_dinitial else (*found, torch.empty(0, dtype=call.wide, device=tensors[0].device))


def _looks(x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple([int(n) for n in x.shape]), x.dtype, x.device


def _fake_forward(variant, tensors, initial, cu_seqlens, order=None, sp=-1):  # type: ignore[no-untyped-def]
    model, group, first = _variants[variant], _group(sp), tensors[0]
    _lasting.add(model)
    looks = [_looks(x) for x in tensors]
    others = [None if x is None else _looks(x) for x in (initial, cu_seqlens)]

    def planned() -> tuple[Any, tuple[int, ...]]:
        model.make_kernels(looks[0][2].type == "cuda", looks[0][1])
        with FakeTensorMode():
            made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in looks]
            state, cu = (None if x is None else torch.empty(x[0], dtype=x[1], device=x[2]) for x in others)
            inputs = dict(zip(model.names, made, strict=True))
            call = model.checked(inputs, state, cu, group)
            if call.recipe is not None:
                return call, call.recipe.out
            heads = made[0].dim() - len(model.program.meta.tokens[model.names[0]].shape) + 2
            return call, (*made[0].shape[:heads], model.width(inputs, state))

    call, out = elsewhere(first.device, planned)
    recipe, ends = call.recipe, group is None or cu_seqlens is not None or group.is_last
    slots = recipe.call.facts.n_chunks if recipe is not None and cu_seqlens is not None else 0
    return (
        first.new_empty(out),
        first.new_empty(call.states if ends else 0, dtype=call.wide),
        first.new_empty(0 if recipe is None else recipe.saved.nbytes, dtype=torch.uint8),
        first.new_empty((slots, 5) if slots else 0, dtype=torch.int32),
    )


def _fake_backward(variant, tensors, initial, cu_seqlens, saved, table, do, dfinal, want_dinitial, order=None, sp=-1):  # type: ignore[no-untyped-def]
    wide = torch.promote_types(_widest(tensors), torch.float32)
    state = initial.shape if want_dinitial else 0
    return *(x.new_empty(x.shape) for x in tensors), tensors[0].new_empty(state, dtype=wide)


def _widest(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


_INPUTS = "str variant, Tensor[] tensors, Tensor? initial, Tensor? cu_seqlens"
_GRADS = "Tensor saved, Tensor table, Tensor? do, Tensor? dfinal, bool want_dinitial"
_lib = torch.library.Library("flexsp", "FRAGMENT")


def _define(name: str, inputs: str, outputs: int, real: Any, fake: Any) -> tuple[Any, Any]:
    """An operator on one rank, and over ranks."""
    made = []
    for suffix, more in (("", ""), ("_sp", ", Tensor(a!) order, int sp")):
        _lib.define(f"{name}{suffix}({inputs}{more}) -> ({', '.join(['Tensor'] * outputs)})")
        _lib.impl(f"{name}{suffix}", real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flexsp::{name}{suffix}", fake, lib=_lib)
        made.append(getattr(torch.ops.flexsp, f"{name}{suffix}"))
    return made[0], made[1]


_forwards = _define("variant_forward", _INPUTS, 4, _forward, _fake_forward)
_backwards: dict[int, tuple[Any, Any]] = {}  # by the number of tensors: what mutates a tensor cannot return a list


def _call_forward(variant, tensors, initial, cu_seqlens, sp):  # type: ignore[no-untyped-def]
    inputs = (variant, tensors, initial, cu_seqlens)
    return _forwards[0](*inputs) if sp < 0 else _forwards[1](*inputs, get_sp(sp).order, sp)


class _InGraph(torch.autograd.Function):
    """`anchor` makes autograd record the node on every rank under `sp`."""

    @staticmethod
    def forward(ctx: Any, variant, sp, want_final, anchor, initial, cu_seqlens, *tensors):  # type: ignore[no-untyped-def]
        o, final, saved, table = _call_forward(variant, list(tensors), initial, cu_seqlens, sp)
        ctx.save_for_backward(*tensors, initial, cu_seqlens, saved, table)
        ctx.variant, ctx.sp = variant, sp
        ctx.set_materialize_grads(False)
        return o, final if want_final else None

    @staticmethod
    def backward(ctx: Any, do, dfinal):  # type: ignore[no-untyped-def]
        first_only(*_NO_SECOND)
        *tensors, initial, cu_seqlens, saved, table = ctx.saved_tensors
        alone, over_ranks = _backwards[len(tensors)]
        want = initial is not None and ctx.needs_input_grad[4]
        args = (ctx.variant, tensors, initial, cu_seqlens, saved, table, do, dfinal, want)
        if ctx.sp < 0:
            *grads, dinitial = alone(*args)
        else:
            *grads, dinitial = over_ranks(*args, get_sp(ctx.sp).order, ctx.sp)
        return None, None, None, None, dinitial if want else None, None, *grads


def call(
    variant: str, tensors: Sequence[torch.Tensor], initial: Optional, cu_seqlens: Optional, sp: SequenceParallel | None
) -> tuple[torch.Tensor, Optional]:
    """Outputs and final states, traced by torch.compile. `variant` is what `name_of` gave."""
    group = sp if sp is not None and sp.world_size > 1 else None
    want_final = group is None or cu_seqlens is not None or group.is_last
    sp_id = -1 if group is None else group.id
    if not torch.is_grad_enabled():
        o, final = _call_forward(variant, list(tensors), initial, cu_seqlens, sp_id)[:2]
        return o, final if want_final else None
    anchor = None if group is None else group.anchor
    return _InGraph.apply(variant, sp_id, want_final, anchor, initial, cu_seqlens, *tensors)
