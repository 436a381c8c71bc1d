"""What `parallelize` checks before it changes a model: everything that could make it wrong on a cut sequence."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from flexsp.exceptions import NotAvailable, UncoveredWarning, fail
from flexsp.integrations.transformers.causal import CausalModel, Task
from flexsp.integrations.transformers.forwards import is_replaced
from flexsp.integrations.transformers.heads import NONE
from flexsp.integrations.transformers.seams import LOCAL, SEAMS, TASKS, Replaced, Seam
from flexsp.ops._validate import MAX_HEAD_DIM, MAX_VALUE_DIM

__all__ = [
    "came_later", "check_model", "check_release", "class_of", "is_common", "known_model", "loss_problems",
    "mixer_problems", "mixers_later", "not_known", "raise_problems", "replaced_by", "seam_of",
    "task_of", "without_adapters",
]  # fmt: skip

_OLDEST, _NEWEST = (5, 23), (5, 24)  # releases of transformers that the tests have run with
_TORCH_MODULES = (
    nn.Linear, nn.Embedding, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
    nn.Sequential, nn.Dropout, nn.SiLU, nn.GELU, nn.ReLU, nn.Sigmoid, nn.Tanh,
)  # fmt: skip
# Adapters of peft that treat tokens one by one, by their packages in peft.tuners.
_ADAPTERS = (
    "_buffer_dict", "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "oft", "shira", "vera",
)  # fmt: skip
# The modules that torch wraps around a layer to checkpoint or compile it.
_AROUND = {
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
    "torch._dynamo.eval_frame.OptimizedModule",
}
_FOLDERS = {seam.folder: seam for seam in SEAMS.values()}
_HEADS = ("head_k_dim", "head_v_dim", "head_f_dim", "head_i_dim", "head_dim", "ssm_state_size")  # of linear layers
_VALUES = {"head_v_dim", "head_i_dim"}  # of these, sizes of values
_SOFTMAX = {"ALL_ATTENTION_FUNCTIONS", "flash_attn_func"}  # called by softmax layers, whose heads have no limit
_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings whose angles depend on the length of the sequence


def check_model(model: nn.Module) -> None:
    """Checks a model of the families of `SEAMS`.

    Raises:
        ValueError: it cannot be cut over ranks. The message lists all reasons, each with a path.
        NotAvailable: the release of transformers is too old.
    """
    import transformers

    check_release("transformers", transformers.__version__, _OLDEST, _NEWEST)
    raise_problems(model, _problems(model, seam_of(model)))


def raise_problems(model: nn.Module, found: Iterable[tuple[str, str]]) -> None:
    """ValueError with all (path, problem), if there are any."""
    problems = [f"{name or 'the model'}: {problem}" for name, problem in found]
    if problems:
        listed = "\n  ".join(problems)
        fail("model", "one that can be cut over ranks", f"{class_of(model).__name__} with\n  {listed}")


def check_release(library: str, version: str, oldest: tuple[int, int], newest: tuple[int, int]) -> None:
    """Raises NotAvailable for a release older than the tested ones, and warns of a newer one."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (0, 0) if numbers is None else (int(numbers[1]), int(numbers[2]))
    first, last = (".".join(map(str, numbers)) for numbers in (oldest, newest))
    tested = first if first == last else f"{first} to {last}"
    if release < oldest:
        raise NotAvailable(f"{library} {tested} {'is' if first == last else 'are'} needed, this is {version}")
    if release > newest:
        text = f"{library} {version} was not tested, only {tested}: names may have moved"
        warnings.warn(text, UncoveredWarning, stacklevel=4)


