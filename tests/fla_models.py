"""Tiny layers and models of flash-linear-attention on CPU: the references of test_fla*.py.

Nothing in it runs on CPU but what is plain PyTorch: its kernels are Triton. So its operators are replaced by its own
references, token by token (``fla.ops.*.naive``), and what treats tokens one by one by PyTorch. `in_pytorch` does that
to the modules of this process, for unmodified and for parallelized models alike. Of these, the operators, convolutions
and rotary embeddings are what `parallelize` replaces.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.transformers_models import VOCABULARY, Found, gradients, precision

Op = Callable[..., tuple[Tensor, None]]

# What PyTorch does ----------------------------------------------------------------------------------------------------


def l2_normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: None, activation: str, eps: float, **options: Any
) -> Tensor:
    assert not any(options.values()), options
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight) * (g.sigmoid() if activation == "sigmoid" else F.silu(g))


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(F.silu(x) * y, weight, bias)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> tuple[Tensor, None]:
    options.pop("backend", None)
    assert not any(x is not None and x is not False for x in options.values()), options
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight))
    return (F.silu(y) if activation else y).transpose(1, 2), None


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int = 0, **options: Any) -> Tensor:
    assert not any(x is not None and x is not False for x in options.values()), options
    at = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
    return import_module("fla.modules.rotary.ops").rotary_embedding_ref(x, cos[at], sin[at])


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Scores of all pairs of tokens; as the kernel does, queries are the last of the keys' tokens."""
    T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    back = torch.arange(S - T, S)[:, None] - torch.arange(S)
    seen = (back >= 0) & (back <= (window_size[0] if window_size[0] >= 0 else S))
    k, v = (x.repeat_interleave(G, dim=2) for x in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhts,bshv->bthv", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


# The operators, by the library's own references -----------------------------------------------------------------------


def _reference(op: str, name: str) -> Callable[..., Any]:
    return getattr(import_module(f"fla.ops.{op}.naive"), name)


def _without_state(run: Callable[..., Tensor]) -> Op:
    """Without the arguments that a cache would need."""

    @functools.wraps(run)
    def op(
        initial_state: None = None, output_final_state: bool | None = False, cu_seqlens: None = None,
        state_v_first: bool = True, **given: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert initial_state is None and not output_final_state and cu_seqlens is None
        return run(**given), None

    return op


@_without_state
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool) -> Tensor:
    if use_qk_l2norm_in_kernel:
        q, k = l2_normed(q), l2_normed(k)
    heads_first = [x.transpose(1, 2) for x in (q, k, v, beta)]
    return _reference("delta_rule", "delta_rule_recurrence")(*heads_first)[0].transpose(1, 2)


@_without_state
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, allow_neg_eigval: bool,
    **flags: bool,
) -> Tensor:  # fmt: skip
    assert len(flags) == 3 and all(flags.values()), flags
    gate = import_module("fla.ops.gated_delta_rule.gate").naive_gdn_gate(g, A_log, dt_bias, output_dtype=g.dtype)
    q, k = (l2_normed(x).repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    return _reference("gated_delta_rule", "naive_recurrent_gated_delta_rule")(q, k, v, beta, gate)[0]


@_without_state
def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, allow_neg_eigval: bool,
    lower_bound: float | None, safe_gate: bool = False, **flags: bool,
) -> Tensor:  # fmt: skip
    assert len(flags) == 3 and all(flags.values()), flags
    gates, options = import_module("fla.ops.kda.gate"), {"output_dtype": g.dtype}
    if lower_bound is None:
        gate = gates.naive_kda_gate(g, A_log, dt_bias, **options)
    else:
        gate = gates.naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound, **options)
    beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    return _reference("kda", "naive_recurrent_kda")(l2_normed(q), l2_normed(k), v, gate, beta)[0]


@_without_state
def gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, use_qk_l2norm_in_kernel: bool
) -> Tensor:  # fmt: skip
    assert use_qk_l2norm_in_kernel
    return _reference("gdn2", "naive_recurrent_gdn2")(l2_normed(q), l2_normed(k), v, g, b, w)[0]


@_without_state
def gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int, use_qk_l2norm_in_kernel: bool
) -> Tensor:
    assert use_qk_l2norm_in_kernel
    run, scale = _reference("gated_delta_product", "naive_recurrent_gated_delta_product"), q.shape[-1] ** -0.5
    return run(l2_normed(q), l2_normed(k), v, g, beta, scale, num_householder=num_householder)[0]


