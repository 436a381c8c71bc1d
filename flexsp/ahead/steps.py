"""Training steps of layers, each as a function that runs it where tensors stand in for those on a GPU.

A step is a forward and a backward pass of a layer, of one rank's tokens. Kernels depend on what tensors look like and
on the rank's neighbours, on no value.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from flexsp.bench.case import Case, Shape
from flexsp.bench.layers import case_of
from flexsp.bench.released import RELEASED
from flexsp.bench.variant import variant_case
from flexsp.comm.group import SequenceParallel, sequence_parallel
from flexsp.comm.heap import SymmetricHeap
from flexsp.exceptions import NotAvailable, fail
from flexsp.planner.model_sizes import config_of, known_types, on_meta, operator_of

__all__ = ["Call", "Step", "of_folder", "of_layer", "of_variant", "roles"]

_GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class Call:
    """What a step is called with.

    Attributes:
        B, T: sequences, and tokens of this rank.
        packed: documents that are packed in one sequence; 0 if none are.
        sp: the ranks.
    """

    B: int
    T: int
    dtype: torch.dtype
    packed: int
    sp: SequenceParallel

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Boundaries of documents in the whole sequence."""
        if not self.packed:
            return None
        total = self.T * self.sp.world_size
        return torch.tensor([i * total // self.packed for i in range(self.packed + 1)], device=_GPU)


_FIRST_HEAP = 1 << 20  # bytes of one that grows


@dataclass(frozen=True)
class Step:
    """`run` makes the layer's tensors and runs it, forward and backward."""

    name: str
    run: Callable[[Call], None]


class _Heap(SymmetricHeap):
    """Arenas of other ranks that are not there."""

    def pe(self, group_rank: int) -> int:
        return group_rank


def roles(ranks: int, transport: str, schedule: str, heap_bytes: int | None) -> Iterator[SequenceParallel]:
    """Groups seen from ranks whose kernels differ: the first, one in the middle and the last one.

    Args:
        heap_bytes: of a heap that keeps its size; None for one that grows.
    """

    def heap(nbytes: int) -> SymmetricHeap:
        arena = torch.empty(nbytes, dtype=torch.uint8, device=_GPU)
        return _Heap(arena, [arena] * ranks)

    for rank in sorted({0, min(1, ranks - 1), ranks - 1}):
        yield SequenceParallel(
            rank=rank, world_size=ranks, device=_GPU, transport=transport, schedule=schedule,
            heap=heap(_FIRST_HEAP if heap_bytes is None else heap_bytes),
            open_heap=heap if heap_bytes is None else None,
        )  # fmt: skip


@contextmanager
def _alone(sp: SequenceParallel, T: int) -> Iterator[None]:
    """Inside, the ranks of a group know each other's lengths, and what torch.distributed would bring is made up."""
    from flexsp.scan import schedules

    def arrived(F: torch.Tensor, *others: Any) -> torch.Tensor:
        return torch.empty_like(F)

    sp.set_lengths([T] * sp.world_size)
    with mock.patch.object(schedules, "incoming_state", arrived):
        yield


# Layers of released models, and programs ----------------------------------------------------------------------------


def of_layer(name: str) -> Step:
    """The op of a layer of `flexsp.bench.released`, called as the model calls it.

    Raises:
        ValueError: there is none.
    """
    found = next((x for x in RELEASED if x.name.lower() == name.lower()), None)
    if found is None:
        fail("--layer", f"one of {'; '.join(x.name for x in RELEASED)}", repr(name))
    case = case_of(found)
    assert case is not None, "its gates are of its own kind"
    return Step(found.name, functools.partial(_run_case, case, lambda call: found.shape(call.B, call.T)))


def of_variant(args: argparse.Namespace) -> Step:
    """A program of one's own, `variant_case`.

    Raises:
        ValueError: there is none.
    """
    case = variant_case(args, torch.device("cpu"))

    def shape(call: Call) -> Shape:
        return Shape(call.B, call.T, args.H, args.K, args.V)

    return Step(case.name, functools.partial(_run_case, case, shape))


def _run_case(case: Case, shape: Callable[[Call], Any], call: Call) -> None:
    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, device=_GPU)

    assert case.draw is not None
    inputs = case.draw(shape(call), call.dtype, normal)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if name != "do"}
    bounds = call.cu_seqlens
    packed = {} if bounds is None else {"cu_seqlens": bounds}
    with _alone(call.sp, call.T):
        o = case.ours({**leaves, **packed}, sp=call.sp if call.sp.world_size > 1 else False)
        torch.autograd.grad(o, [*leaves.values()], inputs["do"], allow_unused=True)


