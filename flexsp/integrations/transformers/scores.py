"""Numbers of single tokens that a language model gives on a shard: log-probabilities, entropies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from flexsp.exceptions import check_flag, check_integer, check_number, fail
from flexsp.integrations.transformers.batch import IGNORED, KEY, Shard
from flexsp.integrations.transformers.causal import SCORES, CausalModel, Head
from flexsp.integrations.transformers.loss import by_blocks

__all__ = ["FIELDS", "Scores", "log_probs"]


@overload
def log_probs(
    model: Any, batch: Mapping[str, Any], *, entropy: Literal[False] = False, temperature: float = 1.0,
    block: int | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def log_probs(
    model: Any, batch: Mapping[str, Any], *, entropy: Literal[True], temperature: float = 1.0, block: int | None = None
) -> tuple[Tensor, Tensor]: ...
def log_probs(
    model: Any, batch: Mapping[str, Any], *, entropy: bool = False, temperature: float = 1.0, block: int | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of the labels of this rank's tokens, for losses of one's own: DPO, GRPO, distillation of a
    reward. Collective, as a call of the model is.

    Logits are made for a block of tokens at a time, in the forward pass and once more in the backward pass.

    Token t has the log-probability of the token after it, as ``shift_labels`` do. It is 0, without a gradient, where
    the label is -100: give the tokens of prompts this label.

    Losses of single tokens are averaged by ``sp.token_mean``. A loss of sums over rows, as DPO's, takes
    ``sp.gather(log_probs(...))`` [B, T], and every rank computes all of it. Gradients averaged over the ranks are those
    of one rank then, in both cases. The loss that balances experts is not in it.

    Args:
        model: a causal language model that `parallelize` has changed, inside DDP, fully_shard or a PeftModel or not.
            Call it in `torch.no_grad` for a reference model, with ``model.disable_adapter()`` for one without adapters.
        batch: what `shard` returned for a batch with labels.
        entropy: also return the entropies of the next token's distribution, in nats, 0 where the label is -100.
        temperature: logits are divided by this number first, > 0.
        block: tokens of a block; None for as many as 256 MiB of logits in float32 hold.

    Returns:
        float32 (float64 for a model in float64) [B, T_local], or two such tensors.

    Raises:
        ValueError: a batch without labels or that `shard` did not make, or a model that `parallelize` did not change.

    Example: ``loss = -sp.token_mean(advantages * log_probs(model, batch), batch["shift_labels"] != -100)``
    """
    check_flag("entropy", entropy)
    check_number("temperature", temperature, above=0)
    if block is not None:
        check_integer("block", block, least=1)
    if not isinstance(batch, Mapping) or not isinstance(batch.get(KEY), Shard):
        fail("batch", "what shard returns", type(batch).__name__ if not isinstance(batch, Mapping) else sorted(batch))
    fields = ("log_probs", "entropy") if entropy else ("log_probs",)
    asked = {**batch, SCORES: Scores(fields, temperature, block)}
    found = model(**asked)
    if not isinstance(found, Mapping) or "log_probs" not in found:
        fail("model", "a causal language model that parallelize has changed", type(model).__name__)
    return (found["log_probs"], found["entropy"]) if entropy else found["log_probs"]


def _log_probs(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)


def _entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


# From logits [n, vocabulary], labels [n] and the share of smoothing: a number of each token. All but the first two are
# what trainers of TRL log or weigh with, without gradients.
FIELDS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "log_probs": _log_probs, "entropy": _entropy,
    "mean_logits": lambda logits, labels, smoothing: logits.detach().mean(-1),
    "is_top1": lambda logits, labels, smoothing: (logits.detach().argmax(-1) == labels).to(logits.dtype),
    "log_sum_sq_probs": lambda logits, labels, smoothing: (2 * logits.detach().log_softmax(-1)).logsumexp(-1),
}  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """What a model's forward on a shard returns in place of the loss, and how.

    Attributes:
        fields: names of `FIELDS`.
        temperature: logits are divided by it.
        block: tokens of a block, or None.
        smoothing: the share of a label that goes to all tokens of the vocabulary alike.
    """

    fields: tuple[str, ...]
    temperature: float = 1.0
    block: int | None = None
    smoothing: float = 0.0

    def __call__(
        self, causal: CausalModel, model: Any, labels: Tensor, head: Head, hidden: Tensor
    ) -> dict[str, Tensor]:
        """Each field [B, T_local], in float32 or wider; 0 where the label is -100."""

        def of_block(hidden: Tensor, labels: Tensor) -> Tensor:
            logits = causal.logits(model, head, hidden)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
            found = [FIELDS[name](logits, labels, self.smoothing) for name in self.fields]
            return torch.stack(found).where(labels != IGNORED, 0.0)

        found = torch.cat(by_blocks(of_block, hidden, labels, model.config.vocab_size, self.block), -1)
        return dict(zip(self.fields, found.view(-1, *labels.shape), strict=True))