def known_model(model: Any) -> Any:
    """The model itself, or the one inside a PeftModel.

    Raises:
        ValueError: something else.
        NotAvailable: a class of models that is not known.
    """
    if not isinstance(model, nn.Module):
        fail("model", "a model of transformers", type(model).__name__)
    inner = without_adapters(model)
    cls = class_of(inner)
    seam = _FOLDERS.get(cls.__module__.rpartition(".modeling_")[2])
    if seam is None or not _is_taken(inner, seam):
        known, whose = ", ".join(sorted(SEAMS)), f" of {cls.__module__}" if cls.__name__ in SEAMS else ""
        raise NotAvailable(
            f"{cls.__name__}{whose} is not among the models that can be cut over ranks: {known}, with their base "
            f"models, and heads of theirs that classify sequences or tokens{_instead(inner)}"
        )
    return inner


def _is_taken(model: Any, seam: Seam) -> bool:
    """Whether it is a family's base model, or a head on one. In Qwen3.5, `Model` takes images too."""
    kind = _kind(model, seam)
    return kind == seam.base or (kind in TASKS and _kind(model.base_model, seam) == seam.base)


def _instead(model: Any) -> str:
    """What of a model that takes more than text can be cut."""
    for name, module in model.named_modules():
        if name and class_of(module).__name__ in SEAMS:
            return f". Its {name} is a {class_of(module).__name__}, which can be cut"
    config = getattr(model, "config", None)
    if config is None or config.get_text_config() is config:
        return ""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if text not in SEAMS:
        return ""
    return (
        f". It takes images too: of the same folder, AutoModelForCausalLM.from_pretrained loads the language model, a "
        f"{text}, which can be cut"
    )


def without_adapters(model: Any) -> Any:
    """The model itself, or the one inside a PeftModel."""
    if not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        fail("model", "one without a learned prompt, which makes sequences longer", type(model).__name__)
    return model.get_base_model()


def class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class, without the subclass that `fully_shard` replaces it by."""
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.distributed"))


def seam_of(model: nn.Module) -> Seam:
    return _FOLDERS[class_of(model).__module__.rpartition(".modeling_")[2]]


def task_of(model: nn.Module) -> Task:
    """What a known model makes of its layers' outputs."""
    return TASKS.get(_kind(model, seam_of(model)), NONE)


def replaced_by(module: nn.Module, seam: Seam) -> Replaced | None:
    """What is replaced in this module, of ``seam.replaced``; None if its forward stays as it is."""
    return seam.replaced.get(_kind(module, seam))


def _convolves(module: nn.Module, seam: Seam) -> bool:
    """Whether a module's convolutions are replaced."""
    found = replaced_by(module, seam)
    return found is not None and (callable(found) or "causal_conv1d_fn" in found)


def _names(module: nn.Module, seam: Seam) -> Iterable[str]:
    found = replaced_by(module, seam)
    return () if found is None or callable(found) else found


def _kind(module: nn.Module, seam: Seam) -> str:
    """The module's class without the model's prefix, or "" if that is not one of the model's own classes."""
    cls = class_of(module)
    home = f"transformers.models.{seam.folder}.modeling_{seam.folder}"
    return cls.__name__.removeprefix(seam.prefix) if cls.__module__ == home else ""


def _is_local(module: nn.Module, seam: Seam) -> bool:
    return is_common(module) or _kind(module, seam) in LOCAL


def is_common(module: nn.Module) -> bool:
    """A module of torch, transformers or peft that treats tokens one by one."""
    if f"{type(module).__module__}.{type(module).__name__}" in _AROUND:
        return True
    cls = class_of(module)
    if cls in _TORCH_MODULES or cls.__module__.startswith("transformers.activations"):
        return True
    if cls.__module__.startswith("peft.tuners."):
        return cls.__module__.split(".")[2] in _ADAPTERS and not _is_activated(module)
    return cls.__module__ == "peft.utils.other" and cls.__name__ == "ModulesToSaveWrapper"


def not_known(module: nn.Module) -> str:
    if _is_activated(module):
        return "activated LoRA looks for its tokens in the whole sequence"
    return f"{class_of(module).__name__} is not known"


