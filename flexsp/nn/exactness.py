"""Which modules can be exact over ranks, judged by their classes, before anything runs.

Torch's own modules are known. A user's classes are read: what they call. A class of another library is refused unless
it is known to treat tokens one by one, since its tokens may meet in code that cannot be seen from here.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import conv, fold, padding, pooling, rnn, upsampling
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["Offence", "offences", "own_classes", "refusal"]

_ATTENTION = (
    "softmax attention reads every token of the sequence; use a layer built on flexsp.ops, or keep it outside the "
    "wrapper, between sp.gather and sp.shard"
)
_CONVOLUTION = "a convolution reads tokens of other ranks; use flexsp.nn.ShortConvolution"
_REFUSED: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((conv._ConvNd,), _CONVOLUTION),
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
    "conv1d": _CONVOLUTION,
    "causal_conv1d_fn": _CONVOLUTION,
}
# Functions of other libraries in which tokens meet, by what their names say.
_MIXING = re.compile("chunk|recurrent|scan|attn|attention|conv|delta_rule|token_shift")
_KERNELS = ("fla.ops", "mamba_ssm.ops.selective", "mamba_ssm.ops.triton.ssd", "causal_conv1d", "mlstm_kernels")

# Libraries that are known by name, wherever their files lie; others by how they were installed.
_LIBRARIES = frozenset({
    "accelerate", "apex", "bitsandbytes", "causal_conv1d", "deepspeed", "diffusers", "fairseq", "fla", "flash_attn",
    "liger_kernel", "lightning", "lit_gpt", "litgpt", "mamba_ssm", "megatron", "mlstm_kernels", "nemo", "peft",
    "pytorch_lightning", "rwkv", "timm", "torchaudio", "torchtune", "torchvision", "transformer_engine",
    "transformers", "transformers_modules", "vllm", "x_transformers", "xformers", "xlstm",
})  # fmt: skip
# Classes of theirs that treat tokens one by one, or whose forward only asks for one.
_TOKENWISE = re.compile(
    r"transformers\.activations\.\w+|transformers\.pytorch_utils\.Conv1D|transformers\..*RMSNormGated"
    r"|fla\.modules\.(layernorm|layernorm_gated|fused_norm_gate|l2norm|mlp)\.\w+"
    r"|mamba_ssm\.(ops\.triton\.(layer_norm|layernorm|layernorm_gated)\.\w+|modules\.mlp\.GatedMLP)"
    r"|flash_attn\.(ops\.(rms_norm|layer_norm|fused_dense)|modules\.mlp)\.\w+|apex\.normalization\.\w+\.Fused\w+Norm"
    r"|liger_kernel\.transformers\.(rms_norm|layer_norm|swiglu|geglu)\.\w+|bitsandbytes\.nn\.modules\.Linear4bit"
    r"|peft\.tuners\.lora\.layer\.(Linear|Embedding)|(pytorch_lightning|lightning)\..*LightningModule"
)
# So do those with such a name, if the code of their forward moves nothing between tokens.
_TOKENWISE_NAMES = re.compile(r"(?!\w*(Encoder|Decoder|Mixer))\w*(RMSNorm|LayerNorm|MLP)")
_MOVING = frozenset({
    "T", "bmm", "cat", "chunk", "conv1d", "cumsum", "einsum", "expand", "flatten", "flip", "gather", "index_select",
    "mT", "matmul", "max", "min", "movedim", "narrow", "pad", "permute", "repeat", "reshape", "roll", "scatter",
    "softmax", "split", "stack", "sum", "super", "swapaxes", "t", "transpose", "unflatten", "unfold", "view", "where",
})  # fmt: skip

_IN_ITS_PLACE = (
    (r"\w*(Model|LMHead\w*|For[A-Z]\w*|Block|Layer)",
     "put its parts into a module of your own, whose code treats tokens one by one"),
    (r"\w*Mamba2?(Mixer|$)|BambaMixer|FalconH1Mixer",
     "flexsp.nn.Mamba2 is that layer of Mamba-2 (n_groups = 1: the parameters have the same names)"),
    (r"\w*(Delta|GatedLinearAttention|GLA|HGRN|RetNet|Retention|Lightning|RWKV|Rwkv|LSTM|Mamba|Rglru|RecurrentBlock)\w*",
     "write the layer on flexsp.ops, flexsp.grammar.FlexLinearAttention or flexsp.compiler.LinearAttention"),
    (r"\w*(ShortConv|Convolution)\w*", "use flexsp.nn.ShortConvolution"),
    (r"\w*Attention\w*", _ATTENTION),
    (r"\w*Rotary\w*", "compute the factors from global positions, which start at sp.shard_range(T)[0]"),
)  # fmt: skip
_OTHERWISE = (
    "put a layer of flexsp.nn or one built on flexsp.ops in its place, or keep it outside the wrapper, between "
    "sp.gather and sp.shard"
)


class Offence(NamedTuple):
    """A module that is not exact over ranks, or not known to be."""

    path: str
    kind: str
    reason: str


def offences(module: nn.Module, allow: Collection[str] = (), path: str = "") -> Iterator[Offence]:
    """All modules that are refused, outermost first, except those at the paths of ``allow`` and below them.

    Torch's modules inside a refused one of another library are left out: to exchange them would not make it exact.
    """
    yield from _offences(module, path, allow, False)


def _offences(module: nn.Module, path: str, allow: Collection[str], inside: bool) -> Iterator[Offence]:
    if path in allow:
        return
    origin = _foreign(type(module))
    reason = refusal(module)
    if reason is not None and (origin is not None or not inside):
        yield Offence(path, type(module).__name__, reason)
    inside = inside or (origin is not None and reason is not None)
    for name, child in module.named_children():
        yield from _offences(child, f"{path}.{name}" if path else name, allow, inside)


def refusal(module: nn.Module) -> str | None:
    """Why ``module`` itself, whatever stands inside it, is not accepted."""
    if isinstance(module, conv._ConvNd) and set(module.kernel_size) == set(module.stride) == {1}:
        return None
    for types, reason in _REFUSED:
        if isinstance(module, types):
            return reason
    if type(module).__module__ in _REFUSED_FILES:
        return "it reads tokens of other ranks"
    foreign = _foreign(type(module))
    if foreign is not None:
        return _of_a_library(type(module), foreign)
    for cls in own_classes(module):
        for function in vars(cls).values() if _library(cls) is None else ():
            if isinstance(function, FunctionType) and (found := _refused_call(function, set())) is not None:
                return found
    return None


def own_classes(module: nn.Module) -> list[type]:
    """The classes of ``module`` that are not torch's, nor flexsp's wrapper."""
    return [
        cls
        for cls in type(module).__mro__
        if issubclass(cls, nn.Module) and not cls.__module__.startswith(("torch.", "flexsp.nn.wrapper"))
    ]


# ------------------------------------------------------------------------------------------ other libraries


def _of_a_library(cls: type, foreign: type) -> str:
    library = foreign.__module__.partition(".")[0]
    whose = f"a class of {library}" if foreign is cls else f"its forward is that of {foreign.__name__}, of {library}"
    place = next((text for names, text in _IN_ITS_PLACE if re.fullmatch(names, foreign.__name__)), _OTHERWISE)
    return f"{whose}, whose tokens may meet in code that knows nothing of ranks, whatever stands inside it; {place}"


def _foreign(cls: type) -> type | None:
    """The class of another library, not known to treat tokens one by one, whose forward instances of ``cls`` run."""
    wanted = {"forward"}
    for base in cls.__mro__:
        if base is nn.Module or base.__module__.startswith("torch."):
            return None
        if base.__module__ == "flexsp.nn.wrapper":
            continue
        hits = {name: f for name, f in vars(base).items() if name in wanted}
        if _library(base) is None:
            for name, function in hits.items():
                used = _names(function)
                if not (name in used and "super" in used):
                    wanted.discard(name)
                wanted |= {other for other in used if "forward" in other and other != "forward"}
        elif hits and not _known(base):
            return base
    return None


def _known(cls: type) -> bool:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if _TOKENWISE.fullmatch(name):
        return True
    return bool(_TOKENWISE_NAMES.fullmatch(cls.__name__)) and not (_names(vars(cls).get("forward")) & _MOVING)


def _names(function: Any) -> set[str]:
    """What the code of a function names: globals and attributes."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return set() if code is None else {*code.co_names}


