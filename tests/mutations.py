"""The changes that tests/mutate.py makes, and the tests that should notice each.

The texts are short and deep in the arithmetic, so that they live long. An entry that becomes stale follows the code.
"""

from __future__ import annotations

from tests.mutate import in_file as _in
from tests.mutations_assembly import ASSEMBLY
from tests.mutations_bitwise import BITWISE
from tests.mutations_examples import EXAMPLES
from tests.mutations_faults import FAULTS
from tests.mutations_fla import FLA
from tests.mutations_gates import GATES
from tests.mutations_hosts import HOSTS
from tests.mutations_kernels import KERNELS
from tests.mutations_memory import MEMORY
from tests.mutations_objectives import OBJECTIVES
from tests.mutations_ops import OPS
from tests.mutations_planner import PLANNER
from tests.mutations_programs import PROGRAMS
from tests.mutations_simulation import SIMULATION
from tests.mutations_starting import STARTING
from tests.mutations_states import STATES
from tests.mutations_transformers import TRANSFORMERS

__all__ = ["MUTATIONS"]

_ENGINE = "tests/kernels/test_triton_engine.py::"
_PLAIN = _ENGINE + "test_plain[simple_gla]"
_REWRITES = "tests/compiler/test_rewrites_of_random_graphs.py"
_FACTORS = "tests/compiler/test_rewrite.py::test_factors_of_an_operand"
_STEPS = "tests/compiler/test_step_graphs.py::"
_GENERATED = "tests/compiler/test_generated.py::"
_PROGRAMS = "tests/compiler/test_generated_programs.py::"
_RANKS = "tests/compiler/test_compiler.py::test_ranks_equal_one_rank"
_KIND = "tests/compiler/test_compiler.py::test_kind_is_read_from_the_graph"
_HORIZON = "tests/compiler/test_horizon_generated.py::test_gates_of_all_kinds"
_SCALAR = "tests/compiler/test_scalar_decay.py::test_calls[simple_gla]"
_MASKS = "tests/grammar/test_custom_mask.py::"
_CALLS = "tests/kernels/test_kept_calls.py::test_what_tells_generated_calls_apart"


_SCAN = [
    *_in(
        "flexsp/scan/segments.py",
        ("any_cut | c0 | c1 | c2 | c3", "any_cut | c0 | c1 | c2", "a cut in every fourth segment is forgotten",
         "tests/scan/test_cuts_between_ranks.py::test_every_segment_of_a_rank_in_the_middle_counts[cut-posix]"),
        ("(a0 + a1) + (a2 + a3)", "(a0 + a1) + a2", "the decay of every fourth segment is forgotten",
         "tests/scan/test_cuts_between_ranks.py::test_every_segment_of_a_rank_in_the_middle_counts[decay-posix]"),
        ("S2 = apply(S1, F2, a2", "S2 = apply(S0, F2, a2", "a segment is skipped",
         "tests/scan/test_propagate.py::test_one_rank_matches_float64[scalar]"),
        ("tl.load(log_a + segment * H + h, mask", "tl.load(log_a + segment * H, mask", "the decay of another head",
         "tests/scan/test_propagate.py::test_one_rank_matches_float64[scalar]"),
    ),
    *_in(
        "flexsp/scan/propagate.py",
        ("pushed = any_cut & (word == 0)", "pushed = nseg < 0", "ranks with a cut wait before they push",
         "tests/scan/test_propagate.py::test_behind_a_cut_no_rank_waits_for_those_before"),
        ("adjoint.apply(entering, F) if seeded", "F if seeded", "the first rank's state is lost",
         "tests/scan/test_propagate.py::test_process_group_schedules_use_the_same_kernel[chain]"),
        ("whole.adjoint() if reverse else whole", "whole", "A goes out the wrong way round",
         "tests/scan/test_propagate.py::test_process_group_schedules_use_the_same_kernel[chain]"),
    ),
    *_in(
        "flexsp/scan/dense.py",
        ("place = inner[None, :] * K + rows[:, None]", "place = rows[:, None] * K + inner[None, :]",
         "backward with A, not its transpose", "tests/scan/test_propagate.py::test_one_rank_with_a_dense_transition"),
    ),
    *_in(
        "flexsp/scan/transitions.py",
        ("_like(self.cut != 0, like)", "_like(self.cut > 1, like)", "cuts do not cut",
         "tests/scan/test_schedules.py::test_nothing_passes_a_cut"),
        ("times(self.apply(state), dF)", "times(_like(self.a.exp(), state) * state, dF)",
         "decays behind a cut have a gradient",
         "tests/scan/test_cuts_between_ranks.py::test_the_decay_of_a_rank_that_cuts_has_no_gradient"),
        ("range(self.a.dim(), found.dim())", "range(self.a.dim() + 1, found.dim())", "a gate's gradient is not summed over K",
         "tests/scan/test_exchange.py::test_gradients[2-chain]"),
    ),
    *_in(
        "flexsp/scan/transitions.py",
        ("return dF * state", "return dF * dF", "the gradient of a decay", _RANKS + "[gla-[9, 0, 21]]"),
    ),
    *_in(
        "flexsp/runtime/steps.py",
        ("-(-math.prod(shape) * dtype.itemsize // 256) * 256", "math.prod(shape) * dtype.itemsize // 256 * 256",
         "buffers overlap", _PLAIN),
        ("memory.storage_offset() + start", "start", "buffers lie where the storage begins",
         "tests/kernels/test_launch_plan.py::test_buffers_lie_in_memory_that_begins_anywhere"),
    ),
    *_in(
        "flexsp/runtime/workarounds/vector_flags.py",
        ("|ashr|udiv|sdiv|or|", "|ashr|udiv|sdiv|", "promises about or stay", "tests/runtime/test_llvm_workaround.py"),
    ),
    *_in(
        "tests/runtime/test_llvm_workaround.py",
        ("int(by) >= 32}", "int(by) > 32}", "lanes next to each other are not seen", "tests/runtime/test_llvm_workaround.py"),
    ),
    *_in(
        "flexsp/comm/halo.py",
        ("+= d_sent[:, : width - T]", "= d_sent[:, : width - T]", "gradients past a short shard are lost",
         "tests/comm/test_halo.py::test_spans_several_ranks"),
        ("torch.cat([halo[:, T:], x], 1)", "torch.cat([halo[:, : width - T], x], 1)", "a short shard sends on old tokens",
         "tests/comm/test_halo.py::test_spans_several_ranks"),
    ),
    *_in(
        "flexsp/comm/group.py",
        ("if dim >= x.dim():", "if dim > x.dim():", "a dimension that is not there is not named",
         "tests/comm/test_group.py::test_partition_and_shard"),
        ("base + (r < extra)", "base + (r <= extra)", "shards have a token too many",
         "tests/comm/test_group.py::test_partition_and_shard"),
        ("self.world_size / count.clamp", "1.0 / count.clamp", "losses are not scaled for averaging",
         "tests/comm/test_group.py::test_token_mean"),
        ("start = sum(lengths[: self.rank])\n        return", "start = sum(lengths[: self.rank + 1])\n        return",
         "shards start where they end", "tests/comm/test_group.py::test_shard_range"),
    ),
    *_in(
        "flexsp/comm/transport.py",
        ("return heap.local", "return heap.peer(rank)", "put maps the others' arenas", "tests/comm/test_transport.py"),
        ("\"put\", \"cuda\", True", "\"put\", \"cuda\", False", "put has no stage", "tests/comm/test_transport.py"),
        ("sp.schedule == \"chain\" and transport_of", "transport_of", "baselines send in the kernel",
         "tests/comm/test_transport.py"),
    ),
    *_in(
        "flexsp/comm/device.py",
        ("tl.store(record + 3, wanted)", "tl.store(record + 3, seen)", "what was expected is not told",
         "tests/scan/test_propagate.py::test_absent_rank_is_reported_by_all_others[0-False]"),
    ),
]

