"""Which modules can be exact over ranks, judged by their classes, before anything runs.

Torch's own modules are known. A user's classes are read: what they call. A class of another library is refused unless
it is known to treat tokens one by one, since its tokens may meet in code that cannot be seen from here.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import conv, fold, loss, padding, pixelshuffle, pooling, rnn, upsampling
from torch.nn.modules.batchnorm import _NormBase

from flexsp.nn.bytecode import Reader, mentions

__all__ = ["OVER_RANKS", "Offence", "offences", "own_classes", "refusal", "runs_over_ranks", "unseen"]

OVER_RANKS = "_flexsp_over_ranks"  # an attribute of forwards that integrations give to single layers

_ATTENTION = (
    "softmax attention reads every token of the sequence; use flexsp.nn.Attention or "
    "flexsp.nn.attention.scaled_dot_product_attention, or keep it outside the wrapper, between sp.gather and sp.shard"
)
_CONVOLUTION = "a convolution reads tokens of other ranks; use flexsp.nn.ShortConvolution"
_STATISTICS = "its statistics are over this rank's tokens only; use nn.LayerNorm or nn.RMSNorm"
_RECURRENCE = "its recurrence starts anew on every rank; use a layer built on flexsp.ops"
_OTHER_TOKENS = "it reads tokens of other ranks"
_LOCAL_LOSS = "its mean is over this rank's tokens only; use reduction='none' and sp.token_mean"
_REFUSED: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((conv._ConvNd,), _CONVOLUTION),
    ((rnn.RNNBase, rnn.RNNCellBase), _RECURRENCE),
    (
        (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
         nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
        _ATTENTION,
    ),
    ((_NormBase,), _STATISTICS),
    ((nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d),
     "it takes axis 1 for channels and the axes after it for one sample, tokens among them; use nn.LayerNorm or "
     "flexsp.nn.GatedRMSNorm"),
    ((nn.Softmax2d, nn.ChannelShuffle), "it takes an axis other than the last for channels, which may be the tokens"),
    ((nn.EmbeddingBag,), "it adds up the tokens of a bag; use nn.Embedding"),
    ((nn.CTCLoss,), "it reads every token of the sequence; gather its input with sp.gather"),
    ((nn.AdaptiveLogSoftmaxWithLoss,), _LOCAL_LOSS),
    ((torch.jit.ScriptModule,), "the code of a scripted module cannot be seen; wrap the original module"),
)
_REFUSED_FILES = tuple(module.__name__ for module in (fold, padding, pixelshuffle, pooling, upsampling))
_REFUSED_CALLS = {
    "scaled_dot_product_attention": _ATTENTION,
    "multi_head_attention_forward": _ATTENTION,
    "flex_attention": _ATTENTION,
    "flash_attn_func": _ATTENTION,
    "flash_attn_varlen_func": _ATTENTION,
    "causal_conv1d_fn": _CONVOLUTION,
}
# Torch's functions that do what refused modules do.
_REFUSED_OF_TORCH = tuple((re.compile(names), reason) for names, reason in (
    (r"conv(_transpose)?\dd|conv_tbc|_?convolution", _CONVOLUTION),
    (r"(native_|cudnn_)?(batch|instance|group)_norm|local_response_norm", _STATISTICS),
    (r"(lstm|gru|rnn_tanh|rnn_relu)(_cell)?", _RECURRENCE),
    (r"\w*pool\dd\w*|interpolate|upsample\w*|grid_sample\w*|affine_grid\w*|fold|unfold|pad|embedding_bag|ctc_loss"
     r"|pixel_(un)?shuffle|(native_)?channel_shuffle|im2col|col2im", _OTHER_TOKENS),
))  # fmt: skip
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
    (r"mLSTMLayer",
     "flexsp.nn.MLSTM is that layer (the parameters have the same names)"),
    (r"\w*RecurrentBlock", "flexsp.nn.RGLRU is that block of Griffin (the parameters have the same names)"),
    (r"\w*(Model|LMHead\w*|For[A-Z]\w*|Block|Layer)",
     "put its parts into a module of your own, whose code treats tokens one by one"),
    (r"Mamba(Mixer)?", "flexsp.nn.Mamba is that layer of Mamba-1 (the parameters have the same names)"),
    (r"(Falcon|Jamba)MambaMixer", "Mamba-1 with norms: write the layer on flexsp.ops.selective_scan"),
    (r"\w*Mamba2?(Mixer|$)|BambaMixer|FalconH1Mixer",
     "flexsp.nn.Mamba2 is that layer of Mamba-2 (n_groups = 1: the parameters have the same names)"),
    (r"RWKV7Attention", "flexsp.nn.RWKV7 is that layer (the parameters have the same names)"),
    (r"Mamba3", "flexsp.nn.Mamba3 is that layer (the parameters have the same names)"),
    (r"(Gated)?DeltaNet|GatedDeltaNet2|KimiDeltaAttention|GatedDeltaProduct|GatedLinearAttention",
     "flexsp.nn has that layer under the same name (the parameters of fla's have the same names)"),
    (r"HGRN2?Attention", "flexsp.nn has that layer as HGRN or HGRN2 (the parameters of fla's have the same names)"),
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
_INTEGRATED = {
    "fla": "; or flexsp.integrations.fla.parallelize first, which takes some of its layers",
    "transformers": "; flexsp.integrations.transformers.parallelize takes some whole models, without this wrapper",
}


class Offence(NamedTuple):
    """A module that is not exact over ranks, or not known to be."""

    path: str
    kind: str
    reason: str


def offences(module: nn.Module, allow: Collection[str] = (), path: str = "") -> Iterator[Offence]:
    """All modules that are refused, outermost first, except those at the paths of ``allow`` and below them, and layers
    that `flexsp.integrations` has made run over the ranks.

    Torch's modules inside a refused one of another library are left out: to exchange them would not make it exact.
    """
    yield from _offences(module, path, allow, False, _Program(module))


def _offences(
    module: nn.Module, path: str, allow: Collection[str], inside: bool, program: _Program
) -> Iterator[Offence]:
    if path in allow or runs_over_ranks(module):
        return
    origin = _foreign(type(module))
    reason = refusal(module, program)
    if reason is not None and (origin is not None or not inside):
        yield Offence(path, type(module).__name__, reason)
    inside = inside or (origin is not None and reason is not None)
    for name, child in module.named_children():
        yield from _offences(child, f"{path}.{name}" if path else name, allow, inside, program)


def refusal(module: nn.Module, program: _Program | None = None) -> str | None:
    """Why ``module`` itself, whatever stands inside it, is not accepted."""
    reason = _of_torch(module)
    if reason is not None:
        return reason
    foreign = _foreign(type(module))
    if foreign is not None:
        return _of_a_library(type(module), foreign)
    return (_Program(module) if program is None else program).refusal(module)


def _of_torch(module: nn.Module) -> str | None:
    pointwise = isinstance(module, conv._ConvNd) and _pointwise(module)
    for types, reason in _REFUSED:
        if isinstance(module, types) and not pointwise:
            return reason
    if any(cls.__module__ in _REFUSED_FILES for cls in type(module).__mro__):
        return _OTHER_TOKENS
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) > 1:
        shape = tuple(module.normalized_shape)
        return f"expected statistics over the last axis, got the last {len(shape)}, {shape}, which may hold tokens"
    if isinstance(module, (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.CosineSimilarity)) and module.dim != -1:
        return f"expected dim=-1, got dim={module.dim}, which may be the tokens"
    if isinstance(module, loss._Loss) and module.reduction not in ("none", "sum"):
        return _LOCAL_LOSS
    return None


def _pointwise(module: conv._ConvNd) -> bool:
    pad = () if isinstance(module.padding, str) else module.padding  # of one element, "same" and "valid" add none
    return set(module.kernel_size) == set(module.stride) == {1} and not any((*pad, *module.output_padding))


def runs_over_ranks(module: nn.Module) -> bool:
    """Whether every call of ``module`` runs over ranks, by a forward that an integration gave it."""
    return hasattr(vars(module).get("forward"), OVER_RANKS)


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
    place += _INTEGRATED.get(library, "")
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
        installer = (package.read_text("INSTALLER") or "").strip()
        local = '"file:' in (package.read_text("direct_url.json") or "") and installer != "conda"  # says so of all
        if not installer or local:  # metadata in a checkout, or a directory or wheel of theirs
            continue
        if Path(file).resolve().is_relative_to(Path(str(package.locate_file(""))).resolve()):
            return True
    return False


@functools.cache
def _distributions() -> dict[str, list[str]]:
    """Packages that hold a top-level name. metadata.packages_distributions of Python 3.10 knows only those of old."""
    found: dict[str, list[str]] = {}
    for package in metadata.distributions():
        code = [file for file in package.files or [] if file.suffix in (".py", ".so", ".pyd")]
        for top in {file.parts[0] if len(file.parts) > 1 else file.name.partition(".")[0] for file in code}:
            found.setdefault(top, []).append(package.metadata["Name"])
    return found


# --------------------------------------------------------------------------------------------- what code calls

_INTERNALS = frozenset({"_parameters", "_buffers", "_modules"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BY_STRING = frozenset({
    "__dict__", "__getattr__", "__getattribute__", "attrgetter", "dir", "eval", "exec", "getattr", "getattr_static",
    "getmembers", "methodcaller", "vars",
})  # fmt: skip


class _Program:
    """The user's code in a tree of modules."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.registered = {id(module) for module in root.modules()}
        self.examined: set[int] = set()
        self.of_class: dict[type, str | None] = {}

    def refusal(self, module: nn.Module) -> str | None:
        for cls in _read(module):
            if cls not in self.of_class:
                self.of_class[cls] = self._of_class(cls)
            if self.of_class[cls] is not None:
                return self.of_class[cls]
        for name, value in _attributes(module):
            found = self._refused(value, type(module).__module__, f"its attribute {name!r}")
            if found is not None:
                return found
        return None

    def _of_class(self, cls: type) -> str | None:
        for name, value in list(vars(cls).items()):
            found = self._refused(value, cls.__module__)
            if found is not None and not self._unused(cls, name):
                return found
        return None

    def _refused(self, start: Any, origin: str, what: str = "its code") -> str | None:
        """Why `start`, or something of the same program that it calls or holds, cannot be exact over ranks."""
        for holder, value in Reader(_entered, _owned).reached(start, origin):
            if isinstance(value, nn.Module):
                found = self._unregistered(value, what)
            elif value is start and isinstance(value, FunctionType) and _entered(value.__module__ or ""):
                found = None
            else:
                found = _refused_call(value, holder, what)
            if found is not None:
                return found
        return None

    def _unregistered(self, module: nn.Module, what: str) -> str | None:
        """Of a module in a list, a dict, a closure or a global: it is no submodule, so it has no path."""
        if id(module) in self.registered | self.examined or any(inner is self.root for inner in module.modules()):
            return None
        self.examined.add(id(module))
        for offence in _offences(module, "", (), False, self):
            return f"{what} holds a {offence.kind} that is not registered as a submodule: {offence.reason}"
        return None

    def _unused(self, cls: type, name: str) -> bool:
        """Whether no other code of the program says the name of a method of ``cls``, so that nothing comes to it."""
        libraries = [base for base in cls.__mro__ if base.__module__.startswith(("torch.", "flexsp."))]
        if name.startswith("__") or "forward" in name or any(hasattr(base, name) for base in libraries):
            return False
        reader = Reader(_entered, _owned)
        waiting, seen = list(self.root.modules()), {id(module) for module in self.root.modules()}
        while waiting:
            module = waiting.pop()
            if any(_library(base) is not None for base in type(module).__mro__):
                return False
            values = [value for base in _read(module) for other, value in vars(base).items() if other != name]
            for _, value in reader.reached([*values, *(value for _, value in _attributes(module))], ""):
                inner = [one for one in value.modules() if id(one) not in seen] if isinstance(value, nn.Module) else []
                seen.update(map(id, inner))
                waiting += inner
        said = mentions(reader.codes)
        return name not in said and not said & _BY_STRING


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Hooks, and what else an instance of a user's class holds beside its parameters and submodules."""
    own = bool(_read(module))
    return [(name, x) for name, x in vars(module).items() if name in _HOOKS or (own and name not in _INTERNALS)]