@_without_state
def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _reference("retention", "naive_retention")(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@_without_state
def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return _reference("simple_gla", "naive_recurrent_simple_gla")(q, k, v, g)[0]


@_without_state
def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None) -> Tensor:
    return _reference("gla", "naive_recurrent_gla")(q, k, v, gk if g is None else g)[0]


@_without_state
def linear_attn(q: Tensor, k: Tensor, v: Tensor, normalize: bool) -> Tensor:
    return _reference("linear_attn", "naive_recurrent_linear_attn")(q, k, v, normalize=normalize)[0]


_OPERATORS: dict[str, dict[str, Op]] = {
    "delta_net": {"chunk_delta_rule": delta_rule, "fused_recurrent_delta_rule": delta_rule},
    "gated_deltanet": dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), gated_delta_rule),
    "kda": {"chunk_kda": kda, "fused_recurrent_kda": kda},
    "gdn2": {"chunk_gdn2": gdn2, "fused_recurrent_gdn2": gdn2},
    "gated_deltaproduct": {"chunk_gated_delta_product": gated_delta_product},
    "multiscale_retention": {"chunk_retention": retention, "fused_recurrent_retention": retention},
    "simple_gla": {"chunk_simple_gla": simple_gla, "fused_recurrent_simple_gla": simple_gla},
    **dict.fromkeys(("gla", "hgrn2"), {"chunk_gla": gla, "fused_recurrent_gla": gla}),
    "linear_attn": {"chunk_linear_attn": linear_attn, "fused_recurrent_linear_attn": linear_attn},
}


def rms_norm_linear(x: Tensor, weight: Tensor, bias: None, linear: Tensor, linear_bias: Tensor | None) -> Tensor:
    assert bias is None
    return F.linear(F.rms_norm(x, x.shape[-1:], weight, 1e-5), linear, linear_bias)