_COMPILER = [
    *_in(
        "flexsp/compiler/graphs/rewrite.py",
        ("aten.sub.Tensor if adds else aten.add.Tensor, (x, y", "aten.add.Tensor if adds else aten.sub.Tensor, (x, y",
         "x + (-y) = x + y", _REWRITES),
        ("aten.sub.Tensor, (y, x.args[0]))", "aten.sub.Tensor, (x.args[0], y))", "-x + y = x - y", _REWRITES),
        ("zip((1, 1 if node.target is aten.add.Tensor else -1)", "zip((1, 1)", "x - y is a sum", _REWRITES),
        ("(sign if x.target is aten.add.Tensor else -sign, x", "(sign, x", "x - (y - z) = x - y - z", _REWRITES),
        ("[:: 1 if sign >= sign_y else -1]", "[::1]", "A Y - A X = A (X - Y)", _REWRITES),
        ("how = aten.add.Tensor if sign == sign_y else aten.sub.Tensor", "how = aten.add.Tensor", "A X - A Y = A (X + Y)",
         _REWRITES),
        ("return max(sign, sign_y), _insert", "return sign, _insert", "-A X + A Y = -A (Y - X)", _REWRITES),
        ("aten.add.Tensor if sign > 0 else aten.sub.Tensor, (total", "aten.add.Tensor, (total", "x - y = x + y",
         _REWRITES),
        (" and _finite(low.args[0], _above(y))", "", "a mask goes although what it hides is infinite", _REWRITES),
        ("_above(y) <= _diagonal(low) and", "_above(y) <= _diagonal(low) + 1 and", "a narrower mask is implied by a wider",
         _REWRITES),
        ("min(_diagonal(x), _above(x.args[0]))", "min(_diagonal(x), _above(x.args[0])) - 1",
         "a triangle's diagonal counts as zero", _REWRITES),
        ("(x.args[0], [1 - axis]))", "(x.args[0], [axis]))", "a transpose is summed over the wrong axis", _REWRITES),
        ("return like.target not in kinds or (like.target is x.target", "return like.target not in kinds or (True",
         "running sums from both ends become one", _REWRITES),
        ("(dims(node), node.meta.get(\"fill\"), node", "(dims(node), node", "constants of one shape are one",
         _REWRITES),
        ("if _filled(one, 1) and", "if _filled(one, 0) and", "0 x = x", _REWRITES),
        ("node.args[1:] == (0, -1)", "node.args[1:] == (0, 0)", "a running sum's first row is the sum",
         _STEPS + "test_signs_and_constants"),
        ("args = (other, small * c)", "args = (other, small + c)", "constants that move are added", _REWRITES),
        ("aten.neg.default, (_with_operand(graph, node, side, x, inner.args[0]),))",
         "aten.t.default, (_with_operand(graph, node, side, x, inner.args[0]),)).args[0]", "(-X) Y = X Y", _FACTORS),
        ("rows = side == 0 and not turned and", "rows = side == 0 and", "a factor of rows leaves a transpose", _FACTORS),
    ),
    *_in(
        "flexsp/compiler/graphs/homogeneous.py",
        ("rest = graph.call_function(aten.neg.default, (rest,))", "pass", "0 - x = x",
         "tests/compiler/test_rewrite.py::test_what_a_gradient_of_zero_leaves"),
    ),
    *_in(
        "flexsp/compiler/graphs/differentiate.py",
        ("for axis in axes)\n", "for axis in axes[:1])\n", "a mean over two axes", _STEPS + "test_signs_and_constants"),
        ("else torch.maximum(x, min)", "else torch.minimum(x, min)", "a clamp from below", _STEPS + "test_operators[extrema]"),
        ("else torch.minimum(x, max)", "else torch.maximum(x, max)", "a clamp from above", _STEPS + "test_operators[extrema]"),
        ("graph.call_function(torch.sub, (right, outer))", "graph.call_function(torch.add, (right, outer))",
         "(I - X Y) S = S + X (Y S)", _STEPS + "test_identity_minus_a_product"),
        ("ones = torch.ones_like(old)", "ones = torch.ones_like(old) * 2", "A of a state", _STEPS + "test_variants[gla]"),
        ("levels[node] += 1", "levels[node] += 0", "intrinsics that need each other run at once",
         _PROGRAMS + "test_gradients_of_scores_one_behind_the_other"),
        ("if difference.kwargs:  # alpha", "if not difference.kwargs:  # alpha", "a factor of what is subtracted is lost",
         "tests/compiler/test_dispatch.py::test_a_factor_of_what_is_subtracted_is_seen"),
    ),
    *_in(
        "flexsp/compiler/graphs/intrinsics.py",
        ("return -(y.mT @ (grad", "return (y.mT @ (grad", "the derivative of an inverse", _STEPS + "test_variants[deltanet]"),
        ("q * dq - k * dk", "q * dq + k * dk", "the gate's gradient of scores", _STEPS + "test_variants[gla]"),
        ("g.roll(-1, 0).flip(0)", "g.flip(0)", "the adjoint of decayed sums has another token's gate",
         _STEPS + "test_intrinsics[channels apart]"),
    ),
    *_in(
        "flexsp/compiler/frontend/functions.py",
        ("        if self.begins:\n            return", "        if False:\n            return", "a shard's decay passes a document's start",
         "tests/scan/test_cuts_between_ranks.py::test_a_document_that_starts_in_the_middle_rank_and_ends_behind_it[linear]"),
        ("self.there.argsort()", "self.there", "chunks of different lengths are taken for each other",
         "tests/compiler/test_compiler.py::test_documents_across_ranks[gla]"),
    ),
    *_in(
        "flexsp/compiler/backend/walks.py",
        ("walked, i + 1)", "walked, i)", "the horizon is one chunk too near", _HORIZON + "[gla]"),
        ("'c0 + i' if reverse else 'c1 - 1 - i'", "'c1 - 1 - i' if reverse else 'c0 + i'",
         "the horizon is looked for from the wrong end", _HORIZON + "[gla]"),
        ("total <= HORIZON", "total <= HORIZON / 2", "what still counts is behind the horizon",
         "tests/compiler/test_horizon_generated.py::test_large_numbers_far_away"),
        ("tl.max(walked, axis=0)", "tl.min(walked, axis=0)", "the quickest channel sets the horizon", _HORIZON + "[gla]"),
        ("'last' if reverse else 'first'}.to(tl.int32)\",\n        *(f", "'first' if reverse else 'last'}.to(tl.int32)\",\n        *(f",
         "a document's end counts as its start", _HORIZON + "[simple_gla]"),
    ),
    *_in(
        "flexsp/variants/scalar_decay.py",
        ("if name in program.decay.arguments)", "if name in program.meta.tokens)",
         "a state decays by what its function does not take", "tests/compiler/test_scalar_decay.py::test_inputs_of_other_kinds"),
        ("code.chunk is not None or {name", "{name", "a chunk size that is given is ignored", _SCALAR),
        ("!= _dims(gate):\n            return None", "!= {}:\n            return None", "programs run slower in PyTorch than ops",
         "tests/compiler/test_scalar_decay.py::test_in_pytorch_programs_run_what_ops_run"),
        ("!= _dims(gate):\n            return None", "== []:\n            return None",
         "in PyTorch a state decays by what its function does not take", "tests/compiler/test_scalar_decay.py::test_inputs_of_other_kinds"),
        ("!= _dims(gate):\n            return False", "== []:\n            return False", "inputs of another kind run by an engine",
         "tests/compiler/test_scalar_decay.py::test_functions_with_other_inputs"),
        ("[0] == of_v and", "[0] == dtype and", "values of another dtype are read as keys", _SCALAR),
    ),
    *_in(
        "flexsp/compiler/planning/lowering.py",
        ("phases.get(x.kind, (x,))", "(x,)", "nothing is replaced", "tests/compiler/test_lowering.py::test_several_launches_in_place_of_one"),
        ("len(set(names)) < len(names)", "False", "two engines have one name",
         "tests/compiler/test_lowering.py::test_what_no_program_carries"),
    ),
    *_in(
        "flexsp/compiler/planning/generated_plan.py",
        (" if x.refuses(self) is None)", ")", "an engine is given calls that it refuses",
         "tests/compiler/test_lowering.py::test_a_call_that_an_engine_refuses"),
        ("sorted(own.keys() & found.keys())", "sorted(set())", "an engine's buffer takes the place of another",
         "tests/compiler/test_lowering.py::test_what_no_program_carries"),
        ("return found | own", "return found", "what an engine adds has no buffer",
         "tests/compiler/test_lowering.py::test_what_an_engine_replaces"),
    ),
    *_in(
        "flexsp/compiler/frontend/flows.py",
        ("            breadth = 1\n        elif", "            breadth = 0\n        elif", "a scalar decay is none",
         "tests/compiler/test_compiler.py::test_kind_of_transition"),
        ("turned=not flow.turned)", "turned=flow.turned)", "a transpose of the state is not seen",
         _KIND),
        ("new[node].args = tuple(zero(x) for x in args)\n            if \"other\"", "pass\n            if \"other\"",
         "what is added to a state counts as a factor", _KIND + "[a number added]"),
        ("(*new[node].args[:2], 0.0)", "new[node].args", "what fills a state counts as a factor", _KIND + "[filled]"),
        ("mask = 1 if node.op", "mask = 0 if node.op", "a mask is taken for a state", _KIND + "[by a method]"),
        ("if result not in self.flows:", "if False:", "a state that is not used decays by what is added",
         _KIND + "[not used]"),
    ),
    *_in(
        "flexsp/scan/chunks.py",
        ("cut[:, :-1].cumsum(1) > 0", "cut[:, :-1]", "only the chunk behind a document's start forgets",
         "tests/scan/test_chunks.py::test_states_between[none-True]"),
        ("cut.any(1)", "cut[:, 0]", "a group of chunks passes on what a document in it does not",
         "tests/ops/test_nonfinite.py::test_many_chunks[variant simple_gla]"),
        ("a @ S if dense else a * S", "a @ S if dense else S", "states do not decay from chunk to chunk",
         "tests/kernels/test_reference.py::test_lengths[131-dtype0]"),
        ("_dropped(states[-1], cut.select(axis - 2, c))", "states[-1]", "what is not finite reaches other documents",
         "tests/ops/test_nonfinite.py"),
        ("-x.shape[axis] % _GROUP", "x.shape[axis] % _GROUP", "groups of the scan are padded wrongly",
         "tests/kernels/test_reference.py::test_many_chunks"),
        ("0, chunks), value=value)", "0, chunks), value=0.0)", "what fills a group of chunks decays",
         "tests/scan/test_chunks.py::test_states_between"),
    ),
    *_in(
        "flexsp/compiler/frontend/check.py",
        ("torch.allclose(again[:j], base.o[:j]", "torch.allclose(again[: j - 1], base.o[: j - 1]",
         "a leak of the next token is not seen", "tests/compiler/test_nearly_right_programs.py"),
    ),
    *_in(
        "flexsp/compiler/frontend/trace.py",
        ("zeros.diagonal < 0 and", "zeros.diagonal <= 0 and", "an inverse of a matrix without ones on its diagonal",
         "tests/compiler/test_nearly_right_programs.py"),
        ("if named(node) == \"add\":\n        pairs", "if True:\n        pairs", "an inverse of Y - I is that of I - Y",
         "tests/compiler/test_nearly_right_programs.py"),
        ("masked_fill(~mask if kept else mask", "masked_fill(mask if kept else ~mask", "the kept exponents are masked",
         "tests/compiler/test_compiler.py::test_decay_masked_in_other_ways"),
    ),
    *_in(
        "flexsp/compiler/backend/walks.py",
        ("at = \"((b * (n_seg + 1) + seg + {})", "at = \"((b * n_seg + seg + {})", "states of B > 1 overlap",
         _GENERATED + "test_batched[gla]"),
        ("total += tl.where(length > 0, tl.log({factor}), 0.0)", "total += tl.log({factor})", "chunks without tokens decay",
         _PROGRAMS + "test_a_decay_that_no_token_changes"),
        ("tl.where(length > 0, {text}, {names[x]})\"", "{text}\"", "chunks without tokens change the state",
         _PROGRAMS + "test_a_decay_that_no_token_changes"),
        ("    if state == \"dS\":\n", "    if False:\n", "gradients flow past a document's start",
         "tests/kernels/test_delta_engine.py::test_documents_that_begin_where_segments_or_ranks_do[ranks, generated gla]"),
        ("cuts = cuts | first.to(tl.int32)", "cuts = first.to(tl.int32)", "only the last chunk's cut counts",
         "tests/compiler/test_generated_edges.py"),
    ),
    *_in(
        "flexsp/compiler/backend/body.py",
        ("wild=gates and n == \"C\"", "wild=False", "padding of running sums counts as finite",
         "tests/compiler/test_generated_edges.py::test_running_sums_of_pairs_whose_padding_is_not_finite"),
        ("if x.wild and sizes[1:] == (\"C\",) else x", "if False else x", "columns of kept [C, C] are stored unmasked",
         _PROGRAMS + "test_padding_of_states_and_of_kept_values[a kept [C, C]]"),
    ),
    *_in(
        "flexsp/compiler/backend/emit.py",
        ("join(limit(size) for size", "join(limit('K' if size == 'V' else size) for size",
         "the number of columns counts as that of rows",
         _PROGRAMS + "test_sizes_of_the_state_in_a_dense_decay"),
        ("x = self.masked(x, axis)  # also", "x = x  # also", "running sums add up padding", "tests/compiler/test_generated_edges.py"),
        ("x = self.masked(x, axis, fill)", "x = self.masked(x, axis)", "an extremum sees padding",
         _PROGRAMS + "test_operators[extrema]"),
        ("elif 1 not in a.zero and 0 not in b.zero:", "elif False:", "a product sums up padding",
         "tests/compiler/test_generated_edges.py"),
        ("a, b = self.masked(a, 1), self.masked(b, 0)", "a, b = self.masked(a, 1), b", "padding that is not finite is multiplied",
         _PROGRAMS + "test_padding_that_is_not_finite"),
        ("x.zero if node.target in KEEPS_ZERO else", "x.zero if True else", "exp(0) counts as 0",
         "tests/compiler/test_generated_edges.py"),
        ("zero if low <= 0 else frozenset()", "zero", "a clamp from above 0 counts as 0 in padding",
         "tests/compiler/test_generated_edges.py"),
        ("zero_at(y, a) and zero_at(n, a))", "zero_at(y, a) or zero_at(n, a))", "a choice counts as zero",
         "tests/compiler/test_generated_edges.py"),
        ("Value(text, x.sizes, frozenset(), x.wild, steady=x.steady))\n\n    def _clamp",
         "Value(text, x.sizes, x.zero, x.wild, steady=x.steady))\n\n    def _clamp", "1 - 0 counts as 0",
         "tests/compiler/test_generated_edges.py"),
        ("~below({shape}, {diagonal - 1})", "~below({shape}, {diagonal})", "triu leaves its diagonal out",
         _PROGRAMS + "test_operators[products]"),
    ),
    *_in(
        "flexsp/compiler/backend/operators.py",
        ("zeros and zero_at(a, axis) and zero_at(b, axis)", "zeros and (zero_at(a, axis) or zero_at(b, axis))",
         "x + 0 counts as 0", "tests/compiler/test_generated_edges.py"),
        ("if zero_at(a, axis) and not b.sizes)", "if zero_at(a, axis))", "0 / 0 counts as 0",
         _PROGRAMS + "test_padding_that_is_not_finite"),
    ),
    *_in(
        "flexsp/compiler/backend/tile_ops.py",
        ("    if size <= _SMALL:", "    if size <= 0:", "lanes of a sum round differently",
         "tests/compiler/test_generated_offline.py::test_resources[simple_gla-packed]"),
    ),
    *_in(
        "flexsp/compiler/planning/tiling.py",
        ("// chunk) + self.n_docs", "// chunk)", "documents have no chunks of their own", "tests/compiler/test_plans_cover.py"),
        ("n_seg = max(1, -(-n_chunks // per_seg))", "n_seg = max(1, n_chunks // per_seg)", "the last segment is left out",
         "tests/compiler/test_plans_cover.py"),
        ("n_chunks > 0 and not self.ranks", "n_chunks > 0", "ranks have no summary", "tests/compiler/test_plans_cover.py"),
        ("fused = n_seg == 1 and n_chunks > 0 and", "fused = n_seg == 1 and", "a shard without tokens has no states",
         _GENERATED + "test_one_token_and_none[hgrn]"),
    ),
    *_in(
        "flexsp/compiler/backend/generated_kernels.py",
        ("1 << (n - 1).bit_length()", "1 << (n.bit_length() - 1)", "a tile is smaller than what it holds",
         "tests/compiler/test_plans_cover.py"),
        ("program.value_sizes), program.parts, program.lowerings", "program.value_sizes), program.parts, ()",
         "generated kernels are run by another program's engine", "tests/compiler/test_lowering.py::test_engines_are_of_a_program"),
    ),
    *_in(
        "flexsp/compiler/dispatch.py",
        ("        if own is not None:", "        if lowering is code.program.lowerings[-1]:", "the last engine runs a call",
         "tests/compiler/test_lowering.py::test_the_first_engine_that_takes_a_call_runs_it"),
        ("elif chained:  # a plan", "elif False:  # a plan", "a plan of one rank has no summary over ranks",
         "tests/kernels/test_launch_plan.py::test_a_plan_that_was_tuned_on_one_rank_serves_ranks"),
    ),
    *_in(
        "flexsp/compiler/planning/generated_plan.py",
        ("[*entering, *middle, *back] if early", "[*entering, *middle, *back] if not early",
         "gradients are collected before the states that they read", "tests/kernels/test_launch_plan.py::test_nothing_is_read_before_it_is_written"),
        ('others if x in _states_of(kernel)', 'others if x not in _states_of(kernel)', "what a chunk reads is counted wrongly",
         "tests/kernels/test_launch_plan.py::test_states_that_a_kernel_reads_are_in_its_code"),
        ("self.n_seg + 1, self.H, *state)", "self.n_seg, self.H, *state)", "no room for the last state",
         _GENERATED + "test_one_token_and_none[hgrn]"),
    ),
    *_in(
        "flexsp/compiler/autotune.py",
        ("for plan in plans if plan.sure for", "for plan in plans for", "plans that do not fit end a search",
         "tests/compiler/test_plan.py::test_plans_that_may_not_fit_are_not_compiled_together"),
    ),
    *_in(
        "flexsp/compiler/arguments.py",
        ("facts.append((x.shape, x.stride()", "facts.append((x.stride()", "a kept call forgets shapes",
         _CALLS),
        ("x.shape, x.stride(), x.dtype", "x.shape, x.dtype", "a kept call forgets strides",
         _CALLS),
        ("x.dtype, x.device, aligned(x)))", "x.device, aligned(x)))", "a kept call forgets types",
         _CALLS),
        ("x.device, aligned(x)))", "x.device))", "a kept call forgets alignment",
         _CALLS),
        ("facts: list[Any] = [*inputs]", "facts: list[Any] = []", "a kept call forgets names",
         _CALLS),
    ),
    *_in(
        "flexsp/compiler/backend/intrinsic_kernels.py",
        ("((i >> level) > (j >> level))", "((i >> level) >= (j >> level))", "pairs of one half are counted again",
         _PROGRAMS + "test_scores_kernels[16-False-small]"),
        ("mask=(i < length) & (j < length), other", "mask=(i < C) & (j < C), other", "gradients past a chunk's length",
         _PROGRAMS + "test_scores_kernels[16-False-small]"),
        ("tl.store(_at(x, to, at, C, 16 << level), -outer)", "tl.store(_at(x, to, at, C, 16 << level), outer)",
         "off-diagonal blocks of an inverse", _PROGRAMS + "test_inverse_kernel[32]"),
    ),
]