def _read(module: nn.Module) -> list[type]:
    """The classes of ``module`` that the user wrote."""
    return [cls for cls in own_classes(module) if not cls.__module__.startswith("flexsp.") and _library(cls) is None]


def unseen(layer: nn.Module, allowed: Collection[str]) -> list[str]:
    """Names of the classes in ``layer`` whose forward a user wrote, but for submodules at and below ``allowed`` paths.

    What such code calls is read, and what it computes is not: positions of its own, sums over tokens, shifts.
    """
    found: dict[str, None] = {}
    for path, module in layer.named_modules():
        parts = path.split(".") if path else []
        if "" in allowed or any(".".join(parts[:n]) in allowed for n in range(1, len(parts) + 1)):
            continue
        found |= dict.fromkeys(cls.__name__ for cls in _read(module) if "forward" in vars(cls))
    return list(found)


def _entered(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in ("torch", "flexsp", "numpy", "builtins") and top not in sys.stdlib_module_names | _LIBRARIES


def _owned(module: str) -> bool:
    return _entered(module) and not _installed(module)


def _refused_call(called: Any, holder: str, what: str) -> str | None:
    name, origin = getattr(called, "__name__", None) or "", getattr(called, "__module__", None) or ""
    if not isinstance(name, str) or not isinstance(origin, str):
        return None
    how = f"{what} calls"
    if origin.startswith("flexsp."):
        return None
    if isinstance(called, torch.jit.ScriptFunction):
        return f"{how} {name}, a scripted function, whose code cannot be seen; use the original one"
    if name in _REFUSED_CALLS:
        return f"{how} {name}: {_REFUSED_CALLS[name]}"
    if origin == "torch" or origin.startswith("torch."):
        for names, reason in _REFUSED_OF_TORCH:
            if names.fullmatch(name):
                return f"{how} {name}: {reason}"
    mixes = origin.partition(".")[0] in _LIBRARIES and not isinstance(called, type) and _MIXING.search(name)
    if origin.startswith(_KERNELS) or (mixes and holder.partition(".")[0] not in _LIBRARIES):
        return f"{how} {origin}.{name}, which knows nothing of ranks; use flexsp.ops"
    return None
