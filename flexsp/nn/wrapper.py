"""SequenceParallelLA: makes a module built on `flexsp.ops` sequence parallel, in place."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import conv, fold, padding, pooling, rnn, upsampling
from torch.nn.modules.batchnorm import _NormBase

from flexsp.comm.group import SequenceParallel, sequence_parallel

M = TypeVar("M", bound=nn.Module)

_ATTENTION = (
    "softmax attention reads every token of the sequence; use a layer built on flexsp.ops, or keep it outside the "
    "wrapper, between sp.gather and sp.shard"
)
_REFUSED: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((conv._ConvNd,), "a convolution reads tokens of other ranks; use flexsp.nn.ShortConvolution"),
    ((rnn.RNNBase, rnn.RNNCellBase), "its recurrence starts anew on every rank; use a layer built on flexsp.ops"),
    (
        (
            nn.MultiheadAttention,
            nn.Transformer,
            nn.TransformerEncoder,
            nn.TransformerDecoder,
            nn.TransformerEncoderLayer,
            nn.TransformerDecoderLayer,
        ),
        _ATTENTION,
    ),
    ((_NormBase,), "its statistics are over this rank's tokens only; use nn.LayerNorm or nn.RMSNorm"),
    ((torch.jit.ScriptModule,), "the code of a scripted module cannot be seen; wrap the original module"),
)
_REFUSED_FILES = tuple(module.__name__ for module in (fold, padding, pooling, upsampling))
_REFUSED_CALLS = {
    "scaled_dot_product_attention": _ATTENTION,
    "multi_head_attention_forward": _ATTENTION,
    "flex_attention": _ATTENTION,
    "flash_attn_func": _ATTENTION,
    "flash_attn_varlen_func": _ATTENTION,
    "conv1d": "a convolution reads tokens of other ranks; use flexsp.nn.ShortConvolution",
    "causal_conv1d_fn": "a convolution reads tokens of other ranks; use flexsp.nn.ShortConvolution",
}
_FOREIGN_OPS = ("fla.ops", "mamba_ssm.ops")


class SequenceParallelLA(nn.Module):
    """Makes `layer` sequence parallel, in place, and returns it (as `fully_shard` does).

    `layer` is any module whose tokens meet only in functions of `flexsp.ops` (called without ``sp=``) or in layers of
    `flexsp.nn`: everything else must treat tokens one by one. It then takes this rank's shard [B, T_local, ...] and
    gives the shard of what the whole sequence would give; `cu_seqlens` are global. A layer that depends on the
    position (rotary embedding, learned positions) needs the offset ``sp.shard_range(T_local)[0]``.

    The returned object is `layer` itself, an instance of its own class and of SequenceParallelLA: attributes,
    parameter names and state_dict keys stay as they were. It and its submodules of non-torch classes are bound to sp:
    their forward enters ``sequence_parallel(sp)``, so that recomputation of a checkpointed submodule, which runs in the
    backward pass on another thread, finds it too. A checkpointed plain function must pass ``sp=`` to its ops itself
    (FlexspError otherwise).
    Wrap before DistributedDataParallel, fully_shard, torch.compile; copy.deepcopy works, save state_dicts rather than
    pickled modules. `unwrap` undoes it.

    Args:
        layer: the module.
        sp: from `flexsp.init_sequence_parallel`. Wrapping again replaces it.
        allow: paths of submodules to accept although they look inexact, with all below them.

    Raises:
        ValueError: a submodule cannot be exact (convolutions, RNNs, softmax attention, batch norm, pooling, ops of
            other libraries); the message names its path and the remedy.

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
        if args or kwargs:  # type(self)(...) inside the wrapped class's own code makes a plain one
            return cls._flexsp_original(*args, **kwargs)
        return super().__new__(cls)  # copy.deepcopy

    def __init__(self, layer: nn.Module, sp: SequenceParallel, *, allow: Collection[str] = ()) -> None:
        """All done by `__new__`: the object is the layer, long since initialised."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sequence_parallel(self._flexsp_sp):
            return super().forward(*args, **kwargs)


def unwrap(module: M) -> M:
    """Undo `SequenceParallelLA`, in place: `module` and its submodules are plain again.

    Raises:
        ValueError: `fully_shard` came after the wrapper.
    """
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
    allowed = frozenset((allow,) if isinstance(allow, str) else allow)
    unknown = allowed.difference(path for path, _ in layer.named_modules(remove_duplicate=False))
    if unknown:
        raise ValueError(f"allow: expected paths of submodules, got {sorted(unknown)}")
    modules = list(_accepted(layer, "", allowed))
    for module in modules:
        if module is layer or _own_classes(module):
            _bind(module, sp)
    return layer


def _accepted(module: nn.Module, path: str, allow: frozenset[str]) -> Iterator[nn.Module]:
    """`module` and all below it; ValueError at the first that cannot be exact."""
    if path not in allow:
        reason = _refusal(module)
        if reason is not None:
            raise ValueError(
                f"layer: expected modules that can be exact over ranks, got {type(module).__name__} at "
                f"{path or '(the layer itself)'!r}: {reason}. If it treats tokens one by one, pass allow=[{path!r}]"
            )
        for name, child in module.named_children():
            yield from _accepted(child, f"{path}.{name}" if path else name, allow)
    else:
        yield from (child for child in module.modules() if child is not module)
    yield module


def _refusal(module: nn.Module) -> str | None:
    if isinstance(module, conv._ConvNd) and set(module.kernel_size) == set(module.stride) == {1}:
        return None
    for types, reason in _REFUSED:
        if isinstance(module, types):
            return reason
    if type(module).__module__ in _REFUSED_FILES:
        return "it reads tokens of other ranks"
    for cls in _own_classes(module):
        if cls.__module__.startswith("transformers.") and cls.__name__.endswith("Attention"):
            return _ATTENTION
        for function in vars(cls).values():
            if isinstance(function, FunctionType) and (found := _refused_call(function, set())) is not None:
                return found
    return None


def _refused_call(function: FunctionType, seen: set[FunctionType]) -> str | None:
    """Why `function`, or a function of the same program that it calls, cannot be exact over ranks."""
    seen.add(function)
    for called in _called(function.__code__, function.__globals__):
        name, origin = getattr(called, "__name__", ""), getattr(called, "__module__", None) or ""
        if name in _REFUSED_CALLS:
            return f"its code calls {name}: {_REFUSED_CALLS[name]}"
        if origin.startswith(_FOREIGN_OPS):
            return f"its code calls {origin}.{name}, which knows nothing of ranks; use flexsp.ops"
        if isinstance(called, FunctionType) and called not in seen and not origin.startswith(("torch.", "flexsp.")):
            reason = _refused_call(called, seen)
            if reason is not None:
                return reason
    return None


def _called(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """The functions that `code` reaches by name, such as F.conv1d; not by attributes of its arguments (self.conv1d)."""
    value: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            value = names.get(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, ModuleType):
            value = getattr(value, instruction.argval, None)
        else:
            value = None
        if callable(value):
            yield value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _called(constant, names)


def _own_classes(module: nn.Module) -> list[type]:
    """The classes of `module` that are not torch's, nor flexsp's wrapper."""
    return [
        cls
        for cls in type(module).__mro__
        if issubclass(cls, nn.Module) and not cls.__module__.startswith(("torch.", "flexsp.nn.wrapper"))
    ]


_BOUND: dict[type[nn.Module], type[SequenceParallelLA]] = {}


def _bind(module: nn.Module, sp: SequenceParallel) -> None:
    cls = type(module)
    if not issubclass(cls, SequenceParallelLA):
        if "forward" in module.__dict__:
            if not _own_classes(module):
                return  # torch.compile's OptimizedModule: the module inside is bound
            raise ValueError(
                f"layer: expected forward methods of classes, got a {cls.__name__} whose forward was replaced on the "
                "instance; wrap first"
            )
        if cls not in _BOUND:
            attributes = {"_flexsp_original": cls, "__module__": __name__, "__doc__": cls.__doc__}
            _BOUND[cls] = type(f"SequenceParallel{cls.__name__}", (SequenceParallelLA, cls), attributes)
        module.__class__ = _BOUND[cls]
    object.__setattr__(module, "_flexsp_sp", sp)