_FACES = [
    *_in(
        "flexsp/ops/retention.py",
        ("exp2(-5.0 - head)", "exp2(-5.0 + head)", "the decay of heads", "tests/ops/test_ops.py::test_against_the_token_loop"),
    ),
    *_in(
        "flexsp/ops/lightning.py",
        ("q.shape[2] * (1 - layer_idx / num_layers)", "q.shape[2] * (1 - layer_idx / (num_layers + 1))", "the slope of layers",
         "tests/ops/test_ops.py::test_against_the_token_loop"),
    ),
    *_in(
        "flexsp/ops/simple_gla.py",
        ("programs.clamped(g, q)", "programs.wide(g, q).clamp(min=-50.0)", "a closed gate in decoding is not closed",
         "tests/ops/test_ops.py::test_a_nearly_closed_gate_in_decoding"),
    ),
    *_in(
        "flexsp/ops/linear_attn.py",
        ("(v, ones), scale=scale,", "(v, ones), scale=1.0,", "the denominator has another scale",
         "tests/ops/test_ops.py::test_the_denominator_is_scaled"),
    ),
    *_in(
        "flexsp/nn/layers.py",
        (") / self.gate_logit_normalizer", ")", "the gate is not divided", "tests/nn/test_layer_formulas.py"),
        ("(D if D.dim() == 2 else D[:, None]) * x", "x", "a step of Mamba-2 without D",
         "tests/nn/test_layers.py::test_decoding_equals_parallel"),
    ),
    *_in(
        "flexsp/nn/conv.py",
        ("read = _own_document(padded[:, at : at + length], since, width - 1 - at)",
         "read = padded[:, at : at + length]", "NaN of another document reaches the taps' gradient",
         "tests/nn/test_layers.py::test_taps_never_read_another_document"),
        ("seen[:, -weight.shape[1] :].transpose", "seen[:, : weight.shape[1]].transpose", "the oldest inputs are remembered",
         "tests/nn/test_layers.py::test_decoding_equals_parallel"),
    ),
    *_in(
        "flexsp/nn/delta_layers.py",
        ("x.unflatten(-1, (self._steps, *sizes)).flatten(1, 2)",
         "x.unflatten(-1, (*sizes[:1], self._steps, *sizes[1:])).transpose(2, 3).flatten(1, 2)",
         "a checkpoint's steps are read as heads", "tests/nn/test_delta_layers.py::test_formulas"),
    ),
    *_in(
        "flexsp/nn/conv.py",
        ("torch.cat(biases)", "torch.cat([biases[1], biases[0], *biases[2:]])",
         "q has the bias of k's convolution", "tests/nn/test_delta_layers.py::test_formulas"),
    ),
    *_in(
        "flexsp/scan/tokens.py",
        ("begin < start, starts < start)", "begin <= start, starts < start)",
         "sums of ranks before reach a document that starts with the shard", "tests/kernels/test_running_sums.py"),
        ("since >= step, before", "since > step, before", "a document's first token is left out of sums",
         "tests/kernels/test_running_sums.py"),
        ("_where(place > begin, torch", "_where(place >= begin, torch", "the token before a document is seen",
         "tests/kernels/test_running_sums.py"),
    ),
    *_in(
        "flexsp/kernels/rotary.py",
        ("a * cos - b * sin", "a * cos + b * sin", "rotations", "tests/grammar/test_grammar.py::test_against_token_loop"),
        ("angle.requires_grad or transformed()", "angle.requires_grad", "states do not turn in forward mode",
         "tests/ops/test_derivatives.py::test_angles_in_forward_mode[mamba3]"),
    ),
    *_in(
        "flexsp/grammar/flex_linear_attention.py",
        ("gates.clamped(gate.to(check.accumulation_dtype(q)))", "gate.to(check.accumulation_dtype(q))", "a gate of -inf is not clamped",
         "tests/grammar/test_grammar.py::test_a_closed_gate_starts_anew"),
    ),
    *_in(
        "flexsp/grammar/mask.py",
        ("gate + total - previous(total", "gate + total - 0 * previous(total", "running sums count as gates",
         _MASKS + "test_mask_against_token_loop"),
        ("sympy.sign(r) * min(abs(r), abs(c))", "sympy.sign(r) * max(abs(r), abs(c))", "unmatched exponents are a decay",
         _MASKS + "test_a_running_sum_is_a_decay_as_often_as_both_positions_have_it"),
    ),
    *_in(
        "flexsp/grammar/programs.py",
        ("(gk.sum(0) - gk.cumsum(0)).exp()", "gk.sum(0).exp()", "keys decay from the chunk's start",
         "tests/grammar/test_grammar.py::test_against_token_loop"),
    ),
    *_in(
        "examples/train_lm.py",
        ("phase + order[step % windows] * tokens", "order[step % windows] * tokens", "windows have no phase",
         "tests/test_demo.py::test_which_tokens_belong_to_which_step"),
        ("SEED * 1_000_003 + epoch", "SEED * 1_000_003", "every epoch has the same order",
         "tests/test_demo.py::test_epochs_differ"),
        ("shard_loss(wrapped, training_window(text, step,", "shard_loss(wrapped, training_window(text, step + 1,",
         "a step trains on the next step's window", "tests/test_demo.py::test_steps_train_on_one_window_after_another"),
        ("shard_loss(wrapped, training_window(text, step,", "shard_loss(wrapped, training_window(text, 0,",
         "every step trains on the first window", "tests/test_demo.py::test_steps_train_on_one_window_after_another"),
    ),
    *_in(
        "examples/checkpoint.py",
        ("os.replace(partial, path)", "path.write_bytes(content)", "a checkpoint is written over the former one",
         "tests/test_demo_checkpoint.py::test_a_process_killed_while_it_writes_keeps_the_former_checkpoint",
         "tests/test_demo_checkpoint.py::test_content_is_on_the_disk_before_its_name_and_its_name_before_the_return"),
    ),
]

