"""What SequenceParallelLA refuses of other libraries: by where classes are defined, whatever stands inside them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flexsp.comm.group import SequenceParallel
from flexsp.nn import SequenceParallelLA, ShortConvolution, SimpleGLA, exactness

MAMBA2 = "transformers.models.mamba2.modeling_mamba2"
QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"


def library_class(name: str, module: str, forward: Any = None, bases: tuple[type, ...] = (nn.Module,)) -> type:
    """A class as another library defines it."""
    members = {"__module__": module, "__qualname__": name}
    return type(name, bases, members if forward is None else {**members, "forward": forward})


def own_scan(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.conv1d(x).cumsum(1)


def plain_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def token_mixing_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x.transpose(1, 2)).transpose(1, 2)


def mixer(name: str = "Mamba2Mixer", module: str = MAMBA2, conv: nn.Module | None = None) -> nn.Module:
    made = library_class(name, module, own_scan)()
    made.conv1d = nn.Conv1d(8, 8, 4) if conv is None else conv
    return made


def refused(layer: nn.Module, **options: Any) -> str:
    with pytest.raises(ValueError, match="^layer: expected modules that are exact over ranks") as caught:
        SequenceParallelLA(layer, SequenceParallel(), **options)
    assert not any(isinstance(module, SequenceParallelLA) for module in layer.modules())
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "way"),
    [
        ("Mamba2Mixer", MAMBA2, "flexsp.nn.Mamba2 is that layer"),
        ("Qwen3NextGatedDeltaNet", QWEN, "flexsp.grammar.FlexLinearAttention"),
        ("GatedDeltaNet", "fla.layers.gated_deltanet", "flexsp.nn has that layer under the same name"),
        ("GatedLinearAttention", "fla.layers.gla", "flexsp.nn has that layer under the same name"),
        ("HGRN2Attention", "fla.layers.hgrn2", "flexsp.nn has that layer as HGRN or HGRN2"),
        ("HGRN2Attention", "fla.layers.hgrn2", "or flexsp.integrations.fla.parallelize first"),
        ("RecurrentGemmaRecurrentBlock", "transformers.models.recurrent_gemma.modeling_recurrent_gemma", "nn.RGLRU"),
        ("RWKV6Attention", "fla.layers.rwkv6", "flexsp.grammar.FlexLinearAttention"),
        ("ShortConvolution", "fla.modules.convolution", "use flexsp.nn.ShortConvolution"),
        ("Mamba2", "mamba_ssm.modules.mamba2", "flexsp.nn.Mamba2 is that layer"),
        ("RWKV7Attention", "fla.layers.rwkv7", "flexsp.nn.RWKV7 is that layer"),
        ("Mamba3", "mamba_ssm.modules.mamba3", "flexsp.nn.Mamba3 is that layer"),
        ("FalconMambaMixer", "transformers.models.falcon_mamba.modeling_falcon_mamba", "flexsp.ops.selective_scan"),
        ("JambaMambaMixer", "transformers.models.jamba.modeling_jamba", "flexsp.ops.selective_scan"),
        ("Mamba", "mamba_ssm.modules.mamba_simple", "flexsp.nn.Mamba is that layer"),
        ("mLSTMLayer", "xlstm.xlstm_large.model", "flexsp.nn.MLSTM is that layer"),
        ("LlamaAttention", "transformers.models.llama.modeling_llama", "between sp.gather and sp.shard"),
        ("LlamaRotaryEmbedding", "transformers.models.llama.modeling_llama", "from global positions"),
        ("LlamaDecoderLayer", "transformers.models.llama.modeling_llama", "into a module of your own"),
        ("Something", "transformers_modules.someone.modeling", "put a layer of flexsp.nn"),
    ],
)
def test_another_library_is_refused_whatever_stands_inside(name: str, module: str, way: str) -> None:
    """With its convolution exchanged, as an earlier refusal of only the convolution advised, or allowed."""
    for conv in (None, ShortConvolution(8)):
        text = refused(nn.Sequential(nn.Linear(8, 8), mixer(name, module, conv)))
        assert f"{name} at '1': a class of {module.partition('.')[0]}" in text and way in text
        assert "at '1.conv1d'" not in text, "exchanging the convolution would not help"
        assert "flexsp.verify(layer, sp, x)" in text and "silently wrong on every rank but the first" in text
    assert name in refused(mixer(name, module), allow=["conv1d"])
    SequenceParallelLA(nn.Sequential(mixer(name, module)), SequenceParallel(), allow=["0"])
    SequenceParallelLA(mixer(name, module), SequenceParallel(), allow=[""])


def test_all_offenders_are_named_at_once() -> None:
    block = library_class("Mamba2Block", MAMBA2, plain_mlp)
    model = nn.Sequential(*(block() for _ in range(3)), nn.Conv1d(4, 4, 2), nn.LSTM(4, 4), nn.Linear(4, 4))
    for part in model[:3]:
        part.mixer = mixer()
    text = refused(model)
    assert "got 8 that are not" in text
    for where in ("Mamba2Block at '0' and 2 more, to '2'", "Mamba2Mixer at '0.mixer' and 2 more, to '2.mixer'",
                  "Conv1d at '3'", "LSTM at '4'"):  # fmt: skip
        assert where in text
    assert "LSTM at '4'" in refused(model, allow=["0", "1", "2", "3"]) and "Conv1d" not in refused(model, allow=["3"])


@pytest.mark.parametrize(
    ("name", "module", "forward"),
    [
        ("LlamaMLP", "transformers.models.llama.modeling_llama", plain_mlp),
        ("Qwen3NextRMSNormGated", QWEN, token_mixing_mlp),
        ("LlamaRMSNorm", "transformers.models.llama.modeling_llama", plain_mlp),
        ("SiLUActivation", "transformers.activations", plain_mlp),
        ("GatedMLP", "fla.modules.mlp", plain_mlp),
        ("RMSNorm", "mamba_ssm.ops.triton.layer_norm", token_mixing_mlp),
        ("ModuleListOfTheirs", "transformers.utils", None),
    ],
)
def test_what_is_known_to_be_tokenwise_is_accepted(name: str, module: str, forward: Any) -> None:
    cls = library_class(name, module, forward)
    SequenceParallelLA(nn.Sequential(cls(), SimpleGLA(32, 1)), SequenceParallel())
    layer = nn.Sequential(cls())
    layer[0].conv = nn.Conv1d(4, 4, 2)
    assert "Conv1d at '0.conv'" in refused(layer)


def test_a_tokenwise_name_is_not_enough() -> None:
    where = "transformers.models.groupvit.modeling_groupvit"
    for name, forward in (("GroupViTMLP", token_mixing_mlp), ("GroupViTMixerMLP", plain_mlp)):
        assert name in refused(library_class(name, where, forward)())


def test_users_classes() -> None:
    """Containers are accepted; a class that runs another library's forward is that library's."""
    theirs = library_class("Mamba2Mixer", MAMBA2, own_scan)
    theirs.torch_forward = own_scan
    sp = SequenceParallel()

    class Container(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = SimpleGLA(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mix(x)

    class Inherits(theirs):  # type: ignore[misc,valid-type]
        pass

    class Calls(theirs):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class CallsAnother(theirs):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.torch_forward(x)

    class Replaces(theirs):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    for cls in (Inherits, Calls, CallsAnother):
        text = refused(nn.Sequential(cls()))
        assert f"{cls.__name__} at '0': its forward is that of Mamba2Mixer, of transformers" in text
    SequenceParallelLA(nn.Sequential(Container(), Replaces(), Linear(2, 2)), sp)


def torch_chunk_gated_delta_rule(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)


torch_chunk_gated_delta_rule.__module__ = QWEN


class CallsTheirs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(torch_chunk_gated_delta_rule(x))


def test_functions_of_other_libraries() -> None:
    assert f"its code calls {QWEN}.torch_chunk_gated_delta_rule" in refused(CallsTheirs())


LAYER = "from torch import nn\nclass Layer(nn.Module):\n    def forward(self, x):\n        return x\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on the path, with what an installer leaves beside it."""
    package, info = tmp_path / "flexsp_test_package", tmp_path / "flexsp_test_package-1.0.dist-info"
    for folder in (package, info):
        folder.mkdir()
    (package / "__init__.py").write_text(LAYER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flexsp-test-package\nVersion: 1.0\n")
    (info / "RECORD").write_text("flexsp_test_package/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    exactness._installed.cache_clear()
    exactness._distributions.cache_clear()
    yield info
    sys.modules.pop("flexsp_test_package", None)
    exactness._installed.cache_clear()
    exactness._distributions.cache_clear()


@pytest.mark.parametrize(
    ("files", "foreign"),
    [
        ({"INSTALLER": "pip"}, True),
        ({"INSTALLER": "uv", "direct_url.json": '{"url": "https://github.com/a/b", "vcs_info": {"vcs": "git"}}'}, True),
        ({"INSTALLER": "conda", "direct_url.json": '{"url": "file:///home/conda/work", "dir_info": {}}'}, True),
        ({"INSTALLER": "pip", "direct_url.json": '{"url": "file:///home/me/mine", "dir_info": {}}'}, False),
        ({}, False),
    ],
    ids=["index", "repository", "conda", "own folder", "checkout"],
)
def test_a_library_is_known_by_how_it_was_installed(installed: Path, files: dict[str, str], foreign: bool) -> None:
    for name, text in files.items():
        (installed / name).write_text(text)
    layer = importlib.import_module("flexsp_test_package").Layer()
    if foreign:
        assert "Layer at '(the layer itself)': a class of flexsp_test_package" in refused(layer)
    else:
        SequenceParallelLA(layer, SequenceParallel())


class Base(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def plainly_decorated(function: Any) -> Any:
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def imports_module(self: Any, x: torch.Tensor) -> torch.Tensor:
    import torch.nn.functional as G

    return G.scaled_dot_product_attention(x, x, x)


def imports_dotted(self: Any, x: torch.Tensor) -> torch.Tensor:
    import torch.nn.functional

    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def imports_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import relu
    from torch.nn.functional import scaled_dot_product_attention as a

    return relu([a(y, y, y) for y in (x,)][0])


def imports_in_a_closure(self: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional as G

    def inner(y: torch.Tensor) -> torch.Tensor:
        return G.scaled_dot_product_attention(y, y, y)

    return inner(x)


class Helper:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return attend(self, x)


PARTIAL, HELPER = functools.partial(F.scaled_dot_product_attention, is_causal=True), Helper()
REGISTRY = {"softmax": [F.scaled_dot_product_attention]}
ATTENTION: dict[str, dict[str, Any]] = {
    "no_grad": {"forward": torch.no_grad()(attend)},
    "autocast": {"forward": torch.autocast("cpu", dtype=torch.bfloat16)(attend)},
    "compile": {"forward": torch.compile(attend)},
    "disable": {"forward": torch.compiler.disable(attend)},
    "decorated": {"forward": plainly_decorated(attend)},
    "cached": {"forward": functools.cache(attend)},
    "import": {"forward": imports_module},
    "dotted import": {"forward": imports_dotted},
    "from import": {"forward": imports_function},
    "closure import": {"forward": imports_in_a_closure},
    "partial": {"forward": lambda self, x: PARTIAL(x, x, x)},
    "helper": {"forward": lambda self, x: HELPER(x)},
    "registry": {"forward": lambda self, x: REGISTRY["softmax"][0](x, x, x)},
    "static method": {"attend": staticmethod(lambda x: attend(None, x)), "forward": lambda self, x: self.attend(x)},
    "class method": {"attend": classmethod(attend), "forward": lambda self, x: self.attend(x)},
    "property": {"attend": property(lambda self: F.scaled_dot_product_attention),
                 "forward": lambda self, x: self.attend(x, x, x)},
    "cached property": {"attend": functools.cached_property(lambda self: F.scaled_dot_product_attention),
                        "forward": lambda self, x: self.attend(x, x, x)},
    "class attribute": {"attend": staticmethod(F.scaled_dot_product_attention),
                        "forward": lambda self, x: self.attend(x, x, x)},
    "by string": {"attend": attend, "forward": lambda self, x: getattr(self, "att" + "end")(x)},
}  # fmt: skip


def of_user(members: dict[str, Any], **attributes: Any) -> nn.Module:
    return type("Users", (Base,), {"__module__": __name__, **members})(**attributes)


@pytest.mark.parametrize("how", ATTENTION)
def test_attention_is_seen_behind(how: str) -> None:
    assert "its code calls scaled_dot_product_attention" in refused(nn.Sequential(of_user(ATTENTION[how])))


def test_what_instances_hold_is_seen() -> None:
    for held in (PARTIAL, HELPER, {"a": [attend]}, F.scaled_dot_product_attention, torch.compile(attend)):
        assert "its attribute 'held' calls scaled_dot_product_attention" in refused(Base(held=held))
    for held in ([nn.Conv1d(4, 4, 3)], {"a": (nn.Conv1d(4, 4, 3),)}, [nn.Sequential(nn.Conv1d(4, 4, 3))]):
        assert "its attribute 'held' holds a Conv1d that is not registered as a submodule" in refused(Base(held=held))
    hooked = Base()
    hooked.linear.register_forward_hook(lambda module, args, y: attend(None, y))
    assert "Linear at 'linear': its attribute '_forward_hooks' calls scaled_dot_" in refused(hooked)
    fine = Base(held=[nn.Linear(4, 4), SimpleGLA(32, 1)], size=3, names={"a": [1, 2]}, f=F.silu)
    fine.parents = [fine]
    SequenceParallelLA(fine, SequenceParallel())
    shared = Base()
    shared.conv = nn.Conv1d(4, 4, 3)
    shared.again = [shared.conv]
    SequenceParallelLA(shared, SequenceParallel(), allow=["conv"])


@pytest.mark.parametrize(
    "function",
    ["conv1d", "conv2d", "conv_transpose1d", "conv_tbc", "batch_norm", "instance_norm", "group_norm", "avg_pool1d",
     "max_pool1d", "adaptive_avg_pool1d", "lp_pool1d", "interpolate", "unfold", "fold", "pad", "embedding_bag",
     "pixel_unshuffle", "channel_shuffle", "local_response_norm", "grid_sample", "ctc_loss"],
)  # fmt: skip
def test_functions_of_torch(function: str) -> None:
    called = getattr(F, function)
    assert f"its code calls {function}: " in refused(of_user({"forward": lambda self, x: called(x)}))


@pytest.mark.parametrize(
    "module",
    [nn.GroupNorm(1, 4), nn.LayerNorm((8, 4)), nn.RMSNorm((8, 4)), nn.Softmax(dim=1), nn.LogSoftmax(1), nn.GLU(1),
     nn.CosineSimilarity(), nn.EmbeddingBag(5, 4), nn.PixelUnshuffle(2), nn.ChannelShuffle(2),
     nn.Conv1d(4, 4, 1, padding=1), nn.LocalResponseNorm(2), nn.CrossEntropyLoss(), nn.KLDivLoss(reduction="batchmean"),
     nn.CTCLoss(), type("Pool", (nn.AvgPool1d,), {"__module__": __name__})(2),
     type("Conv", (nn.Conv1d,), {"__module__": __name__, "forward": attend})(4, 4, 1)],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_of_torch(module: nn.Module) -> None:
    assert f"{type(module).__name__} at '0': " in refused(nn.Sequential(module))


def test_what_is_exact_is_accepted() -> None:
    modules = [nn.Softmax(-1), nn.LayerNorm(4), nn.RMSNorm(4), nn.GLU(), nn.Conv1d(4, 4, 1, padding="same"),
               nn.CrossEntropyLoss(reduction="none"), nn.MSELoss(reduction="sum"), nn.Embedding(3, 4)]  # fmt: skip
    unused, again = (of_user({"reference": attend, "compare": lambda self, x: x}) for _ in range(2))
    used = of_user({"reference": attend, "compare": lambda self, x: self.reference(x)})
    SequenceParallelLA(nn.Sequential(*modules, unused), SequenceParallel())
    assert "scaled_dot_product_attention" in refused(used), "another method names it"
    caller = of_user({"forward": lambda self, x: self.inner[0].reference(x)}, inner=[again])
    assert "scaled_dot_product_attention" in refused(nn.Sequential(again, caller)), "another module names it"


def test_packages_of_one_file_are_known() -> None:
    """typing_extensions, which torch needs, has no folder."""
    (name,) = exactness._distributions()["typing_extensions"]
    assert name.replace("-", "_") == "typing_extensions"