def _library(cls: type) -> str | None:
    """The library, other than torch and flexsp, that defines ``cls``; None for the user's own."""
    top = cls.__module__.partition(".")[0]
    if top in ("torch", "flexsp", "__main__", "builtins"):
        return None
    return top if top in _LIBRARIES or _installed(cls.__module__) else None


@functools.cache
def _installed(module: str) -> bool:
    """Whether the module came with a package from an index or a repository, not from files of this machine."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    for name in _distributions().get(module.partition(".")[0], ()):
        package = metadata.distribution(name)
        local = '"file:' in (package.read_text("direct_url.json") or "")
        if package.read_text("INSTALLER") is None or local:  # metadata in a checkout, or a directory or wheel of theirs
            continue
        if Path(file).resolve().is_relative_to(Path(str(package.locate_file(""))).resolve()):
            return True
    return False


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


# --------------------------------------------------------------------------------------------- what code calls


def _refused_call(function: FunctionType, seen: set[FunctionType]) -> str | None:
    """Why `function`, or a function of the same program that it calls, cannot be exact over ranks."""
    seen.add(function)
    own = function.__module__.partition(".")[0] not in _LIBRARIES
    for called in _called(function.__code__, function.__globals__):
        name, origin = getattr(called, "__name__", ""), getattr(called, "__module__", None) or ""
        if name in _REFUSED_CALLS:
            return f"its code calls {name}: {_REFUSED_CALLS[name]}"
        mixes = origin.partition(".")[0] in _LIBRARIES and not isinstance(called, type) and _MIXING.search(name)
        if origin.startswith(_KERNELS) or (own and mixes):
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
