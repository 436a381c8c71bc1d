"""What the operators of flexsp.kernels.operators run for a variant: its kernels, or its functions in PyTorch.

What an operator keeps for its backward pass has a size that depends on the plan, and another length has another plan. A
graph of torch.compile in which all sizes are numbers knows that size. In a graph that holds for many lengths or batches
the operators are of another kind: what they keep goes through the graph as one number, a view into the memory that
holds all of it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flexsp.comm.derivatives import IN_PYTORCH, changed
from flexsp.comm.group import SequenceParallel
from flexsp.compiler.frontend.program import Program
from flexsp.kernels import functions, operators
from flexsp.kernels.operators import Asked, Kept
from flexsp.runtime.elsewhere import elsewhere

if TYPE_CHECKING:
    from flexsp.kernels.recipe import Recipe

__all__ = ["Variant", "call", "call_now", "kept", "name_of"]

Optional = torch.Tensor | None
_Forward = tuple[torch.Tensor, Optional, torch.Tensor, Optional]


class Variant(Protocol):
    """What the operators ask of a `LinearAttention`."""

    names: tuple[str, ...]
    graph_name: str
    program: Program

    def likeness(self) -> str: ...

    def prepared(
        self, tensors: Sequence[torch.Tensor], prev_s: Optional, cu_seqlens: Optional, group: SequenceParallel | None
    ) -> Any: ...

    def again(
        self, tensors: Sequence[torch.Tensor], prev_s: Optional, docs: int, group: SequenceParallel | None
    ) -> Any: ...

    def checked(
        self, inputs: dict[str, torch.Tensor], prev_s: Optional, cu_seqlens: Optional, group: SequenceParallel | None
    ) -> Any: ...

    def in_pytorch(
        self, call: Any, inputs: dict[str, torch.Tensor], prev_s: Optional, bounds: list[int] | None,
        group: SequenceParallel | None,
    ) -> tuple[torch.Tensor, Optional]: ...  # fmt: skip

    def make_kernels(self, on_gpu: bool, dtype: torch.dtype) -> None: ...

    def width(self, inputs: dict[str, torch.Tensor], prev_s: Optional) -> int: ...


_variants: WeakValueDictionary[str, Variant] = WeakValueDictionary()
_lasting: set[Variant] = set()  # that graphs know
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
_ANY = 64  # tokens
_KIND = "variant"
_MANY_SIZES = "variant of many sizes"


def name_of(variant: Variant) -> str:
    """What graphs hold in place of the object.

    No number, which torch.compile would take for one of many, and different for what may differ in the sizes that the
    operators return: Inductor's cache on disk tells graphs of two processes apart by it.
    """
    digest = hashlib.sha256(f"{variant.likeness()} {_package()}".encode()).hexdigest()[:16]
    name = f"{digest} {next(_numbers[digest])}"
    _variants[name] = variant
    operators.serve(len(variant.names))
    return f"{_KIND}|{name}"


@functools.cache
def _package() -> str:
    """Of this package's own code, which decides on plans and with them on sizes."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kept(make: Callable[[], Variant]) -> tuple[str, tuple[str, ...]]:
    """The name of a variant that lives as long as this process, and the names of its inputs in order."""
    variant = elsewhere(torch.device("cpu"), make)
    _lasting.add(variant)
    return variant.graph_name, variant.names


