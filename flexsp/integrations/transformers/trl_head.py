"""What the trainers of TRL call of a model, over ranks.

They give a model another forward (``add_fused_lm_head``), which returns log-probabilities, entropies and other numbers
of single tokens, and make all of a loss from these. The forward here cuts the batch, and gathers the numbers: a few
floats a token. So every rank of a sequence computes the whole loss, and gradients averaged over the ranks are its
gradients, whatever the loss is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexsp.comm.collectives import sum_over_ranks
from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import NotAvailable, fail
from flexsp.integrations.transformers.batch import IGNORED, KEY, shard
from flexsp.integrations.transformers.causal import SCORES
from flexsp.integrations.transformers.forwards import ranks_of_model, wrap_forward
from flexsp.integrations.transformers.parallelized import parallelize
from flexsp.integrations.transformers.scores import FIELDS, Scores

__all__ = ["Rollouts", "home_of", "over_ranks"]

_ADDS = "add_fused_lm_head"
_UNUSED = ("use_cache", "num_items_in_batch")  # no loss is made here
_TRIED = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")


def home_of(trainer: type) -> Any:
    """The module of TRL's class among the bases of a trainer; None without one.

    Raises:
        NotAvailable: a trainer, or a release of TRL, that was not tried.
    """
    classes = [cls for cls in trainer.__mro__ if cls.__module__.startswith("trl.")]
    if not classes:
        return None
    home = sys.modules[classes[0].__module__]
    if classes[0].__name__ not in _TRIED or not hasattr(home, _ADDS):
        raise NotAvailable(
            f"{classes[0].__name__} of TRL over ranks: of TRL 1.16, {', '.join(_TRIED)} were tried. Make a loss of "
            "flexsp.integrations.transformers.log_probs in a compute_loss of your own (docs/transformers.md)"
        )
    return home


@contextlib.contextmanager
def over_ranks(home: Any, sp: SequenceParallel) -> Iterator[None]:
    """Inside, a trainer of this module of TRL gives its models a forward over ranks."""
    if home is None:
        yield
        return
    before = getattr(home, _ADDS)
    setattr(home, _ADDS, functools.partial(_add_head, sp, inspect.getmodule(before)))
    try:
        yield
    finally:
        setattr(home, _ADDS, before)


class Rollouts:
    """What GRPOTrainer draws, dealt out to rows of ranks and the same on the ranks of a row.

    A base of the class that has the ranks ``_ranks``, and all rows of them, ``_rows``.
    """

    args: Any
    accelerator: Any
    model: Any
    state: Any
    _metrics: Any
    _ranks: SequenceParallel
    _rows: list[tuple[int, ...]]

    def _set_up_rollouts(self) -> None:
        if not hasattr(self, "num_generations"):
            return
        from accelerate.utils import set_seed

        args, row = self.args, self._rows.index(tuple(self._ranks.global_ranks))
        args.generation_batch_size = args.per_device_train_batch_size * len(self._rows) * args.steps_per_generation
        set_seed(args.seed + row)  # TRL gives each process a seed of its own

    def _problems_of_rollouts(self) -> Iterator[str]:
        if self._ranks.world_size == 1 or not hasattr(self, "num_generations"):
            return
        args, twice = self.args, "would count rewards or entropies of a row once for each of its ranks"
        sizes = [("train", args.per_device_train_batch_size * args.steps_per_generation, self.num_generations)]
        if getattr(self, "eval_dataset", None) is not None:
            sizes.append(("eval", args.per_device_eval_batch_size, self.num_generations_eval))  # type: ignore[attr-defined]
        for kind, completions, group in sizes:
            if completions % group:
                yield (
                    f"per_device_{kind}_batch_size: {completions} completions of a row and generation are no whole "
                    f"groups of {group} (num_generations)"
                )
        if args.use_vllm or args.use_transformers_continuous_batching:
            yield "use_vllm and use_transformers_continuous_batching were not tried over ranks"
        if args.scale_rewards == "batch" or args.multi_objective_aggregation == "normalize_then_sum":
            yield f"scale_rewards='batch' and multi_objective_aggregation='normalize_then_sum' {twice}"
        if args.top_entropy_quantile < 1:
            yield f"top_entropy_quantile {twice}"

    def _generate(self, *args: Any) -> Any:
        before = self.state.num_input_tokens_seen
        found = [super()._generate(*args)]  # type: ignore[misc]
        if self._ranks.world_size > 1:
            dist.broadcast_object_list(found, self._ranks.global_ranks[0], self._ranks.cpu_group)
        seen = before + (self.state.num_input_tokens_seen - before) // self._ranks.world_size
        self.state.num_input_tokens_seen = seen
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [seen]
        return found[0]

    def _calculate_rewards(self, *args: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args)  # type: ignore[misc]
        of_ranks = rewards.unflatten(0, (self.accelerator.num_processes, -1)).clone()
        for row in self._rows:
            of_ranks[list(row)] = of_ranks[row[0]].clone()
        return of_ranks.flatten(0, 1)


def _add_head(
    sp: SequenceParallel, home: Any, model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:  # fmt: skip
    """In place of TRL's function of these arguments. A reference model that TRL has loaded is parallelized."""
    if cast_lm_head_to_fp32:
        fail("cast_lm_head_to_fp32", "False over ranks", True)
    unknown = [name for name in outputs if name not in FIELDS]
    if unknown:
        raise NotAvailable(f"TRL asks a model for {', '.join(unknown)}, which only later releases than 1.16 do")
    if ranks_of_model(model) is None:
        parallelize(model, sp)
    scores = Scores(outputs, temperature)
    wrap_forward(model, functools.partial(_with_head, sp, scores, home.FusedCausalLMOutput))


