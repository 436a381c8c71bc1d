"""Calls of variants as custom operators: one node of a graph of torch.compile, which runs kernels or PyTorch.

`flexsp.kernels.operators` defines the operators. A graph holds the name of a variant (`name_of`) and not the object.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flexsp.comm.derivatives import IN_PYTORCH
from flexsp.comm.group import SequenceParallel
from flexsp.compiler.frontend.program import Program
from flexsp.kernels import functions, operators
from flexsp.kernels.operators import Asked, Saved
from flexsp.runtime.clean_thread import run_in_clean_thread

__all__ = ["Variant", "call", "call_now", "kept", "name_of"]

Optional = torch.Tensor | None


class Variant(Protocol):
    """The interface of `LinearAttention` that the operators use."""

    names: tuple[str, ...]
    graph_name: str
    program: Program

    def likeness(self) -> str: ...

    def prepared(
        self, tensors: Sequence[torch.Tensor], prev_s: Optional, cu_seqlens: Optional, group: SequenceParallel | None
    ) -> Any: ...

    def again(
        self, tensors: Sequence[torch.Tensor], prev_s: Optional, n_docs: int, group: SequenceParallel | None
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
_lasting: set[Variant] = set()  # whose names are in graphs, which outlive the callers' references
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
_KIND = "variant"


def name_of(variant: Variant) -> str:
    """The name that graphs hold in place of the object.

    It is a string, because torch.compile would make a symbol of a number. It differs for variants whose operators may
    return other sizes, because Inductor's cache on disk tells the graphs of two processes apart by it.
    """
    digest = hashlib.sha256(f"{variant.likeness()} {_package()}".encode()).hexdigest()[:16]
    name = f"{digest} {next(_numbers[digest])}"
    _variants[name] = variant
    operators.serve(len(variant.names))
    return f"{_KIND}|{name}"


@functools.cache
def _package() -> str:
    """A hash of this package's own code, which decides on plans and with them on sizes."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kept(make: Callable[[], Variant]) -> tuple[str, tuple[str, ...]]:
    """Makes a variant that lives as long as this process; returns its name in graphs and its inputs' names in order."""
    variant = run_in_clean_thread(torch.device("cpu"), make)
    _lasting.add(variant)
    return variant.graph_name, variant.names


class _Variant:
    """Calls of a variant. Their plans are never tuned, since sizes of the graph's tensors depend on the plan."""

    def __init__(self, name: str) -> None:
        self.model = _variants[name]

    def forward(self, asked: Asked) -> tuple[torch.Tensor, Optional, torch.Tensor, Optional]:
        model, tensors, initial, bounds = self.model, *asked[:3]
        call, shard, values = model.prepared(tensors, initial, bounds, asked.group)
        if call.executable is not None:
            return operators.outputs(call.executable, asked, shard)
        return functions.forward(lambda x: self.in_pytorch(call, x, values), asked)

    def backward(self, asked: Asked, kept: Saved, *others: Any) -> tuple[list[Optional], Optional]:
        call, table = self.model.again(asked.tensors, asked.initial, asked.n_docs, asked.group), kept[1]
        if call.executable is not None:
            return operators.gradients(call.executable, asked.tensors, asked.initial, kept, *others)
        values = None if table is None else [int(n) for n in table.tolist()]
        return functions.gradients(lambda x: self.in_pytorch(call, x, values), asked, *others)

    def in_pytorch(self, call: Any, asked: Asked, bounds: list[int] | None) -> tuple[torch.Tensor, Optional]:
        inputs = dict(zip(self.model.names, asked.tensors, strict=True))
        return self.model.in_pytorch(call, inputs, asked.initial, bounds, asked.group)

    def axes(self, first: torch.Tensor) -> int:
        return 1 + (first.dim() > len(self.model.program.meta.tokens[self.model.names[0]].shape))

    def like_forward(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        model, first, cu_seqlens = self.model, asked.tensors[0], asked.cu_seqlens
        _lasting.add(model)
        run_in_clean_thread(first.device, lambda: model.make_kernels(first.device.type == "cuda", first.dtype))

        def planned(like: Asked) -> tuple[Any, tuple[int, ...]]:
            inputs = dict(zip(model.names, like.tensors, strict=True))
            call = model.checked(inputs, like.initial, like.cu_seqlens, like.group)
            if call.executable is not None:
                return call, call.executable.out
            x = like.tensors[0]
            return call, (*x.shape[: self.axes(x) + 1], model.width(inputs, like.initial))

        call, out = operators.on_fakes(asked, planned)
        executable = call.executable
        table = first.new_empty(0, dtype=torch.int32)
        if cu_seqlens is not None:
            chunks = None if executable is None else executable.plan.n_chunks
            table = torch.empty_like(cu_seqlens) if chunks is None else first.new_empty(chunks, 5, dtype=torch.int32)
        return (
            first.new_empty(out),
            first.new_empty(call.states if asked.want_final else 0, dtype=call.wide),
            first.new_empty(0 if executable is None else executable.saved.nbytes, dtype=torch.uint8),
            table,
        )


operators.define_kind(
    _KIND, _Variant, "a variant's kernels, or a variant in a graph", f"outside of graphs, {IN_PYTORCH}"
)  # fmt: skip


def call(
    key: str, tensors: Sequence[torch.Tensor], initial: Optional, cu_seqlens: Optional, sp: SequenceParallel | None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Outputs and final states of a call through the operators. `key` is a name that `name_of` returned."""
    returns_final = sp is None or cu_seqlens is not None or sp.is_last
    return operators.call(key, tensors, initial, cu_seqlens, want_final=returns_final, sp=sp)


def call_now(
    variant: Variant, inputs: dict[str, torch.Tensor], initial: Optional, cu_seqlens: Optional,
    sp: SequenceParallel | None,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """`call` outside of torch.compile. A trace keeps the key alone, so it makes the variant last."""
    if torch.jit.is_tracing() or get_proxy_mode() is not None:
        _lasting.add(variant)
    given = [inputs[name] for name in variant.names]
    return call(variant.graph_name, given, initial, cu_seqlens, sp)
