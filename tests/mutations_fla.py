# ruff: noqa: E501 (texts of code are kept whole)
"""Changes of flexsp/integrations/fla that tests/mutate.py makes, most of them where that library is; see
tests/mutations.py."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["FLA"]

_MODELS = "tests/integrations/test_fla.py::test_some_models_equal_the_whole_ones"
_LAYERS = "tests/integrations/test_fla.py::test_some_layers_equal_the_whole_ones"
_FUNCTIONS = "tests/integrations/test_fla_functions.py::"
_CHECKS = "tests/integrations/test_fla_checks.py::"

FLA = [
    *_in(
        "flexsp/integrations/fla/functions.py",
        ("return convolve(x, weight, bias, sequence.cu_seqlens)", "return convolve(x, weight, bias)",
         "convolutions reach into another document", _FUNCTIONS + "test_two_ranks_equal_one[documents]"),
        ("with sequence_parallel(sequence.sp):", "with sequence_parallel(None):", "convolutions begin at the shard",
         _FUNCTIONS + "test_two_ranks_equal_one[one text]"),
        ("positions(q.shape[1], q.device, sequence.cu_seqlens, sequence.sp)", "positions(q.shape[1], q.device, None, None)",
         "positions begin at the shard", _FUNCTIONS + "test_two_ranks_equal_one[one text]"),
        ("window=None if before < 0 else before + 1", "window=None if before < 0 else before", "windows are a token short",
         _FUNCTIONS + "test_they_do_what_they_replace"),
        ("q[:, steps - 1 :: steps]", "q[:, ::steps]", "queries of other steps",
         _FUNCTIONS + "test_they_do_what_they_replace"),
        ("None if g is None else g[:, ::steps]", "None if g is None else g[:, steps - 1 :: steps]", "gates of other steps",
         _FUNCTIONS + "test_they_do_what_they_replace"),
        ("    def __init__(self) -> None:  # not on the class: torch.compile's guards look here, on every thread\n        self.sequence: _Sequence | None = None\n", "    sequence: _Sequence | None = None\n",
         "compiled layers fail on guards of a thread", _CHECKS + "test_layers_are_compiled"),
        ("y = module.norm(y, gate) if module.rmsnorm", "y = module.norm(y) if module.rmsnorm", "Mamba-2 has no gate",
         _FUNCTIONS + "test_mamba"),
        ("True, dt_limit=module.dt_limit,", "True,", "steps have no limits", _LAYERS),
    ),
    *_in(
        "flexsp/integrations/fla/mixers.py",
        ("        \"causal_conv1d\": causal_conv1d,\n", "", "Gated DeltaNet's fused convolution reads one rank's tokens", _MODELS),
    ),
    *_in(
        "flexsp/integrations/fla/parallelized.py",
        ("    del kwargs[KEY]\n    _check_parts(module)\n", "    del kwargs[KEY]\n", "a convolution that came later, in a model",
         _CHECKS + "test_a_mixer_that_came_later"),
        ("        _check_parts(module)\n        with on_ranks", "        with on_ranks", "a convolution that came later",
         _CHECKS + "test_a_mixer_that_came_later"),
        ("on_ranks(sp, shard.cu_seqlens, shard.cu_seqlens_cpu)", "on_ranks(sp, None)", "documents of a batch are forgotten",
         _MODELS),
        ("        with on_ranks(sp, cu_seqlens):", "        with on_ranks(sp, None):", "documents of a layer's call are forgotten",
         _LAYERS),
        ("        if x is not None and x is not False:", "        if x is None:", "a layer takes masks",
         _CHECKS + "test_refused_calls"),
    ),
    *_in(
        "flexsp/nn/norm.py",
        ('check_choice("activation", activation, ("silu", "sigmoid"))', "pass", "norms take any activation",
         "tests/nn/test_gated_layers.py::test_an_activation_that_a_norm_has_not_is_refused"),
    ),
    *_in(
        "flexsp/nn/exactness.py",
        ("    if path in allow or runs_over_ranks(module):\n", "    if path in allow:\n",
         "layers of an integration are refused in a wrapped model",
         _FUNCTIONS + "test_the_wrapper_takes_layers_that_run_over_ranks"),
        ("if len(file.parts) > 1", "if len(file.parts) >= 1", "packages of one file are not known",
         "tests/nn/test_exactness.py::test_packages_of_one_file_are_known"),
    ),
    *_in(
        "flexsp/integrations/fla/check.py",
        ("if getattr(model.config, \"use_l2warp\", False):", "if False:", "another gradient of logits is taken",
         _CHECKS + "test_refused_models_name_everything"),
        ("if \"forward\" in vars(module) and (kind in MIXERS or inside or not name):", "if \"forward\" in vars(module) and not name:",
         "convolutions that are replaced are taken", _CHECKS + "test_refused_models_name_everything"),
        ("*_feature_problems(module)]", "]", "keys that a feature map widens are taken",
         _CHECKS + "test_heads_that_the_operator_refuses"),
        ("        part = inside and (", "        part = (", "a convolution outside of layers is taken",
         _CHECKS + "test_refused_models_name_everything"),
    ),
]