def _with_head(
    sp: SequenceParallel, scores: Scores, output: Callable[..., Any], parallelized: Callable[..., Any], *args: Any,
    fused_lm_head: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """The forward of `parallelize`, or numbers of the tokens of a whole batch on every rank.

    Without ``shift_labels`` they are [B, T - 1]: the first number is of the second token.
    """
    if not fused_lm_head:
        return parallelized(*args, **kwargs)
    routers = {name: kwargs.pop(name) for name in ("output_router_logits",) if name in kwargs}
    given = {name: x for name, x in kwargs.items() if name not in _UNUSED}
    batch, places = _without_padding_on_the_left(given)
    made = shard(batch, sp)
    shifted: Tensor | None = batch.get("shift_labels")
    found = parallelized(**made, **routers, **{SCORES: scores})
    with made[KEY].known_lengths():
        every = sp.gather(torch.stack([found[name] for name in scores.fields], -1))
    if shifted is None:  # each number at its label
        every = torch.cat([torch.zeros_like(every[:, :1]), every[:, :-1]], 1)
        if places is not None:
            every = torch.zeros_like(every).scatter(1, places[..., None].expand_as(every), every)
        every = every[:, 1:]
    fields = dict(zip(scores.fields, every.unbind(-1), strict=True))
    if "is_top1" in fields:
        fields["is_top1"] = fields["is_top1"].bool()
    balance = found.get("aux_loss")
    if balance is not None and sp.world_size > 1:  # the whole value on every rank; its gradient is the mean of theirs
        balance = balance + (sum_over_ranks(balance, sp) / sp.world_size - balance).detach()
    labels = given["labels"][:, 1:] if shifted is None else shifted
    return output(label_mask=labels != IGNORED, aux_loss=balance, **fields)


def _without_padding_on_the_left(batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """The batch with all padding on the right, and where in its row each token was; None if nothing was moved."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return batch, None
    padding = mask == 0
    begins = padding[:, :-1] & ~padding[:, 1:]
    if not bool(begins.any()):
        return batch, None
    if bool((begins.sum(1) + ~padding[:, 0] > 1).any()):
        fail("attention_mask", "tokens of a row side by side", "padding between them")
    others = {*batch} - {"input_ids", "attention_mask", "labels"}
    if others:
        fail("attention_mask", f"padding on the right beside {', '.join(sorted(others))}", "padding on the left")
    places = padding.to(torch.int8).argsort(dim=1, stable=True)
    moved = {name: x.gather(1, places) for name, x in batch.items()}
    return {**moved, "labels": moved["labels"].masked_fill(moved["attention_mask"] == 0, IGNORED)}, places
