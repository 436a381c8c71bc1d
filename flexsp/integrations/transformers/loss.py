"""The loss of a shard: cross entropy by blocks of tokens, and the loss of routers over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexsp.comm.collectives import sum_over_ranks
from flexsp.integrations.transformers.batch import IGNORED, Shard

__all__ = ["by_blocks", "language_loss", "router_loss"]

_LOGITS = 1 << 26  # logits in a block at most: 256 MiB in float32


def by_blocks(
    of_block: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor, vocabulary: int,
    rows: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """``of_block`` of each block of tokens. Only one block's logits are in memory at a time: the backward pass computes
    them again.

    Args:
        of_block: from hidden states [n, D] and labels [n].
        hidden: [B, T_local, D].
        labels: int64 [B, T_local].
        vocabulary: logits of a token.
        rows: tokens of a block; None for as many as 256 MiB of float32 hold.
    """
    rows = max(1, _LOGITS // vocabulary) if rows is None else rows
    blocks = zip(hidden.flatten(0, 1).split(rows), labels.flatten().split(rows), strict=True)
    if not torch.is_grad_enabled():
        return [of_block(*block) for block in blocks]
    return [checkpoint(of_block, *block, use_reentrant=False) for block in blocks]


def language_loss(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, vocabulary: int, shard: Shard,
    counted: int | float | Tensor, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """Cross entropy of this rank's tokens divided by ``counted``, times the number of ranks. Its mean over the ranks is
    the loss of the whole batch. By blocks of tokens, see `by_blocks`.

    Args:
        logits_of: hidden states [n, D] -> logits [n, vocabulary].
        hidden: [B, T_local, D].
        labels: int64 [B, T_local], of the next tokens.
        z_loss: factor on the mean, over all tokens, of the square of log(sum(exp(logits))).
    """
    if isinstance(counted, Tensor):
        counted = counted.to(hidden.device)

    def block_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = logits_of(hidden)
        found = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum") / counted
        if z_loss:
            found = found + logits.logsumexp(-1).to(found.dtype).square().sum() * (z_loss / shard.kept)
        return found

    return torch.stack(by_blocks(block_loss, hidden, labels, vocabulary)).sum() * shard.sp.world_size


def router_loss(router_logits: Sequence[Tensor], experts: int, top_k: int, shard: Shard) -> Tensor:
    """This rank's part of the loss that balances experts (Fedus et al. 2021, Switch Transformers, arXiv 2101.03961,
    eq. 4 to 6), times the number of ranks: its mean over the ranks is the loss of all tokens. Collective.

    The share of tokens that an expert gets has no gradient, so ranks exchange only these counts.

    Args:
        router_logits: [B * T_local, experts] of each layer.
    """
    rows = len(router_logits) * shard.kept
    keep = None if shard.keep is None else shard.keep.flatten()
    chosen = torch.zeros(experts, dtype=torch.float64, device=router_logits[0].device)
    likely = torch.zeros(experts, dtype=torch.float32, device=router_logits[0].device)
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        picked = probabilities.topk(top_k, dim=-1).indices
        if keep is not None:
            probabilities, picked = probabilities[keep], picked[keep]
        chosen += picked.flatten().bincount(minlength=experts)
        likely = likely + probabilities.float().sum(0)
    share = sum_over_ranks(chosen, shard.sp) if shard.sp.world_size > 1 else chosen
    return shard.sp.world_size * experts * ((share / rows).to(likely.dtype) * likely / rows).sum()
