"""The changes of tests/mutate.py to mLSTM."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["MEMORY"]

_OPS = "tests/test_mlstm.py::test_against_the_token_loop"
_EPS = "tests/test_mlstm.py::test_scale_and_eps"
_DOCUMENTS = "tests/test_mlstm.py::test_documents_and_strides"
_EXTREME = "tests/test_mlstm.py::test_nothing_written_or_kept"
_FINITE = "tests/test_mlstm.py::test_what_is_not_finite_stays_in_its_document"
_RANKS = "tests/test_mlstm.py::test_ranks_equal_one_rank"
_FORMULA = "tests/test_mlstm.py::test_the_layer_is_its_formula"

MEMORY = [
    *_in(
        "flexsp/ops/mlstm.py",
        ("(i - m.transpose(1, 2)).exp()", "i.exp()", "what is written is not stabilised", _OPS),
        ("log_f + (before - m).transpose(1, 2)", "log_f", "states are not rescaled when the maximum changes", _OPS),
        ("floor = torch.exp(-m)", "floor = torch.exp(0 * m)", "the denominator is at least another number", _OPS),
        ("denominator.abs()", "denominator", "a negative denominator is cut off", _OPS),
        ("least) + eps)", "least + eps))", "the constant is added to the least denominator alone", _EPS),
        ("torch.where(cut, own, along[..., :-1])", "along[..., :-1]", "documents begin with the maximum before them",
         _DOCUMENTS),
        ("torch.where(self.empty.unsqueeze(-1), begun, found)", "found", "empty documents end with another maximum",
         _DOCUMENTS),
        ("torch.where(cut, torch.maximum(c, a + own), c)", "c", "documents do not begin with their maximum",
         _DOCUMENTS),
        ("c * one[..., None, None], n * one", "c, n * one", "the first maximum has a part of its gradient", _OPS),
        (".clamp(min=_MIN_LOG_FORGET)", "", "forget gates of -inf make NaN", _EXTREME),
        (".clamp(min=_LEAST_MAXIMUM)", "", "a first maximum of -inf makes NaN", _EXTREME),
        ("floor.clamp(min=torch.finfo(floor.dtype).tiny)", "floor", "0 / 0 where e^-m underflows", _EXTREME),
        ("return C * rest[..., None, None], n * rest", "return C, n * rest", "C is not for the m that is returned",
         "tests/test_mlstm.py::test_a_large_maximum"),
        (".masked_fill(~self.here.unsqueeze(-1), 0.0)", "", "every rank returns the maximum of every document", _RANKS),
        ("(end > start) & (end <= stop)", "end <= stop", "documents end on ranks after theirs too", _RANKS),
    ),
    *_in(
        "flexsp/scan/max_plus.py",
        ("maximum(later.c, later.passing(self.c))", "maximum(later.c, self.c)", "maxima do not decay", _OPS),
        ("passed.masked_fill(self.cut, -torch.inf)", "passed", "maxima reach across documents", _FINITE),
        ("else self.cut | later.cut", "else later.cut", "cuts are forgotten",
         "tests/test_mlstm.py::test_the_stabiliser_is_right_over_long_sequences"),
        ("c = torch.maximum(c, all_tokens.passing(start))", "pass", "the first rank forgets what enters it", _RANKS),
        ("[..., sp.rank - 1]", "[..., 0]", "ranks start from the first one's maximum", _RANKS),
    ),
    *_in(
        "flexsp/nn/mlstm.py",
        ("cap * torch.tanh(wide / cap)", "torch.tanh(wide / cap)", "gates are capped at 1", _FORMULA),
        ("F.silu(mixed) if self.use_short_conv else mixed", "mixed", "convolutions have no activation", _FORMULA),
        ("sigmoid() * self.multihead_norm(o)", "sigmoid() * _wide(o).flatten(-2)", "heads are not normed", _FORMULA),
        ('"f": f, "eps": self.eps', '"f": f, "eps": 0.0', "the constant has no effect", _FORMULA),
    ),
]  # fmt: skip