_BETWEEN = [
    *_in(
        "flexsp/nn/wrapper.py",
        ("                count_failed_call(error, self._flexsp_sp)  #", "                #", "an error between two ops is not counted",
         "tests/comm/test_disagreement.py::test_a_rank_that_raises_in_the_users_code_and_goes_on"),
        ("    if inside:\n        _warn", "    if not inside:\n        _warn", "the wrong blocks are warned of",
         "tests/compiler/test_torch_compile.py::test_a_checkpoint_that_ends_the_graph_says_so_once"),
    ),
    *_in(
        "flexsp/launch/bootstrap.py",
        ("            dist.barrier(group=cpu_group)", "            pass", "a rank goes on that others still connect to",
         "tests/comm/test_group.py::test_no_rank_goes_on_before_all_are_connected"),
    ),
    *_in(
        "flexsp/comm/watchdog.py",
        ("seen >> RANK_BITS & low if peer == rank else peer", "peer", "a report about this rank names this rank",
         "tests/comm/test_disagreement.py::test_one_wrong_stamp_of_many_is_enough"),
        ("        with torch.inference_mode(False):\n            sp.channels", "        if True:\n            sp.channels",
         "exchanges after those in inference mode fail",
         "tests/comm/test_disagreement.py::test_exchanges_in_inference_mode_leave_later_ones_working"),
    ),
    *_in(
        "flexsp/comm/process_group.py",
        ("[rows * n for n in given]", "[*given]", "a token has one row",
         "tests/comm/test_group.py::test_rows_of_a_token"),
        ("        sp.compared += 1\n", "", "backward passes do not say which call they are of",
         "tests/comm/test_disagreement.py::test_check_mode_tells_backward_passes_in_another_order"),
        ('text += f", shards of {sp.lengths} tokens"', 'text += ""', "ranks cut the sequence differently",
         "tests/comm/test_disagreement.py::test_values_that_all_ranks_must_agree_on"),
        ("stamp = torch.full((_HEADER // 8,), self.word, dtype=torch.int64, device=tensors[0].device)",
         "stamp = torch.zeros(2, dtype=torch.int64); stamp[0] = self.word", "the host waits before it sends",
         "tests/comm/test_host_waits.py::test_exchanges_do_not_wait"),
        ("stamp.masked_fill_(self._wrong()", "stamp.masked_fill_(stamp.ne(self.word)", "a wrong stamp is not reported on",
         "tests/comm/test_disagreement.py::test_another_stamp_makes_nan_and_is_reported"),
        ("[:, :_HEADER].zero_()", "", "a stamp of an earlier call is read",
         "tests/comm/test_disagreement.py::test_a_gathered_buffer_begins_without_stamps"),
        ("data.resolve_conj().resolve_neg()", "data", "conjugate views cannot travel",
         "tests/comm/test_disagreement.py::test_messages_of_tensors_that_lie_otherwise"),
        ("else self._bad | new", "else new", "only the last wrong stamp counts",
         "tests/comm/test_disagreement.py::test_one_wrong_stamp_of_many_is_enough"),
    ),
    *_in(
        "flexsp/kernels/diagonal/op.py",
        ('call += f", scale {scale}"', 'call += ""', "ranks take different scales",
         "tests/comm/test_disagreement.py::test_values_that_all_ranks_must_agree_on"),
    ),
    *_in(
        "flexsp/comm/derivatives.py",
        ("x.requires_grad for x in cotangents", "False for x in cotangents", "a graph leaves second derivatives out",
         "tests/compiler/test_made_once.py::test_second_derivatives_through_a_graph_raise"),
    ),
    *_in(
        "flexsp/kernels/reference.py",
        ("[:, :, -1].clone()", "[:, :, -1]", "a final state is a part of all states",
         "tests/kernels/test_reference.py::test_a_final_state_is_no_part_of_all_states"),
        ("entering = entering + (arrived", "entering = (arrived", "an initial state is lost over ranks",
         _RANKS + "[gla-[9, 0, 21]]"),
        ("cut = documents.table[:, 3].bool()", "cut = documents.table[:, 4].bool()", "documents begin where they end",
         "tests/kernels/test_reference.py::test_documents"),
        ("return found.masked_fill((after == 0).view(-1, *[1] * (found.dim() - 1)), 0.0)", "return found",
         "documents that end elsewhere have a final state",
         "tests/ops/test_sp_ops.py::test_documents_that_are_easy_to_get_wrong[simple_gla]"),
        ("for other in (arrived, of_documents):", "for other in ():", "a rank without tokens does not answer its neighbours",
         "tests/scan/test_cuts_between_ranks.py::test_parameters_have_gradients_on_a_rank_without_tokens[retnet]"),
    ),
    *_in(
        "flexsp/compiler/torch_compile.py",
        ("        _lasting.add(variant)\n    given =", "        pass\n    given =", "a trace loses its variant",
         "tests/ops/test_unusual_tensors.py::test_traces_hold_the_operators[kernels]"),
        ("        _lasting.add(model)\n", "", "a graph loses its variant",
         "tests/compiler/test_made_once.py::test_a_graph_keeps_its_variant_for_the_backward_pass"),
        ('f"{variant.likeness()} {_package()}"', 'f"{_package()}"', "graphs of two variants have one name",
         "tests/compiler/test_made_once.py::test_graphs_tell_variants_apart_and_know_them_in_another_process"),
    ),
    *_in(
        "flexsp/compiler/linear_attention.py",
        ("shard_of(call.T, self.rows,", "shard_of(call.T, 1,", "kernels take rows for tokens",
         "tests/compiler/test_torch_compile.py::test_one_graph_over_ranks"),
        ("options = self._sizes, self._C, self._fallback", "options = self._sizes, self._fallback", "graphs do not know the chunk size",
         "tests/compiler/test_made_once.py::test_graphs_tell_variants_apart_and_know_them_in_another_process"),
    ),
]

