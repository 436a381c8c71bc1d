# ruff: noqa: E501 (texts of code are kept whole)
"""Changes of flexsp/integrations and its example that tests/mutate.py makes; see tests/mutations.py."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["TRANSFORMERS"]

_MODELS = "tests/test_transformers.py::test_equals_the_whole_model"
_TRAINING = "tests/test_transformers_training.py::"
_BATCH = "tests/test_transformers_batch.py::"
_LATER = "tests/test_transformers_later.py::"
_FAMILIES = "tests/test_transformers_families.py::test_equals_the_whole_model"
_HEADS = "tests/test_transformers_heads.py::"
_EXAMPLE = "tests/test_train_hybrid.py::"

TRANSFORMERS = [
    *_in(
        "flexsp/integrations/transformers/batch.py",
        ("F.pad(labels, (0, 1), value=IGNORED)[:, 1:]", "labels", "labels are not shifted",
         _BATCH + "test_labels_move_over_the_edges"),
        ("again = again[0] if len(again) == 4 else again.all(0)", "again = again[-1]",
         "places of images are taken for documents", _BATCH + "test_where_positions_begin_documents[image]"),
        ("again = positions.diff(dim=-1) <= 0", "again = positions.diff(dim=-1) != 1", "a jump ahead begins a document",
         _BATCH + "test_where_positions_begin_documents[a jump ahead]"),
        ("set() if positions is None else _starts", "set() if positions is None or mask is None and \"attention_mask\" in given else _starts",
         "with a mask of ones, positions say nothing", _BATCH + "test_documents[position_ids]"),
        ("shifted = labels\n", "shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]\n", "labels of tokens are shifted",
         _HEADS + "test_tokens_are_classified[minimax]"),
        ("        again = again & mask[:, 1:].to(again.device)\n", "        pass\n", "positions of padding begin documents",
         _BATCH + "test_where_positions_begin_documents[padding]"),
        ("    _compare(sp, given, lengths)\n", "", "ranks do not compare their batches",
         _BATCH + "test_ranks_with_other_batches"),
        ("positions = positions - starts[", "positions = positions - 0 * starts[", "positions go on over documents",
         _BATCH + "test_documents[seq_idx]"),
        ("kept[:, 1:] & ~kept[:, :-1]", "kept[:, 1:] & ~kept[:, 1:]", "padding on the left is taken",
         _BATCH + "test_refused_batches[left]"),
    ),
    *_in(
        "flexsp/integrations/transformers/loss.py",
        ("return torch.stack(losses).sum() * shard.sp.world_size", "return torch.stack(losses).sum()", "the loss is a share",
         _MODELS + "[mamba2]"),
        ("losses.append(checkpoint(block_loss, *block, use_reentrant=False) if with_grad else block_loss(*block))",
         "losses.append(block_loss(*block))", "all logits are kept",
         _TRAINING + "test_memory_of_the_loss"),
        ("share = sum_over_ranks(chosen, shard.sp) if shard.sp.world_size > 1 else chosen", "share = chosen",
         "experts are balanced over one rank's tokens", _MODELS + "[qwen3_next]"),
        ("probabilities, picked = probabilities[keep], picked[keep]", "pass", "padding counts for experts",
         _TRAINING + "test_equals_the_whole_model[qwen3_next-padding]"),
        ("* (z_loss / shard.kept)", "* (z_loss / labels.numel())", "the z-loss is a mean over a block",
         _TRAINING + "test_equals_the_whole_model[bamba-blocks]"),
    ),
    *_in(
        "flexsp/integrations/transformers/functions.py",
        ("weight, bias, shard.cu_seqlens)", "weight, bias)", "convolutions reach into another document",
         _MODELS + "[kimi_linear]"),
        ("gate, delta_bias, delta_softplus, **ranks", "gate, delta_bias, False, **ranks", "steps of Mamba-1 have no softplus",
         _FAMILIES + "[mamba]"),
        ("dt_softplus, dt_limit=dt_limit,", "dt_softplus,", "steps have no limits", _MODELS + "[mamba2]"),
        ("scale=scaling, window=sliding_window", "scale=scaling", "windows are forgotten",
         _BATCH + "test_sliding_windows", _FAMILIES + "[lara_mini]", _FAMILIES + "[lfm3]"),
    ),
    *_in(
        "flexsp/integrations/transformers/own_forwards.py",
        (".log()\n", ".log() * 0.9\n", "RG-LRU has other gates", _FAMILIES + "[recurrent_gemma]"),
        ("    decay = -module.slope_rate", "    decay = -0.9 * module.slope_rate", "lightning attention has other slopes", _FAMILIES + "[minimax]"),
        ("(*every, hidden) if mamba", "(*every,) if mamba", "the normalised hidden states are left out",
         _HEADS + "test_a_base_model[falcon_mamba-Model]"),
    ),
    *_in(
        "flexsp/integrations/transformers/xlstm.py",
        ("return h - h.detach() * change.unsqueeze(-1).to(h.dtype), None", "return h, None", "xLSTM's stabiliser has no derivative",
         _FAMILIES + "[xlstm]"),
        ("torch.minimum(eps / (small + eps), 1 - ratio.squeeze(-1).abs())", "(eps / (small + eps))", "xLSTM's denominator is its lower bound",
         _FAMILIES + "[xlstm]"),
    ),
    *_in(
        "flexsp/integrations/transformers/heads.py",
        ("else ids.ne(padding)", "else ids.ne(-1)", "padding is classified", _HEADS + "test_sequences_are_classified"),
        ("(ranks * (every[..., -1] != 0)).argmax(0)", "(every[..., -1] != 0).int().argmax(0)", "the first rank's token is classified",
         _HEADS + "test_sequences_are_classified"),
        ("        loss = loss * shard.sp.world_size\n", "", "the loss of tokens is a share", _HEADS + "test_tokens_are_classified[minimax]"),
        ("    if shard.cu_seqlens is not None:\n", "    if False:\n", "packed documents are one sequence", _HEADS + "test_refused_sequences"),
    ),
    *_in(
        "flexsp/integrations/transformers/model.py",
        ("type(module).forward, found or {}, functools.partial(_entering, keeps=_takes_more(module))",
         "type(module).forward, found or {}, None", "layers that are computed again have no shard", _FAMILIES + "[jamba]"),
    ),
    *_in(
        "flexsp/integrations/transformers/forwards.py",
        ("        space = {**space, **names}\n", "        space.update(names)\n", "other models in the process change",
         _BATCH + "test_nothing_else_changes[zamba2]"),
        ("        space.pop(\"__name__\", None)", "        space.pop(\"__none__\", None)", "compiled layers look functions up elsewhere",
         "tests/test_fla_checks.py::test_layers_are_compiled"),
        ("    setattr(module, _MARK, _Kept())\n", "    setattr(module, _MARK, True)\n", "a pickle forgets parallelize",
         _LATER + "test_a_pickle"),
        ("    del forward.__wrapped__", "    forward.__wrapped__", "accelerate takes the wrong wrapper off",
         _LATER + "test_accelerate_takes_its_wrapper_off"),
        ("    if others:\n", "    if False:\n", "a model is put back by half", _LATER + "test_another_forward_takes_the_place"),
    ),
    *_in(
        "flexsp/integrations/transformers/causal.py",
        ("if sp.world_size > 1 and module.training and torch.is_grad_enabled():", "if False:",
         "training without a shard is not noticed", _BATCH + "test_training_without_a_shard"),
        ("        if came:\n", "        if False:\n", "a mixer that came later runs on one rank's tokens",
         _BATCH + "test_a_mixer_that_came_later"),
        ("    elif not isinstance(shard, Running):", "    elif False:", "another forward may take the place of the model's",
         _LATER + "test_another_forward_takes_the_place"),
        ("    if noise is not None and", "    if False and", "noise of embeddings has the length of a shard",
         _BATCH + "test_noise_of_embeddings"),
        ("        if shard.keep is not None and", "        if False and", "the z-loss forgets padding",
         _BATCH + "test_padding_and_a_loss_that_counts_it"),
        ("return forward(*args) if loss_of is None else loss_of(forward, *args)",
         "return forward(*args) if loss_of is None else loss_of(head, *args)",
         "hooks of the head run for each block", _TRAINING + "test_on_a_mesh[fsdp-qwen3_next]"),
    ),
    *_in(
        "flexsp/integrations/transformers/check.py",
        ("    found = {name: is_replaced(module) for", "    found = {name: True for", "layers that came later are taken",
         _BATCH + "test_a_mixer_that_came_later"),
        ("getattr(module, name, 0) > most", "False", "heads that no operator takes", _BATCH + "test_refused_models_name_everything"),
        ("    elif len(found) < mixers:", "    elif False:", "layers that were taken out", _BATCH + "test_a_mixer_that_came_later"),
        ("not _is_activated(module)", "True", "activated LoRA looks for its tokens in a shard", _LATER + "test_refused_adapters"),
        ("for kind in rope.values() if isinstance(rope, dict) else (rope,):", "for kind in (rope,):", "dynamic rotary embeddings of one kind of layers",
         _HEADS + "test_rotary_embeddings_of_kinds_of_layers"),
        ("return kind == seam.base or", "return kind == \"Model\" or", "a base model that takes images", _HEADS + "test_models_that_take_images_lead_to_their_language_model"),
        ("found is not None and (callable(found) or \"causal_conv1d_fn\" in found)", "found is not None", "a convolution in a layer around a mixer",
         _HEADS + "test_a_convolution_around_a_mixer"),
        ('"miss", "oft", "shira", "vera",', '"miss", "oft", "poly", "vera",', "another list of adapters",
         _LATER + "test_refused_adapters", _LATER + "test_adapters[named]"),
        ('_BY_LENGTH = ("dynamic", "longrope")', '_BY_LENGTH = ("longrope",)', "dynamic rotary embeddings are taken",
         _BATCH + "test_refused_models_name_everything"),
    ),
    *_in(
        "examples/token_data.py",
        ("labels[inputs == separator] = IGNORED", "pass", "a separator predicts the next document",
         _EXAMPLE + "test_documents_of_a_window"),
        ("default_rng([seed, epoch])", "default_rng([seed])", "every epoch has the same order",
         _EXAMPLE + "test_an_epoch_takes_every_window_once"),
    ),
    *_in(
        "examples/pretrained.py",
        ("    if text is config:\n", "    if True:\n", "nothing is said of what images need", _EXAMPLE + "test_a_model_of_text_and_images_is_told"),
    ),
    *_in(
        "examples/train_hybrid.py",
        ("first = step * s.batch + self.mesh.row", "first = self.mesh.row", "every step takes the same sequences",
         _EXAMPLE + "test_steps_take_one_sequence_after_another"),
        ("(self.steps - step) / (self.decay + 1)", "(self.steps - step) / max(1, self.decay)", "the rate falls late",
         _EXAMPLE + "test_stopped_and_resumed_equals_not_stopped"),
    ),
]
