"""The changes of tests/mutate.py to ops and layers with a gate for each channel."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["GATES"]

_OPS = "tests/test_vector_gates.py::test_against_the_token_loop"
_SIZES = "tests/test_vector_gates.py::test_gates_of_all_sizes"
_LAYERS = "tests/test_gated_layers.py::test_formulas"

GATES = [
    *_in(
        "flexsp/variants/hgrn2.py",
        ("decayed_scores(q, -g.expm1(), b)", "decayed_scores(q, g.exp(), b)", "keys are the gates themselves", _OPS),
    ),
    *_in(
        "flexsp/variants/rwkv6.py",
        ("lower.tril(-1) - lower.tril(-2)", "lower.tril(0) - lower.tril(-1)", "a token reads what it wrote", _OPS),
        ("g.cumsum(0) - g ", "g.cumsum(0) ", "a token reads the state after its own decay", _OPS),
        ("(q * u * k)", "(q * k)", "the bonus has no effect", _OPS),
    ),
    *_in(
        "flexsp/variants/vector_state.py",
        ("g.cumsum(0).exp() * chunk_state", "g.exp() * chunk_state", "what enters a chunk decays by one gate", _OPS),
    ),
    *_in(
        "flexsp/ops/_programs.py",
        (".clamp(min=_MIN_LOG_DECAY[check.accumulation_dtype(like)])", "", "gates are not clamped", _SIZES),
        ("state.transpose(-1, -2).contiguous() if call.state_v_first else state", "state",
         "final states have keys first", "tests/test_vector_gates.py::test_states_with_values_first"),
        ("new if bonus is None else S", "new if bonus is None else new", "decoding reads twice what it wrote",
         "tests/test_vector_gates.py::test_token_by_token"),
        ("S.clone() if S is state else S", "S", "the state of no tokens is the one that was given",
         "tests/test_vector_gates.py::test_no_tokens"),
    ),
    *_in(
        "flexsp/ops/rg_lru.py",
        ("-torch.expm1(2 * g)", "-torch.expm1(g)", "inputs are weighed by another root", _OPS),
        ("torch.where(closed, 1.0, x).sqrt()", "x.sqrt()", "a gate that underflowed has no gradient", _SIZES),
    ),
    *_in(
        "flexsp/nn/recurrent.py",
        ("*self._taps(), cu_seqlens)", "*self._taps())", "convolutions reach across documents",
         "tests/test_gated_layers.py::test_documents_are_separate"),
        ("return y, LayerCache(state, conv_cache)", "return y, LayerCache(state, cache.conv)",
         "a prompt leaves no inputs to the convolutions", "tests/test_gated_layers.py::test_decoding"),
    ),
    *_in(
        "flexsp/nn/gated_layers.py",
        ("x.repeat_interleave(repeats, dim=2)", "x.repeat(1, 1, repeats, 1)", "heads read other groups' keys", _LAYERS),
        ("g = g.clamp(min=self.clamp_min)", "pass", "the least gate has no effect", _LAYERS),
        ("bound.clamp(min=torch.finfo(g.dtype).tiny)", "bound", "a bound of 0 has no gradient",
         "tests/test_gated_layers.py::test_the_least_gate_has_a_gradient"),
        ("(F.silu(_wide(i)) * -g.expm1())", "(_wide(i) * -g.expm1())", "HGRN's inputs are not activated", _LAYERS),
        ('F.silu(q), "v"', 'q, "v"', "HGRN2's queries are not activated", _LAYERS),
        ("heads @ self.input_gate_weight", "heads @ self.recurrent_gate_weight", "both gates have one map", _LAYERS),
        ("-most.log() / 8", "-most.log() / 4", "the initial decays are other ones",
         "tests/test_gated_layers.py::test_initialisation"),
    ),
    *_in(
        "flexsp/compiler/graphs/differentiate.py",
        ("last = len(node.args) - 1  # the matrix", 'last = 0 if kind == "inverse" else -1  # the matrix',
         "running gates are kept in half precision", "tests/test_generated.py::test_batched[rwkv6]"),
    ),
]  # fmt: skip
