"""The forward on a shard of base models, and of models that classify sequences or tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsp.comm.collectives import exchange_rows
from flexsp.exceptions import fail
from flexsp.integrations.transformers.batch import IGNORED, Shard
from flexsp.integrations.transformers.causal import CausalModel, Task, run_layers

__all__ = ["NONE", "SEQUENCES", "TOKENS"]

Base = Callable[..., Any]


def _run_base_model(causal: CausalModel, model: Any, base: Base, shard: Shard, call: dict[str, Any]) -> Any:
    as_dict = call.pop("return_dict", model.config.return_dict)
    outputs = run_layers(causal, base, shard, call)
    return outputs if as_dict else outputs.to_tuple()


def _run_sequences(causal: CausalModel, model: Any, base: Base, shard: Shard, call: dict[str, Any]) -> Any:
    """Every rank gets the logits of all rows, and so the whole loss; gradients of the logits add up over the ranks."""
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast

    if shard.cu_seqlens is not None:
        fail("batch", "one sequence a row (the head takes the last token of a row)", "packed documents")
    labels, ids = call.pop("labels", None), call.get("input_ids")
    as_dict, padding = call.pop("return_dict", model.config.return_dict), model.config.get_text_config().pad_token_id
    if padding is None and shard.batch != 1:
        fail("batch", "one row, where the config has no pad_token_id", f"{shard.batch} rows")
    outputs = run_layers(causal, base, shard, call)
    logits = _of_last_tokens(model.score, outputs.last_hidden_state, None if padding is None else ids, padding, shard)
    loss = None
    if labels is not None:
        loss = model.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=model.config)
    made = SequenceClassifierOutputWithPast(loss=loss, logits=logits, hidden_states=outputs.get("hidden_states"))
    return made if as_dict else made.to_tuple()


def _of_last_tokens(score: Any, hidden: Tensor, ids: Tensor | None, padding: Any, shard: Shard) -> Tensor:
    """Logits [B, labels] of each row's last token that is not ``padding``, or of its last one without ``ids``."""
    B, T = hidden.shape[:2]
    rows = torch.arange(B, device=hidden.device)
    here = torch.ones(B, T, dtype=torch.bool, device=hidden.device) if ids is None else ids.ne(padding)
    last = (torch.arange(T, device=hidden.device) * here).argmax(-1)
    mine = score(hidden[rows, last])
    if shard.sp.world_size == 1:
        return mine
    sent = torch.cat([mine, here.any(-1, keepdim=True).to(mine.dtype)], -1)
    S = shard.sp.world_size
    every = exchange_rows(sent.repeat(S, 1), [B] * S, [B] * S, "logits of rows", shard.sp).view(S, B, -1)
    ranks = torch.arange(S, device=hidden.device)[:, None]
    return every[(ranks * (every[..., -1] != 0)).argmax(0), rows, :-1]


def _run_tokens(causal: CausalModel, model: Any, base: Base, shard: Shard, call: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import TokenClassifierOutput

    labels, as_dict = call.pop("labels", None), call.pop("return_dict", model.config.return_dict)
    counted = shard.counted
    if labels is not None and (tuple(labels.shape) != (shard.batch, shard.length) or counted is None):
        fail("labels", "labels of tokens that shard(batch, sp, shift=False) made", list(labels.shape))
    outputs = run_layers(causal, base, shard, call)
    logits, loss = model.score(model.dropout(outputs.last_hidden_state)), None
    if labels is not None and counted is not None:
        each = logits.reshape(-1, model.config.num_labels).float()
        loss = F.cross_entropy(each, labels.flatten(), ignore_index=IGNORED, reduction="sum") / counted
        loss = loss * shard.sp.world_size
    made = TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.get("hidden_states"))
    return made if as_dict else made.to_tuple()


NONE, SEQUENCES, TOKENS = Task(_run_base_model, None), Task(_run_sequences, "labels"), Task(_run_tokens, "labels")