# Models of transformers and flash-linear-attention ------------------------------------------------------------------


def of_folder(folder: str | Path) -> Iterator[Step]:
    """The distinct linear-attention layers of the model whose config.json lies in a folder.

    Raises:
        ValueError: no config.json, or a model that `parallelize` refuses.
        NotAvailable: its library is not installed, or a type of models that is not known.
    """
    kind = config_of(folder, "MODEL_FOLDER").get("model_type")
    if kind in _FLA:
        yield from _of_fla(folder)
    elif kind in known_types():
        yield from _of_transformers(on_meta(folder, "MODEL_FOLDER"))
    else:
        known = ", ".join([*known_types(), *_FLA])
        raise NotAvailable(f"MODEL_FOLDER: expected a model_type of {known}, got {kind!r} in {folder}")


_FLA = ("delta_net", "gated_deltanet", "gated_deltaproduct", "gla", "hgrn2", "kda", "retnet")
"""Values of model_type in flash-linear-attention's configs. It calls its Mamba-2 as transformers does."""


def _looks(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((name, x.shape) for name, x in module.named_parameters())


def _of_transformers(model: Any) -> Iterator[Step]:
    from flexsp.integrations.transformers.check import check_model, seam_of
    from flexsp.integrations.transformers.parallelized import over_ranks

    check_model(model)
    seam = seam_of(model)
    mixers: dict[Any, Any] = {}
    for name, module in model.base_model.named_modules():
        if operator_of(module, seam) is not None:
            mixers.setdefault(_looks(module), (name, module))
    for name, module in mixers.values():
        run = functools.partial(_run_mixer, over_ranks(module, seam), module, model.config)
        yield Step(f"{type(module).__name__} ({name})", run)


def _convolved_alone(*args: Any) -> torch.Tensor:
    """The convolution without the tokens of the rank before; it launches no kernel of flexsp's."""
    from flexsp.nn.conv import convolve

    with sequence_parallel(None):
        return convolve(*args)


def _run_mixer(run: Callable[..., Any], module: nn.Module, config: Any, call: Call) -> None:
    """As a parallelized model runs it, on activations of the layer before."""
    from flexsp.integrations.transformers import functions
    from flexsp.integrations.transformers.batch import KEY, Running

    lengths = (call.T,) * call.sp.world_size
    shard = Running(call.sp, lengths, call.B, call.cu_seqlens, None, None, None, call.B * sum(lengths))
    module = module.to_empty(device=_GPU).to(call.dtype)
    hidden = torch.empty(call.B, call.T, config.hidden_size, dtype=call.dtype, device=_GPU, requires_grad=True)
    with ExitStack() as stack:
        stack.enter_context(_alone(call.sp, call.T))
        stack.enter_context(mock.patch.object(functions, "convolve", _convolved_alone))
        made = run(module, hidden, **{KEY: shard})
        o = made[0] if isinstance(made, tuple) else made
        o.backward(torch.empty_like(o))


def _of_fla(folder: str | Path) -> Iterator[Step]:
    try:
        import fla  # noqa: F401
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise NotAvailable(f"MODEL_FOLDER: the model is built with flash-linear-attention: {error}; "
                           'pip install "flexsp[fla]"') from error  # fmt: skip
    from flexsp.integrations.fla.check import check
    from flexsp.integrations.fla.mixers import MIXERS, qualified_name

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    check(model)
    mixers: dict[Any, Any] = {}
    for name, module in model.named_modules():
        if qualified_name(module) in MIXERS and type(module).__name__ != "Attention":
            mixers.setdefault(_looks(module), (name, module))
    for name, module in mixers.values():
        yield Step(f"{type(module).__name__} ({name})", functools.partial(_run_fla, module, model.config))


def _run_fla(module: nn.Module, config: Any, call: Call) -> None:
    """As a parallelized model runs it. That library's own kernels are not launched, nor compiled."""
    from flexsp.integrations.fla import functions, parallelize, restore

    module = module.to_empty(device=_GPU).to(call.dtype)
    hidden = torch.empty(call.B, call.T, config.hidden_size, dtype=call.dtype, device=_GPU, requires_grad=True)
    parallelize(module, call.sp)
    try:
        with ExitStack() as stack:
            stack.enter_context(_alone(call.sp, call.T))
            stack.enter_context(mock.patch.object(functions, "convolve", _convolved_alone))
            o = module(hidden, cu_seqlens=call.cu_seqlens)[0]
            o.backward(torch.empty_like(o))
    finally:
        restore(module)