_ATTENTION = [
    *_in(
        "flexsp/nn/attention/over_ranks.py",
        ("stop - length - sight.window + 1)", "stop - length - sight.window + 2)", "the first key of a window is not sent",
         "tests/nn/test_attention_ranks.py::test_keys_that_ranks_see"),
        ("    if torch.is_grad_enabled():  #", "    if False:  #", "keys of other ranks are kept",
         "tests/nn/test_attention_ranks.py::test_memory_is_that_of_a_shard[keys]"),
    ),
    *_in(
        "flexsp/nn/attention/local.py",
        ("end = at + 1\n", "end = at + 2\n", "a token sees the next one",
         "tests/nn/test_attention.py::test_equals_the_token_loop[3]"),
        ("(block + _BLOCK <= end[top, None])", "(block + _BLOCK <= end[bottom, None])", "blocks on the diagonal count as whole",
         "tests/nn/test_attention.py::test_blocks_of_the_mask[None-True-False]"),
    ),
    *_in(
        "flexsp/nn/attention/function.py",
        (", scale {scale:.6g}", "", "ranks do not compare scales",
         "tests/nn/test_attention_ranks.py::test_ranks_that_disagree[scale]"),
    ),
]

MUTATIONS = [
    *KERNELS, *ASSEMBLY, *GATES, *HOSTS, *OBJECTIVES, *MEMORY, *_SCAN, *_COMPILER, *STATES, *PROGRAMS, *_FACES, *_BETWEEN,
    *_ATTENTION, *TRANSFORMERS, *FAULTS, *FLA, *PLANNER, *SIMULATION, *EXAMPLES, *STARTING, *OPS,
    *BITWISE,
]  # fmt: skip
# ruff: noqa: E501 (texts of code are kept whole)