@functools.cache
def in_pytorch() -> Any:
    """The library, with operators and modules that run on CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fla.layers
        import fla.models

    for file, operators in _OPERATORS.items():
        vars(import_module(f"fla.layers.{file}")).update(operators)
    layer_norm = import_module("fla.modules.norm.layernorm")
    layer_norm.rms_norm = lambda residual_in_fp32, **given: layer_norm.rms_norm_ref(**given)
    import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated = rms_norm_gated
    gated = import_module("fla.modules.norm.layernorm_gated")
    gated.rmsnorm_fn = gated.rms_norm_ref
    mlp = import_module("fla.modules.mlp")
    mlp.swiglu_linear, mlp.swiglu = swiglu_linear, lambda x, y: F.silu(x) * y
    for file in ("modules.causal_conv1d.ops", "layers.gated_deltanet"):
        import_module(f"fla.{file}").causal_conv1d = causal_conv1d
    import_module("fla.modules.rotary.ops").rotary_embedding = rotary_embedding
    import_module("fla.modules.activations.ops").ACT2FN.update(silu=F.silu, swish=F.silu)
    import_module("fla.layers.attn").flash_attn_func = flash_attention
    hgrn2 = import_module("fla.layers.hgrn2")
    hgrn2.swish, hgrn2.rms_norm_linear = F.silu, rms_norm_linear
    for file in ("delta_net", "linear_attn"):
        import_module(f"fla.layers.{file}").elu_p1 = lambda x: F.elu(x) + 1
    naive = import_module("fla.ops.attnres.naive").naive_attnres
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.models.") and hasattr(module, "fused_attnres"):
            module.fused_attnres = naive
    return fla


# Layers and models ----------------------------------------------------------------------------------------------------

D = 24
_HEADS: dict[str, Any] = {"num_heads": 2, "num_v_heads": 4, "head_dim": 6}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("DeltaNet", {"num_heads": 3}),
    "delta, elu": (
        "DeltaNet",
        {"num_heads": 2, "use_gate": True, "qk_activation": "elu", "qk_norm": "sum", "allow_neg_eigval": True,
         "conv_bias": True, "conv_size": 3},
    ),
    "delta, bare": ("DeltaNet", {"num_heads": 2, "use_beta": False, "use_short_conv": False}),
    "gated": ("GatedDeltaNet", _HEADS),
    "gated, sigmoid": (
        "GatedDeltaNet", {**_HEADS, "allow_neg_eigval": True, "conv_bias": True, "output_gate_activation": "sigmoid"},
    ),
    "gated, bare": ("GatedDeltaNet", {**_HEADS, "use_gate": False, "use_short_conv": False}),
    "kda": ("KimiDeltaAttention", _HEADS),
    "kda, bounded": (
        "KimiDeltaAttention",
        {**_HEADS, "safe_gate": True, "lower_bound": -4.0, "allow_neg_eigval": True, "conv_bias": True},
    ),
    "gdn2": ("GatedDeltaNet2", _HEADS),
    "gdn2, negative": ("GatedDeltaNet2", {**_HEADS, "expand_v": 1.5, "allow_neg_eigval": True, "conv_bias": True}),
    "product": ("GatedDeltaProduct", _HEADS),
    "product, ungated": (
        "GatedDeltaProduct", {**_HEADS, "use_forget_gate": False, "num_householder": 3, "use_output_gate": False},
    ),
    "mamba": ("Mamba2", {"head_dim": 8, "state_size": 10}),
    "mamba, other": (
        "Mamba2",
        {"head_dim": 8, "state_size": 10, "rmsnorm": False, "D_has_hdim": True, "use_bias": True,
         "dt_limit": (0.02, 0.5), "chunk_size": 16},
    ),
    "mamba, wide": ("Mamba2", {"head_dim": 264, "expand": 22, "num_heads": 2, "state_size": 10}),
    "gated, wide": ("GatedDeltaNet", {**_HEADS, "num_v_heads": 2, "expand_v": 45}),
    "retention": ("MultiScaleRetention", {"num_heads": 2}),
    "retention, wide": ("MultiScaleRetention", {"num_heads": 2, "expand_v": 22.5}),
    "retention, convolved": (
        "MultiScaleRetention",
        {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1.0, "expand_v": 1.0, "use_short_conv": True,
         "fuse_norm": False, "feature_map": "relu"},
    ),
    "simple gla": ("simple_gla.SimpleGatedLinearAttention", {"num_heads": 2}),
    "gla": ("GatedLinearAttention", {"num_heads": 2}),
    "gla, convolved": (
        "GatedLinearAttention",
        {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1.0, "use_short_conv": True, "conv_bias": True,
         "feature_map": "relu", "clamp_min": -0.2, "fuse_norm": False},
    ),
    "hgrn2": ("HGRN2Attention", {"expand_ratio": 4}),
    "hgrn2, convolved": ("HGRN2Attention", {"expand_ratio": 6, "use_short_conv": True}),
    "linear attention": ("LinearAttention", {"num_heads": 2}),
    "linear attention, normalised": (
        "LinearAttention", {"num_heads": 4, "num_kv_heads": 2, "feature_map": "elu", "do_feature_map_norm": True},
    ),
    "softmax": ("Attention", {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True}),
    "softmax, window": ("Attention", {"num_heads": 6, "window_size": 5, "qkv_bias": True}),
}  # fmt: skip

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": D, "intermediate_size": 20, "num_hidden_layers": 2,
    "initializer_range": 0.2, "fuse_cross_entropy": False, "pad_token_id": None, "use_cache": False,
}  # fmt: skip
_SOFTMAX = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "DeltaNet": {**_SIZES, "num_heads": 3, "attn": {**_SOFTMAX, "window_size": 4}},
    "GatedDeltaNet": {**_SIZES, **_HEADS, "attn": _SOFTMAX, "num_hidden_layers": 3},
    "KDA": {**_SIZES, **_HEADS, "tie_word_embeddings": True},
    "GatedDeltaProduct": {**_SIZES, **_HEADS, "num_householder": 2, "use_forget_gate": True, "fuse_norm": False},
    "Mamba2": {**_SIZES, "head_dim": 8, "state_size": 10, "chunk_size": 16},
    "GLA": {**_SIZES, "num_heads": 2, "attn": _SOFTMAX},
    "HGRN2": {**_SIZES, "expand_ratio": 6, "use_lower_bound": True},
    "RetNet": {**_SIZES, "num_heads": 2, "attn": _SOFTMAX, "fuse_swiglu": False},
    "Transformer": {**_SIZES, "num_heads": 4, "qk_norm": True},
}


def make_layer(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """With the same random parameters everywhere."""
    kind, options = LAYERS[name]
    options = {"hidden_size": D, **options, **changes}
    home, _, cls = kind.rpartition(".")
    in_pytorch()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(sum(map(ord, name)))
        layer = getattr(import_module(f"fla.layers.{home}" if home else "fla.layers"), cls)(**options)
        return _with_noise(layer).to(dtype)


def make(name: str, **changes: Any) -> Any:
    """The model in float32 and in training mode, with the same random parameters everywhere."""
    models = in_pytorch().models
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        config = getattr(models, f"{name}Config")(**{**MODELS[name], **changes})
        return _with_noise(getattr(models, f"{name}ForCausalLM")(config))


def _with_noise(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.train()


def run_layer(layer: Any, x: Tensor, dy: Tensor, **call: Any) -> Found:
    """Output, and the gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    with precision(x.dtype):
        y = layer(x, **call)[0]
        y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **gradients(layer)}
