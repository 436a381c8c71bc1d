"""The changes of tests/mutate.py to mLSTM, to the selective scan, and to how much of a long sequence is kept."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["MEMORY"]

_OPS = "tests/ops/test_mlstm.py::test_against_the_token_loop"
_EPS = "tests/ops/test_mlstm.py::test_scale_and_eps"
_ROUNDED = "tests/ops/test_mlstm.py::test_nothing_is_rounded_before_the_quotient"
_DOCUMENTS = "tests/ops/test_mlstm.py::test_documents_and_strides"
_EXTREME = "tests/ops/test_mlstm.py::test_nothing_written_or_kept"
_FINITE = "tests/ops/test_mlstm.py::test_what_is_not_finite_stays_in_its_document"
_RANKS = "tests/ops/test_mlstm.py::test_ranks_equal_one_rank"
_IN_KERNELS = "tests/kernels/test_mlstm_kernels.py::"
_ENTERING = _IN_KERNELS + "test_what_enters_ranks_is_exact[posix]"
_GATES = _IN_KERNELS + "test_gates"
_ROWS = _IN_KERNELS + "test_rows"
_RANKS_IN_KERNELS = _IN_KERNELS + "test_ranks[None]"
_STAYS = _IN_KERNELS + "test_what_is_not_finite_stays_in_its_document"
_BLOCKS = _IN_KERNELS + "test_gates_of_more_blocks_than_are_put_together_at_once"
_SCAN = "tests/kernels/test_selective_scan.py::"
_VECTOR = "tests/kernels/test_vector_state.py::test_kernels"
_STEPS = _SCAN + "test_against_the_token_loop"
_WALKS = _SCAN + "test_kernels[plain]"
_MAMBA = _SCAN + "test_the_layer_is_its_formula"
_FORMULA = "tests/ops/test_mlstm.py::test_the_layer_is_its_formula"
_ONE_CHANNEL = "tests/ops/test_ssd.py::test_few_channels[one channel]"
_DENOMINATORS = "tests/kernels/test_mlstm_kernels.py::test_denominators_are_exact[False]"

MEMORY = [
    *_in(
        "flexsp/kernels/delta/hopper_plan.py",
        ('counts={"before": part.chunks_before}, BK', 'counts={"before": 0}, BK',
         "gradients of all parts of a backward pass are of the first one's chunks",
         "tests/kernels/test_hopper_delta.py::test_against_the_token_loop[parts, packed]"),
    ),
    *_in(
        "flexsp/kernels/delta/tiling.py",
        ("-(-V // cols)), at_once) if cut", "-(-V // cols)), 1) if cut", "few segments fill no GPU",
         "tests/compiler/test_plans_cover.py::test_segments_of_the_delta_engine_run_in_few_turns"),
    ),
    *_in(
        "flexsp/ops/mlstm.py",
        ("gates.log_forget, gates.log_weight, scale", "gates.log_forget, None, scale",
         "the numerator has no write gates", _OPS),
        ("torch.where(self.empty.unsqueeze(-1), begun, found)", "found", "empty documents end with another maximum",
         _DOCUMENTS),
        ("c * one[..., None, None], n * one", "c, n * one", "the first maximum has a part of its gradient", _OPS),
        ("torch.float32 if q.dtype == torch.float16 else q.dtype", "q.dtype", "sums over tokens overflow in float16",
         "tests/ops/test_mlstm.py::test_float16_holds_sums_over_many_tokens"),
        ("m.nextafter(m.new_tensor(torch.inf))", "m", "states that are forgotten are NaN",
         "tests/ops/test_mlstm.py::test_states_that_are_forgotten_are_finite"),
        (".clamp(min=_LEAST_MAXIMUM)", "", "a first maximum of -inf makes NaN", _EXTREME),
        ("return C * rest[..., None, None], n * rest", "return C, n * rest", "C is not for the m that is returned",
         "tests/ops/test_mlstm.py::test_a_large_maximum"),
        (".masked_fill(~self.here.unsqueeze(-1), 0.0)", "", "every rank returns the maximum of every document", _RANKS),
        ("(end > start) & (end <= stop)", "end <= stop", "documents end on ranks after theirs too", _RANKS),
    ),
    *_in(
        "flexsp/kernels/mlstm/in_pytorch.py",
        ("log_f + (before - m), ", "log_f, ", "states are not rescaled when the maximum changes", _OPS),
        ("i.double() - m\n", "i.double()\n", "what is written is not stabilised", _OPS),
        ("write.exp().to(dtype)", "write.to(torch.bfloat16).exp().to(dtype)", "the weights of keys are rounded",
         "tests/ops/test_mlstm.py::test_weights_of_keys_are_not_rounded"),
        ("write.to(dtype), write.exp()", "write.to(torch.bfloat16).to(dtype), write.exp()", "write gates are rounded",
         "tests/ops/test_mlstm.py::test_weights_of_keys_are_not_rounded"),
        ("torch.exp(-m).to(wide)", "torch.exp(0 * m).to(wide)", "the denominator is at least another number", _OPS),
        ("denominator.to(wide).abs()", "denominator.to(wide)", "a negative denominator is cut off", _OPS),
        ("least) + eps)).to", "least + eps))).to", "the constant is added to the least denominator alone", _EPS),
        (".clamp(min=MIN_LOG_FORGET)", "", "forget gates of -inf make NaN", _EXTREME),
        (".clamp(min=torch.finfo(wide).tiny)", "", "0 / 0 where e^-m underflows", _EXTREME),
        ("(numerator.dtype, torch.float32)", "(numerator.dtype, torch.bfloat16)",
         "normalisers are rounded as numerators are", _ROUNDED + "[dtype1]"),
    ),
    *_in(
        "flexsp/kernels/mlstm/gates.py",
        ("tl.where(later_a == float(\"-inf\"), later_a, later_a + a)", "later_a + a",
         "sums of gates that are not finite reach other documents", _STAYS),
        ("return tl.where(a == float(\"-inf\"), a, a + m)", "return a + m",
         "maxima that are not finite reach other documents", _STAYS),
        ("before = tl.where(cut, own, before)", "pass", "documents begin with the maximum before them", _GATES),
        ("c = tl.where(cut, _larger(log_f + own, c), c)", "pass", "documents do not begin with their maximum", _GATES),
        ("y += (1.0 + e) * _exp(-y) - 1.0", "pass", "gates are those of float32", _GATES),
        ("entered = _larger(_passing(block_a,", "entered = _larger(_passing(0 * block_a,",
         "what enters a shard does not decay until the block", _GATES),
        ("_then(_last_row(a, of), _last_row(c, of), last_a, last_c)", "_last_row(a, of), _last_row(c, of)",
         "a block is forgotten where blocks are many", _BLOCKS),
        ("torch.addcmul(of_log, of_weight, weight)", "of_weight * weight",
         "write gates have no gradient from the numerator", _GATES),
        ("di = of_weight * weight if", "di = of_weight if", "write gates have the gradients of weights", _GATES),
        ("other=0.0) - now\n", "other=0.0)\n", "write gates are not stabilised", _GATES),
        ("masked_fill_(x < MIN_LOG_FORGET, 0.0)", "masked_fill_(x > 0, 0.0)", "open gates have no gradient", _GATES),
    ),
    *_in(
        "flexsp/kernels/diagonal/shared_grads.py",
        ("tl.sum(scores * value[None, :]", "tl.sum(scores.to(tl.bfloat16) * value[None, :]", "denominators are rounded",
         _DENOMINATORS),
        ("S[None, :] + 0.0, axis=1) * scale\n", "S[None, :].to(tl.bfloat16) + 0.0, axis=1) * scale\n",
         "denominators are rounded behind the first chunk", _DENOMINATORS),
        ("        here = here * power(bc)\n", "", "one column does not decay within a chunk", _DENOMINATORS),
        ("            into = rows_of(writing", "            into = bc  # rows_of(writing",
         "one channel has steps of 1 within a chunk", _ONE_CHANNEL),
        ("here += value * tl.load(skip + h).to(tl.float32)", "pass", "one channel has no skip",
         _ONE_CHANNEL),
        ("            dkc += put[:, None] * dS[None, :]", "            dkc += put[:, None] * S[None, :]",
         "one column reads the wrong state backward", _DENOMINATORS),
        ("ends = first if REVERSE else last", "ends = first", "documents leave the state that they begin with",
         "tests/kernels/test_mlstm_kernels.py::test_against_the_token_loop"),
    ),
    *_in(
        "flexsp/kernels/primitives.py",
        ("    if V == 1:\n        # + 0.0", "    if V == 0:\n        # + 0.0",
         "states of one column are rounded", _DENOMINATORS),
    ),
    *_in(
        "flexsp/kernels/diagonal/diagonal_plan.py",
        ("values = self.dtype if self.values is None else self.values", "values = self.dtype",
         "outputs of one column are rounded", _DENOMINATORS),
        ("kept = self.tiling, self.n_seg * self.tiling.per_seg", "kept = self.tiling, self.n_seg",
         "segments of one column are of a chunk", _DENOMINATORS),
    ),
    *_in(
        "flexsp/kernels/mlstm/rows.py",
        ("tl.exp2((x - n).to(tl.float32)) * tl.exp2(n", "tl.exp2(n", "weights are powers of two", _GATES),
        ('"denominator": denominator.contiguous(), "m"', '"denominator": denominator, "m"',
         "denominators behind strides are misread", _ROWS),
        ("slope = tl.where(below < 0, -share, share)", "slope = share", "the sign of the normaliser is lost", _ROWS),
        ("tl.where((least >= tl.abs(below)) | (least != least), least, tl.abs(below)) + eps", "tl.abs(below) + eps",
         "the normaliser has no least", _ROWS),
        ("tl.sum(grad * x, axis=1) / by", "tl.sum(grad * x, axis=1)", "the gradient of what divides is not divided",
         _ROWS),
    ),
    *_in(
        "flexsp/scan/transitions.py",
        ("(a + state).masked_fill", "state.masked_fill", "maxima do not decay", _OPS),
        ("(a + state).masked_fill(a == -torch.inf, -torch.inf)", "a + state", "maxima reach across documents", _FINITE),
        ('-torch.inf if self.kind == "max-plus" else 0.0', "0.0", "what enters the first rank is at least 0",
         "tests/scan/test_schedules.py::test_maxima[serial]"),
        ("torch.maximum(left, F) if", "left + F if", "maxima of ranks are added up",
         "tests/scan/test_schedules.py::test_maxima[all_gather]"),
        ("dtypes=(torch.float32, torch.float64)", "dtypes=(torch.float32,)", "maxima in float64 go by other ways",
         _ENTERING),
    ),
    *_in(
        "flexsp/scan/propagate.py",
        ("BK * BV * (NUMBER.primitive_bitwidth // 8)", "BK * BV * 4", "half of a tile of float64 is put",
         _ENTERING),
    ),
    *_in(
        "flexsp/scan/maxima.py",
        ("torch.where(first, begun, around[..., :-1])", "around[..., :-1]",
         "documents begin with the maximum before them", _DOCUMENTS),
        ("torch.where(first, torch.maximum(F, a + begun), F)", "F", "documents do not begin with their maximum",
         _DOCUMENTS),
        ("through.apply(start, F) if sp.is_first else F", "F", "the first rank forgets what enters it", _RANKS),
        ("start if sp.is_first else arrived", "arrived", "the first rank starts from no maximum", _RANKS_IN_KERNELS),
        ("first.any().expand", "first.all().expand", "nothing tells ranks of a document that begins", _RANKS),
    ),
    *_in(
        "flexsp/nn/mlstm.py",
        ("cap * torch.tanh(wide / cap)", "torch.tanh(wide / cap)", "gates are capped at 1", _FORMULA),
        ("F.silu(mixed) if self.use_short_conv else mixed", "mixed", "convolutions have no activation", _FORMULA),
        ("sigmoid() * self.multihead_norm(o)", "sigmoid() * _wide(o).flatten(-2)", "heads are not normed", _FORMULA),
        ('"f": f, "eps": self.eps', '"f": f, "eps": 0.0', "the constant has no effect", _FORMULA),
    ),
    *_in(
        "flexsp/kernels/selective/in_pytorch.py",
        ("return z.exp(), dt\n", "return z.exp(), dt * z.exp()\n", "what is written decays at once", _STEPS),
        ("torch.where(near, series, large.expm1() / large)", "large.expm1() / large", "no series near 0",
         _SCAN + "test_the_zero_order_hold_near_zero"),
        ("series * small / k", "series * small / 2", "another series", _SCAN + "test_the_zero_order_hold_near_zero"),
        ("passed if cut is None else passed.masked_fill(cut, 0.0)", "passed", "states pass documents on other ranks",
         _SCAN + "test_ranks_equal_one_rank"),
        ("self.stretch.sum(1)", "self.stretch[:, -1]", "ranks pass the decay of one chunk",
         _SCAN + "test_ranks_equal_one_rank"),
        ("if torch.compiler.is_compiling() or transformed():", "if True:", "autograd keeps the states of all tokens",
         _SCAN + "test_memory_does_not_grow_with_the_states_of_tokens"),
        ("y + D.to(y.dtype) * u.to(y.dtype)", "y + D.to(y.dtype)", "the skip adds no input", _STEPS),
        ("F.silu(z.to(y.dtype))", "torch.sigmoid(z.to(y.dtype))", "another gate", _STEPS),
    ),
    *_in(
        "flexsp/kernels/primitives.py",
        ("return p * e * e + e", "return p * e * e", "small steps are 0", _SCAN + "test_kernels[small steps]"),
    ),
    *_in(
        "flexsp/kernels/selective/walks.py",
        ("return decay_of(dt, A2) * h + given", "return h + given", "states do not decay", _WALKS),
        ("decay_of(dt, A2) * (g + do[:, None] * C[None, :])", "decay_of(dt, A2) * g + do[:, None] * C[None, :]",
         "adjoints lack a decay", _WALKS),
        ("s * (1.0 + z * (1.0 - s))", "s * (1.0 + z)", "another derivative of silu", _WALKS),
        ("last & (at == C - 4)", "last", "gradients of final states enter twice", _SCAN + "test_kernels[documents]"),
        ("first & (at == 0)", "first", "documents begin twice", _SCAN + "test_kernels[documents]"),
        ("mask=left > 0, other=0.0)", "mask=left > -9, other=0.0)", "documents read rows of the next",
         _SCAN + "test_kernels[not finite]"),
        ("    g = tl.zeros([BD, BN], tl.float32)\n    group = seg * per_seg *",
         "    g = tl.zeros([BD, BN], tl.float32)\n    group = seg *",
         "segments of adjoints overlap", _SCAN + "test_kernels[small steps]"),
        (", mask=inside & (seg == n_seg - 1))", ", mask=inside)", "programs clear what others have left",
         "tests/kernels/test_engine_edges.py::test_states_that_nobody_reads_change_nothing"),
        ("head * u_sh + p, valid)\n    e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)\n    z0",
         "head + p, valid)\n    e0, e1, e2, e3 = rows_of(steps, t, left, e_st, e_at, valid)\n    z0",
         "heads are taken to lie side by side", "tests/ops/test_op_edges.py::test_selective_scan"),
    ),
    *_in(
        "flexsp/kernels/selective/grads.py",
        ("tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])", "tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2])",
         "lanes exchange other numbers", "tests/ops/test_op_edges.py::test_selective_scan"),
        ("return k0, k1, k2, decay_of(dt[3], A2) * h", "return k0, k1, k2, h",
         "decays have the gradient of all states", _WALKS),
        ("for earlier in range(0, q, 4)", "for earlier in range(0, 0, 4)",
         "all groups of a chunk begin with its state", _WALKS),
        ("du + do * weight", "du", "the skip has no gradient to the input", _WALKS),
        ("return a * back, to_A", "return back, to_A", "adjoints leave tokens before they decay", _WALKS),
        ("x = kept_of_two(low, high, bit)", "x = kept_of_two(high, low, bit)", "numbers change places",
         _SCAN + "test_kernels[numbers]"),
        ("x = x + across(x, bit)", "x = x", "sums of half of the channels", _SCAN + "test_kernels[numbers]"),
    ),
    *_in(
        "flexsp/scan/tokens.py",
        ("(inside + before.unsqueeze(2))", "inside", "blocks of a running sum begin at 0",
         "tests/kernels/test_running_sums.py::test_long_texts[257]"),
    ),
    *_in(
        "flexsp/kernels/vector/walks.py",
        ("total += gs[i]", "total += 2 * gs[i]", "segments decay twice", _VECTOR + "[plain]"),
        ("dh = decay_of(gs[C - 1 - i]) * (dh + dos[C - 1 - i])", "dh = decay_of(gs[C - 1 - i]) * dh + dos[C - 1 - i]",
         "adjoints lack a decay", _VECTOR + "[plain]"),
        ("dh = decay_of(slopes[i][0]) * back\n", "dh = back\n", "gradients leave tokens before they decay",
         _VECTOR + "[plain]"),
        ("dh = tl.where(first, 0.0, dh)  #", "dh = dh  #", "gradients pass documents",
         _VECTOR + "[documents]"),
        ("((gs[i], kept),)", "((gs[i], h),)", "gates have the gradient of all states",
         _VECTOR + "[plain]"),
    ),
    *_in(
        "flexsp/nn/mamba.py",
        ('"D": _wide(self.D)', '"D": None', "the skip has no effect", _MAMBA),
    ),
    *_in(
        "flexsp/nn/start.py",
        ("dt + torch.log(-torch.expm1(-dt))", "dt", "steps begin as other ones", _SCAN + "test_initialisation"),
    ),
    *_in(
        "flexsp/kernels/selective/in_pytorch.py",
        ("stretch = stretch.masked_fill(cut, 0.0)", "pass", "NaN passes to other documents' gradients over ranks",
         _SCAN + "test_what_is_not_finite_stays_in_its_document_over_ranks"),
    ),
]  # fmt: skip
