"""The changes of tests/mutate.py to calls that have the same bits for any number of ranks."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["BITWISE"]

_BITS = "tests/ops/test_bitwise.py::test_bits_do_not_depend_on_ranks"
_PACKED = f"{_BITS}[gla-torch.float64-True]"
_SHARED = f"{_BITS}[mamba2_groups-torch.float16-False]"
_OF_LAYERS = "tests/nn/test_bitwise_layers.py"
_TRAINING = f"{_OF_LAYERS}::test_bits_of_training"
_KERNELS = "tests/ops/test_bitwise.py::test_bits_of_kernels_do_not_depend_on_ranks[gamma-torch.bfloat16]"

BITWISE = [
    *_in(
        "flexsp/scan/in_order.py",
        ("for dx in reversed(parts):", "for dx in parts:", "parameters are summed from the first segment on", _SHARED),
        ("return sums if target is None else [*zeros]", "return sums", "every rank has a part of the sum", _SHARED),
        (
            "for x in entering or []:",
            "for x in []:",
            "one rank's last states have no gradient where those of several have zeros",
            "tests/ops/test_bitwise.py::test_bits_of_gradients_of_outputs_alone[kda-torch.float64-False]",
        ),
        (
            "if length and at % size:",
            "if length and at % 1:",
            "shards begin inside of segments",
            "tests/ops/test_bitwise.py::test_shards_are_whole_segments",
        ),
        (
            "going_on = (self.begin < segment.start)",
            "going_on = (self.begin <= segment.start)",
            "a document that begins with a segment is taken to go on in it",
            _PACKED,
        ),
        (
            "((self.begin < segment.stop) | segment.last)",
            "(self.begin < segment.stop)",
            "documents without tokens at the end have no final states",
            _PACKED,
        ),
        (
            "and (packed or not sum(lengths)):",
            "and packed:",
            "states of a sequence without tokens do not pass through the op",
            "tests/ops/test_bitwise.py::test_initial_states_without_tokens",
        ),
        (
            "    return ctx.saved_tensors  # type",
            "    return ()  # type",
            "ranks without tokens send before they compute again",
            _TRAINING,
        ),
        (
            "mine.copy_(dx) if reach == 0 else mine.add_(dx)",
            "mine.copy_(dx)",
            "tokens that two segments read have the gradient of one",
            f"{_OF_LAYERS}::test_bits_of_layers",
        ),
        (
            "entering = entering if sp.is_first and segments else list(arrived)",
            "entering = entering",
            "ranks do not take the state of the one before",
            f"{_BITS}[simple_gla-torch.float32-False]",
        ),
    ),
    *_in(
        "flexsp/kernels/segments.py",
        (
            "in zip(reversed(scans), reversed(frames), strict=True)",
            "in zip(scans, frames, strict=True)",
            "gradients of states go from the first segment on",
            _KERNELS,
        ),
        (
            "dstate = dstate if source is None else from_message(arrived, [dstate])[0]",
            "dstate = dstate",
            "ranks do not take the gradient of the one behind",
            _KERNELS,
        ),
    ),
    *_in(
        "flexsp/kernels/executable.py",
        (
            "        first.copy_(entering.view(first.shape))\n",
            "",
            "the scan of a segment begins with zeros",
            _KERNELS,
        ),
    ),
    *_in(
        "flexsp/kernels/engine.py",
        (
            "if sp is not None and sp.segment:",
            "if sp is not None and sp.segment < 0:",
            "kernels cut the sequence by its ranks",
            _KERNELS,
        ),
    ),
    *_in(
        "flexsp/ops/_segments.py",
        (
            "return False if given.entered else asked",
            "return asked",
            "every segment begins a text",
            "tests/ops/test_bitwise.py::test_first_text_begins_with_a_weight_of_one",
        ),
        (
            "2 if kind.head_first and",
            "1 if kind.head_first and",
            "heads are cut in place of tokens",
            "tests/ops/test_bitwise.py::test_heads_before_tokens",
        ),
        (
            "if kind.kernels and _at_once(",
            "if _at_once(",
            "ops run at once that are no one call of kernels",
            "tests/ops/test_bitwise.py::test_kernels_run_all_segments_at_once",
        ),
    ),
    *_in(
        "flexsp/comm/group.py",
        (
            "if not (keeps_bits or ambient.keeps_bits):",
            "if found.segment < 0:",
            "softmax attention runs over a group that was made with bitwise",
            f"{_OF_LAYERS}::test_what_cannot_keep_its_bits_says_so",
        ),
        (
            "if ambient.in_segment:",
            "if found.segment < 0:",
            "an op takes a segment for all tokens of its rank",
            f"{_OF_LAYERS}::test_ops_are_not_run_on_one_segment",
        ),
    ),
    *_in(
        "flexsp/scan/by_segments.py",
        (
            "return sp if sp is not None and sp.segment and not ambient.in_segment else None",
            "return None",
            "projections are computed of whole shards",
            f"{_OF_LAYERS}::test_bits_of_layers",
        ),
        (
            "        new = {edge for edge in node.next_functions if edge[0] is not None} - seen\n",
            "        new = set()\n",
            "parameters are not found, and each rank has its own gradient",
            f"{_OF_LAYERS}::test_bits_of_layers",
        ),
        (
            "rows = {n: owned(x.narrow(*rows_of(x, segment, segments, _AXIS, reach))) for n, x in others.items()}",
            "rows = {n: owned(x.narrow(*rows_of(x, segments[0], segments, _AXIS, reach))) for n, x in others.items()}",
            "every segment has the first one's numbers of tokens",
            _TRAINING,
        ),
    ),
    *_in(
        "flexsp/nn/wrapper.py",
        (
            "if self._flexsp_sp.segment and isinstance(self, _TOKENWISE):",
            "if False:",
            "PyTorch's modules in a model run on whole shards",
            _TRAINING,
        ),
    ),
    *_in(
        "flexsp/grammar/flex_linear_attention.py",
        (
            "if chunk > 1 and cu_seqlens is not None:",
            "if False:",
            "segments cut the blocks of documents",
            f"{_OF_LAYERS}::test_what_cannot_keep_its_bits_says_so",
        ),
    ),
    *_in(
        "flexsp/compiler/in_segments.py",
        (
            "if made.program.disagrees is not None and cu_seqlens is not None:",
            "if False:",
            "segments cut the chunks of documents",
            f"{_OF_LAYERS}::test_what_cannot_keep_its_bits_says_so",
        ),
    ),
    *_in(
        "flexsp/launch/bootstrap.py",
        (
            'if schedule != "chain":\n        raise ValueError(f"schedule: expected \'chain\' with',
            'if schedule == "":\n        raise ValueError(f"schedule: expected \'chain\' with',
            "schedules whose sums have another order are taken",
            "tests/ops/test_bitwise.py::test_bad_groups",
        ),
    ),
    *_in(
        "flexsp/scan/by_segments.py",
        ("[x.clone() for x in outputs]", "[x.view_as(x) for x in outputs]", "outputs cannot be changed in place",
         f"{_OF_LAYERS}::test_outputs_can_be_changed_in_place[LayerNorm]"),
    ),
    *_in(
        "flexsp/nn/wrapper.py",
        ("or module.scale_grad_by_freq)", ")", "tokens are counted a segment at a time",
         f"{_OF_LAYERS}::test_modules_that_look_at_other_tokens_are_refused[scale_grad_by_freq]"),
    ),
]
