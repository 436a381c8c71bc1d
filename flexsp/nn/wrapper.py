"""SequenceParallelLA: makes a module built on `flexsp.ops` sequence parallel, in place."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import activation

from flexsp.comm.group import SequenceParallel, count_failed_call, current_sp, sequence_parallel
from flexsp.comm.tracing import constant_in_graphs
from flexsp.exceptions import NotAvailable
from flexsp.nn.attention import Attention
from flexsp.nn.conv import ShortConvolution
from flexsp.nn.exactness import Offence, offences, own_classes, runs_over_ranks, unseen
from flexsp.nn.norm import HeadNorm, RMSNorm
from flexsp.nn.recurrent import RecurrentLayer
from flexsp.scan.by_segments import by_segments, segments_wanted

M = TypeVar("M", bound=nn.Module)


class SequenceParallelLA(nn.Module):
    """Makes `layer` sequence parallel, in place, and returns it (as `fully_shard` does).

    `layer` is any module whose tokens meet only in functions of `flexsp.ops` (called without ``sp=``) or in layers of
    `flexsp.nn`: everything else must treat tokens one by one. It then takes this rank's shard [B, T_local, ...] and
    gives the shard of what the whole sequence would give; `cu_seqlens` are global. A layer that depends on the
    position (rotary embedding, learned positions) needs the offset ``sp.shard_range(T_local)[0]``. What forward code
    computes cannot be seen: where a user wrote some, a warning says so once a process, and `flexsp.verify` tries it.
    Layers of flash-linear-attention may stand in it after `flexsp.integrations.fla.parallelize`.

    The returned object is `layer` itself, an instance of its own class and of SequenceParallelLA: attributes,
    parameter names and state_dict keys stay as they were. It and its submodules of non-torch classes are bound to sp:
    their forward enters ``sequence_parallel(sp)``, so that recomputation of a checkpointed submodule, which runs in the
    backward pass on another thread, finds it too. A checkpointed plain function must pass ``sp=`` to its ops itself
    (FlexspError otherwise).
    Only forward enters the group: other methods that call ops themselves, such as an `encode`, run on this rank's
    tokens alone unless they are called inside ``sequence_parallel(sp)``.
    Under torch.compile a checkpointed block stays in the graph if the model around it is wrapped too, or called inside
    ``sequence_parallel(sp)``; else the graph ends there, with a warning. Wrap before DistributedDataParallel,
    fully_shard, torch.compile; copy.deepcopy works; save state_dicts rather than pickled modules. `unwrap` undoes it.

    Over a group made with ``bitwise``, torch's projections, embeddings, norms and activations and the layers of
    `flexsp.nn` run by segments, so that outputs and gradients have the same bits for any number of ranks; what other
    code of the model sums up over tokens does not (docs/same-bits.md).

    Args:
        layer: the module.
        sp: from `flexsp.init_sequence_parallel`. Wrapping again replaces it.
        allow: paths of submodules to accept although they look inexact, with all below them, unseen. What is accepted
            so and yet needs other tokens is silently wrong on every rank but the first: try `flexsp.verify` before.

    Raises:
        ValueError: submodules cannot be exact (convolutions, RNNs, softmax attention, batch norm, pooling, ops of
            other libraries), or are not known to be: classes of other libraries (transformers, fla, mamba_ssm, whatever
            was installed from an index or a repository) other than norms, MLPs and activations, whatever stands inside
            them. The message names all their paths and the remedies.

    Parameters are the same on all ranks and each rank's gradient covers its own tokens. They add up: either let DDP or
    fully_shard average over the whole (dp, sp) mesh and scale the loss with `sp.token_mean`, or all-reduce
    (sum) the gradients of a plain sum of losses over sp yourself. With token_mean the average over the ranks is the
    gradient of the mean loss on one rank, also with uneven or empty shards::

        mesh = init_device_mesh("cuda", (dp, sp_size), mesh_dim_names=("dp", "sp"))
        sp = flexsp.init_sequence_parallel(mesh["sp"])
        model = SequenceParallelLA(Model().cuda(), sp)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp", "sp"]._flatten())     # or DDP over the same group
        fully_shard(model, mesh=mesh["dp", "sp"]._flatten())
        optimizer = torch.optim.AdamW(model.parameters())
        for tokens, targets in batches:                              # [B, T], the same on the ranks of one sp group
            logits = model(sp.shard(tokens))
            loss = F.cross_entropy(logits.flatten(0, 1), sp.shard(targets).flatten(), reduction="none")
            sp.token_mean(loss).backward()
            optimizer.step(); optimizer.zero_grad()
    """

    _flexsp_sp: SequenceParallel
    _flexsp_original: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is SequenceParallelLA:
            return _wrap(*args, **kwargs)
        if args or kwargs:  # type(self)(...) in the wrapped class's own code makes a plain object
            return cls._flexsp_original(*args, **kwargs)
        return super().__new__(cls)  # copy.deepcopy

    def __init__(self, layer: nn.Module, sp: SequenceParallel, *, allow: Collection[str] = ()) -> None:
        """Does nothing: `__new__` returns the layer, which is initialised already."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hides the wrapped class's method of this name, which may need keywords and is for its user's subclasses."""

    def _get_name(self) -> str:
        """The name in `repr` and in torch's messages: that of the class that was wrapped."""
        return type(self)._flexsp_original.__name__

    def extra_repr(self) -> str:
        """As the wrapped class has it; modules that treat a sequence as a whole also say over how many ranks."""
        told, sp = super().extra_repr(), self._flexsp_sp
        if not isinstance(self, (RecurrentLayer, Attention, ShortConvolution)):
            return told
        return ", ".join([*filter(None, [told]), f"rank {sp.rank} of {sp.world_size}"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if self._flexsp_sp.segment and isinstance(self, _TOKENWISE):
            run = functools.partial(_run_by_segments, self, run)
        if torch.compiler.is_compiling():
            if current_sp() is self._flexsp_sp:
                # A checkpoint in a graph may not change this context, and its recomputation there does not need it.
                return run(*args, **kwargs)
            _warn_if_checkpointed(type(self)._flexsp_original.__name__)
            with sequence_parallel(self._flexsp_sp):
                return run(*args, **kwargs)
        with sequence_parallel(self._flexsp_sp):
            try:
                return run(*args, **kwargs)
            except Exception as error:
                count_failed_call(error, self._flexsp_sp)  # other ranks may already wait for this one's next exchange
                raise


_TOKENWISE = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, RMSNorm, HeadNorm,
    *[x for x in vars(activation).values() if isinstance(x, type) and x.__module__ == activation.__name__],
)  # fmt: skip
"""Modules that groups made with ``bitwise`` run segment by segment. Those of torch's activations that read other tokens
are refused."""


def _run_by_segments(module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``run(*args, **kwargs)``, the forward of one of `_TOKENWISE`."""
    if segments_wanted() is not None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        expected = _expected(module, x)
        if expected is not None:
            raise NotAvailable(f"{type(module).__name__}: with bitwise expected {expected}")
    return by_segments(module, "call", lambda args, kwargs: run(*args, **kwargs), args, kwargs)


def _expected(module: nn.Module, x: torch.Tensor | None) -> str | None:
    """What a call lacks of which segments make what all tokens together do."""
    if x is None or x.dim() < 2 + x.is_floating_point():
        return f"tokens [B, T, ...], got {'no tensor' if x is None else f'shape {list(x.shape)}'}"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        return "an embedding without max_norm and scale_grad_by_freq, which look at all tokens"
    if isinstance(module, nn.RReLU) and module.training:
        return "evaluation mode: its slopes are random numbers, others on every rank"
    return None


@constant_in_graphs  # runs while torch.compile traces
def _warn_if_checkpointed(name: str) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        inside = InstructionTranslator.current_tx().output.current_tracer.parent is not None
    except AttributeError:  # private; another release of torch may keep it elsewhere
        return
    if inside:
        _warn_of_checkpoint(name)


@functools.cache
def _warn_of_checkpoint(name: str) -> None:
    warnings.warn(
        f"{name} is checkpointed in a model under torch.compile and enters its group of ranks inside the checkpoint, "
        "which a graph cannot hold: the graph ends there and the block runs without torch.compile. To keep it in the "
        "graph, wrap the whole model in SequenceParallelLA, or call the model inside flexsp.sequence_parallel(sp)",
        stacklevel=2,
    )


def unwrap(module: M) -> M:
    """Undo `SequenceParallelLA`, in place: `module` and its submodules are plain again.

    Raises:
        ValueError: no module, or `fully_shard` came after the wrapper.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module: expected an nn.Module, got {type(module).__name__}")
    for submodule in module.modules():
        if isinstance(submodule, SequenceParallelLA):
            if type(submodule) not in _BOUND.values():
                raise ValueError(f"module: expected modules not yet under fully_shard, got {type(submodule).__name__}")
            submodule.__class__ = type(submodule)._flexsp_original  # type: ignore[assignment]
            del submodule.__dict__["_flexsp_sp"]
    return module


def _wrap(layer: nn.Module, sp: SequenceParallel, *, allow: Collection[str] = ()) -> nn.Module:
    if not isinstance(layer, nn.Module):
        raise ValueError(f"layer: expected an nn.Module, got {type(layer).__name__}")
    if not isinstance(sp, SequenceParallel):
        raise ValueError(f"sp: expected a SequenceParallel (flexsp.init_sequence_parallel), got {type(sp).__name__}")
    allowed = _allowed(layer, allow)
    _refuse(list(offences(layer, allowed)))
    apart = {part for module in layer.modules() if runs_over_ranks(module) for part in module.modules()}
    modules = [
        module for module in layer.modules()
        if module is layer or (own_classes(module) and module not in apart)
        or (sp.segment > 0 and isinstance(module, _TOKENWISE)) or isinstance(module, SequenceParallelLA)
    ]  # fmt: skip
    for module, bound in [(module, _bound_class(module)) for module in modules]:  # all of them, or none
        _bind(module, bound, sp)
    written = unseen(layer, allowed) if sp.world_size > 1 and sp.is_first else []
    if written:
        _say_what_is_not_seen(", ".join(written[:4]) + (", ..." if len(written) > 4 else ""))
    return layer


_said: list[str] = []


def _say_what_is_not_seen(classes: str) -> None:
    """Warns once a process. The classes differ from model to model, but the advice is the same."""
    if _said:
        return
    _said.append(classes)
    warnings.warn(
        f"SequenceParallelLA has read what the forward code of {classes} calls. It cannot see what that code computes: "
        "learned positions, rotary angles of torch.arange(x.shape[1]), running means, or tokens shifted by torch.cat "
        "start anew on every rank, without an error. Before a long run call flexsp.verify(model, sp, x), which runs a "
        "batch cut and whole and names the first submodule that differs. Positions on a rank begin at "
        "sp.shard_range(x.shape[1])[0]. (Said once.)",
        stacklevel=4,
    )


def _allowed(layer: nn.Module, allow: Any) -> frozenset[str]:
    try:
        paths = (allow,) if isinstance(allow, str) else tuple(allow)
    except TypeError:
        paths = (allow,)
    if not all(isinstance(path, str) for path in paths):
        raise ValueError(f"allow: expected paths of submodules, got {allow!r}")
    allowed = frozenset(paths)
    unknown = allowed.difference(path for path, _ in layer.named_modules(remove_duplicate=False))
    if unknown:
        raise ValueError(f"allow: expected paths of submodules, got {sorted(unknown)}")
    return allowed


def _refuse(found: list[Offence]) -> None:
    """ValueError with one line for each class and reason, if there are any."""
    if not found:
        return
    lines = []
    for kind, reason in dict.fromkeys((offence.kind, offence.reason) for offence in found):
        same = [offence.path or "(the layer itself)" for offence in found if offence[1:] == (kind, reason)]
        more = f" and {len(same) - 1} more, to {same[-1]!r}" if len(same) > 1 else ""
        lines.append(f"\n  {kind} at {same[0]!r}{more}: {reason}.")
    some = [offence.path for offence in found][:3]
    paths = ", ".join(map(repr, some)) + (", ..." if len(found) > len(some) else "")
    raise ValueError(
        f"layer: expected modules that are exact over ranks, got {len(found)} that are not, or not known to be:"
        + "".join(lines)
        + "\nflexsp.verify(layer, sp, x) runs a batch cut and whole and names the first submodule that differs. Where "
        f"it finds none, allow=[{paths}] accepts these with all below them, unseen: a token that needs another one is "
        "then silently wrong on every rank but the first."
    )


_BOUND: dict[type[nn.Module], type[SequenceParallelLA]] = {}


def _bound_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that binds `module` to ranks, its own if it is bound already; None if it stays as it is."""
    cls = type(module)
    if issubclass(cls, SequenceParallelLA):
        return cls
    if "forward" in module.__dict__:
        if not own_classes(module):
            return None  # torch.compile's OptimizedModule: the module inside is bound
        raise ValueError(
            f"layer: expected forward methods of classes, got a {cls.__name__} whose forward was replaced on the "
            "instance; wrap first"
        )
    if cls not in _BOUND:
        attributes = {"_flexsp_original": cls, "__module__": __name__, "__doc__": cls.__doc__}
        try:
            _BOUND[cls] = type(f"SequenceParallel{cls.__name__}", (SequenceParallelLA, cls), attributes)
        except Exception as error:  # a metaclass's
            raise ValueError(f"layer: expected classes that have subclasses, got {cls.__name__}: {error}") from error
    return _BOUND[cls]


def _bind(module: nn.Module, bound: type[nn.Module] | None, sp: SequenceParallel) -> None:
    if bound is None:
        return
    module.__class__ = bound  # type: ignore[assignment]
    object.__setattr__(module, "_flexsp_sp", sp)