class _Variant:
    """Calls of a variant, whose plans are never tuned: a graph knows its sizes."""

    def __init__(self, name: str) -> None:
        self.model = _variants[name]

    def forward(self, asked: Asked) -> _Forward:
        model, tensors, initial, bounds = self.model, *asked[:3]
        call, shard, values = model.prepared(tensors, initial, bounds, asked.group)
        if call.recipe is not None:
            return self.shown(*operators.outputs(call.recipe, asked, shard))
        return functions.forward(lambda x: self.in_pytorch(call, x, values), asked)

    def backward(self, asked: Asked, kept: Kept, *others: Any) -> tuple[list[Optional], Optional]:
        call, table = self.model.again(asked.tensors, asked.initial, asked.docs, asked.group), kept[1]
        if call.recipe is not None:
            kept = self.whole(kept, call.recipe)
            return operators.gradients(call.recipe, asked.tensors, asked.initial, kept, *others)
        values = None if table is None else [int(n) for n in table.tolist()]
        return functions.gradients(lambda x: self.in_pytorch(call, x, values), asked, *others)

    def in_pytorch(self, call: Any, asked: Asked, bounds: list[int] | None) -> tuple[torch.Tensor, Optional]:
        inputs = dict(zip(self.model.names, asked.tensors, strict=True))
        return self.model.in_pytorch(call, inputs, asked.initial, bounds, asked.group)

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        model, group, (tensors, initial, cu_seqlens) = self.model, asked.group, asked[:3]
        first = tensors[0]
        _lasting.add(model)
        of_tokens = self.many_sizes * (1 + self.batched(first))
        looks = [_looks(x, of_tokens if i < len(model.program.meta.tokens) else 0) for i, x in enumerate(tensors)]
        others = [None if x is None else _looks(x, self.many_sizes) for x in (initial, cu_seqlens)]

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
        recipe, lead = call.recipe, first.shape[: 1 + self.batched(first)]
        saved, table = first.new_empty(0, dtype=torch.uint8), first.new_empty(0, dtype=torch.int32)
        if cu_seqlens is not None:
            table = torch.empty_like(cu_seqlens)
        if recipe is not None:
            saved, table = self.like_kept(first, recipe)
        states = (asked.docs or (lead[0] if self.batched(first) else 1), *call.states[1:])
        return (
            first.new_empty(*lead, *out[len(lead) :]),
            first.new_empty(states if asked.want_final else 0, dtype=call.wide),
            saved, table,
        )  # fmt: skip

    def batched(self, first: torch.Tensor) -> bool:
        return first.dim() > len(self.model.program.meta.tokens[self.model.names[0]].shape)

    # What kernels keep, as a graph sees it

    many_sizes = False

    def shown(self, o: torch.Tensor, final: Optional, saved: torch.Tensor, table: Optional) -> _Forward:
        return o, final, saved, table

    def whole(self, kept: Kept, recipe: Recipe[Any]) -> Kept:
        return kept

    def like_kept(self, first: torch.Tensor, recipe: Recipe[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        facts = recipe.call.facts
        table = (facts.n_chunks, 5) if facts.docs else 0
        return first.new_empty(recipe.saved.nbytes, dtype=torch.uint8), first.new_empty(table, dtype=torch.int32)


class _OfManySizes(_Variant):
    """The same in graphs that hold for many sizes: a view of the first number stands for what kernels keep."""

    many_sizes = True

    def shown(self, o: torch.Tensor, final: Optional, saved: torch.Tensor, table: Optional) -> _Forward:
        return o, final, _first(saved), None if table is None else _first(table)

    def whole(self, kept: Kept, recipe: Recipe[Any]) -> Kept:
        saved, table = kept
        table = None if table is None else _whole(table, recipe.call.facts.n_chunks * 5).view(-1, 5)
        return _whole(saved, recipe.saved.nbytes), table

    def like_kept(self, first: torch.Tensor, recipe: Recipe[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        table = 1 if recipe.call.facts.docs else 0
        return first.new_empty(1, dtype=torch.uint8), first.new_empty(table, dtype=torch.int32)


for _kind, _make in ((_KIND, _Variant), (_MANY_SIZES, _OfManySizes)):
    operators.define_kind(
        _kind, _make, "a variant's kernels, or a variant in a graph", f"outside of graphs, {IN_PYTORCH}"
    )  # fmt: skip


def _first(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)[:1] if x.numel() else x.new_zeros(1)


def _whole(first: torch.Tensor, numel: int) -> torch.Tensor:
    """The memory that begins with this number; ValueError where it is a copy of the number alone."""
    expected, held = max(1, numel) * first.itemsize, first.untyped_storage().nbytes()
    if held != expected or first.storage_offset():
        changed("memory", f"{expected} bytes", f"{held}: a graph that holds for many lengths shows hooks the first of "
                "them alone. Compile with dynamic=False beside hooks that copy saved tensors")  # fmt: skip
    return first.as_strided((numel,), (1,))


def _looks(x: torch.Tensor, many: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """What a tensor looks like while a graph is made, which may hold for other sizes of the first `many` axes too."""
    return tuple([_now(n) if i < many else int(n) for i, n in enumerate(x.shape)]), x.dtype, x.device


def _now(n: Any) -> int:
    """A size in this call, which the graph then does not depend on. Of one that nothing tells, some number."""
    if not isinstance(n, torch.SymInt):
        return int(n)
    return int(n.node.hint) if n.node.has_hint() else _ANY


def _with_sizes(key: str, *tensors: Optional) -> str:
    """The key in the graph that is being made, in which sizes may be symbols."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    known = all([has_static_value(n) for x in tensors if x is not None for n in x.shape])
    return key if known else _MANY_SIZES + key[len(_KIND) :]


def call(
    key: str, tensors: Sequence[torch.Tensor], initial: Optional, cu_seqlens: Optional, sp: SequenceParallel | None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Outputs and final states of a call through the operators. `key` is what `name_of` gave."""
    ends = sp is None or cu_seqlens is not None or sp.is_last
    if torch.compiler.is_dynamo_compiling():
        key = _with_sizes(key, *tensors, initial, cu_seqlens)
    return operators.call(key, tensors, initial, cu_seqlens, want_final=ends, sp=sp)


def call_now(
    variant: Variant, inputs: dict[str, torch.Tensor], initial: Optional, cu_seqlens: Optional,
    sp: SequenceParallel | None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """The same outside of torch.compile. A trace keeps the key, so the variant lasts."""
    if torch.jit.is_tracing() or get_proxy_mode() is not None:
        _lasting.add(variant)
    given = [inputs[name] for name in variant.names]
    return call(variant.graph_name, given, initial, cu_seqlens, sp)