def _is_activated(module: nn.Module) -> bool:
    variants = getattr(module, "lora_variant", None)
    return isinstance(variants, dict) and any(type(x).__name__.startswith("ALora") for x in variants.values())


def _problems(model: Any, seam: Seam) -> Iterator[tuple[str, str]]:
    """(path, problem) of all that cannot be cut over ranks."""
    mixers = {name for name, module in model.named_modules() if replaced_by(module, seam) is not None}
    for name, module in model.named_modules():
        if "forward" in vars(module) and (name in mixers or not name):
            yield name, "its forward was replaced already (by parallelize, by a kernel of the hub or by a hook)"
        if name in mixers:
            yield from ((name, problem) for problem in mixer_problems(module, _names(module, seam)))
        rope = getattr(module, "rope_type", None)  # for Lfm3, of each kind of layers
        for kind in rope.values() if isinstance(rope, dict) else (rope,):
            if kind in _BY_LENGTH:
                yield name, f"a rotary embedding of type {kind!r} depends on the length of the sequence"
    yield from _unknown(model, seam)
    if not getattr(model.config, "is_causal", True):
        yield "", "config.is_causal is False"
    yield from loss_problems(model, seam)


def _unknown(model: nn.Module, seam: Seam) -> Iterator[tuple[str, str]]:
    """(path, problem) of modules that are not known to treat tokens one by one."""
    mixers = {name for name, module in model.named_modules() if replaced_by(module, seam) is not None}
    convolved = {name for name in mixers if _convolves(model.get_submodule(name), seam)}
    for name, module in model.named_modules():
        inside = type(module) is nn.Conv1d and name.rpartition(".")[0] in convolved
        if name not in mixers and not inside and not _is_local(module, seam):
            yield name, not_known(module)


def came_later(seam: Seam, mixers: int, model: nn.Module) -> Iterator[str]:
    """What was added to a model after `parallelize` replaced the forwards of ``mixers`` layers. It would run on this
    rank's tokens alone."""
    yield from (f"{name} ({problem}) came" for name, problem in _unknown(model, seam))
    yield from mixers_later(model, mixers, lambda module: replaced_by(module, seam) is not None)


def mixers_later(model: nn.Module, mixers: int, is_mixer: Callable[[nn.Module], bool]) -> Iterator[str]:
    found = {name: is_replaced(module) for name, module in model.named_modules() if is_mixer(module)}
    late = [name for name, replaced in found.items() if not replaced]
    if late:
        yield f"{', '.join(late)} came, or got another forward,"
    elif len(found) < mixers:
        yield f"{mixers - len(found)} of {mixers} mixers were taken out"


def loss_problems(model: Any, causal: CausalModel) -> Iterator[tuple[str, str]]:
    try:
        causal.check_loss(model)
    except ValueError as error:
        yield "", str(error)


def mixer_problems(module: Any, replaced: Iterable[str]) -> Iterator[str]:
    """Why a mixer cannot run over ranks. Its forward should call the ``replaced`` names."""
    names = inspect.unwrap(class_of(module).forward).__code__.co_names
    missing = [name for name in replaced if name not in names]
    if missing:
        yield f"the forward of {class_of(module).__name__} does not call {', '.join(missing)} in this release"
    if not _SOFTMAX & {*replaced}:
        values = _VALUES | ({"head_dim"} if hasattr(module, "ssm_state_size") else set())  # Mamba-2's x has it
        for name in _HEADS:
            most = MAX_VALUE_DIM if name in values else MAX_HEAD_DIM
            if getattr(module, name, 0) > most:
                yield f"{name} is {getattr(module, name)}, and heads of more than {most} are not available"
    if getattr(module, "attention_dropout", 0.0):
        yield f"attention_dropout is {module.attention_dropout}, and dropout of attention weights is not available"
    if not getattr(module, "is_causal", True):
        yield "attention that is not causal"
    if hasattr(module, "_hf_hook") or any(hasattr(child, "_hf_hook") for child in module.children()):
        yield "a hook of accelerate moves its weights"
