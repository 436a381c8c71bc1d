"""`SequenceParallelTrainer`: transformers' Trainer on sequences that are cut over ranks.

To accelerate every rank is a process with data of its own. The class deals batches to rows of ranks, which share a
sequence, and tells the Trainer that the ranks of a row have the same data, as those of tensor parallelism do
(`get_tp_size`): it counts a step's labels, and scales its loss, for that itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from flexsp.comm.collectives import sum_over_ranks
from flexsp.comm.group import SequenceParallel
from flexsp.exceptions import fail
from flexsp.integrations.transformers import trl_head
from flexsp.integrations.transformers.batch import KEY, shard
from flexsp.integrations.transformers.causal import SCORES
from flexsp.integrations.transformers.check import without_adapters
from flexsp.integrations.transformers.forwards import ranks_of_model
from flexsp.integrations.transformers.scores import Scores

__all__ = ["SequenceParallelTrainer"]

OWN_LOSS = "override compute_loss, and make a loss of flexsp.integrations.transformers.log_probs"


class SequenceParallelTrainer(trl_head.Rollouts, Trainer):  # type: ignore[misc]
    """transformers' Trainer for a causal language model that `parallelize` has changed.

    It takes the arguments of ``transformers.Trainer``, but for ``model_init``. A *row* is the ranks of one sequence;
    the processes are rows of one size. Losses, gradient norms, checkpoints and evaluations are those of that Trainer
    on the unmodified model with one process for each row.

    Every rank makes the same data set. Rows get batches as processes do elsewhere, and cut their sequences, to evaluate
    too. Where ``compute_metrics`` or ``predict`` ask for logits, evaluation runs the unmodified model, with whole
    sequences on each rank.

    Raises:
        ValueError: a model that `parallelize` has not changed, ranks that accelerate does not see (on CPU set
            ``use_cpu=True``), or an argument that would make training wrong on cut sequences: all of them, with what to
            do instead.
    """

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        self._ranks = _ranks_of(model)
        self._trl = trl_head.home_of(type(self))
        with trl_head.over_ranks(self._trl, self._ranks):
            super().__init__(model, *args, **kwargs)
        problems = [*self._problems(), *self._problems_of_rollouts()]
        if problems:
            fail("arguments", "those that train right on cut sequences", "\n  ".join(["", *problems]))
        self._set_up_rollouts()
        self.add_callback(_MasksOfRanks(self._ranks.rank))

    # Rows of ranks -------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._rows = _rows(self._ranks, self.accelerator)
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        self.accelerator.gather_for_metrics = self._gather_for_metrics
        self.gather_function = self._gather_for_metrics

    def _prepare_data_loader(self, loader: Any, device_placement: bool | None = None, slice_fn: Any = None) -> Any:
        """What accelerate does, with rows in place of processes."""
        known = self.accelerator
        if getattr(loader, "_is_accelerate_prepared", False):
            return Accelerator.prepare_data_loader(known, loader)
        made = prepare_data_loader(
            loader, known.device, len(self._rows), self._row, split_batches=known.split_batches,
            put_on_device=known.device_placement if device_placement is None else device_placement,
            rng_types=known.rng_types.copy(), dispatch_batches=False, even_batches=known.even_batches,
            use_seedable_sampler=known.use_seedable_sampler, data_seed=known.dataloader_config.data_seed,
            non_blocking=known.non_blocking, use_stateful_dataloader=known.use_stateful_dataloader,
        )  # fmt: skip
        known._dataloaders.append(made)
        return made

    @property
    def _row(self) -> int:
        return self._rows.index(tuple(self._ranks.global_ranks))

    def _gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Of each row once, so that accelerate cuts off what it dealt out twice at the end of an evaluation."""
        self.accelerator.gather = self._gather_rows
        try:
            return Accelerator.gather_for_metrics(self.accelerator, *args, **kwargs)
        finally:
            del self.accelerator.gather

    def _gather_rows(self, data: Any) -> Any:
        firsts, processes = [ranks[0] for ranks in self._rows], self.accelerator.num_processes

        def of_rows(x: Tensor) -> Tensor:
            return x.unflatten(0, (processes, -1))[firsts].flatten(0, 1)

        return recursively_apply(of_rows, gather(data)) if processes > 1 else gather(data)

    def get_tp_size(self) -> int:
        """How many processes have the same batch."""
        size: int = super().get_tp_size()
        return size * self._ranks.world_size

    def floating_point_ops(self, inputs: Any) -> float:
        every: float = super().floating_point_ops(inputs)
        return every / self._ranks.world_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = (
            before + (self.state.num_input_tokens_seen - before) // self._ranks.world_size
        )

    # Losses --------------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if num_items_in_batch is not None and not self.args.average_tokens_across_devices:
            num_items_in_batch = num_items_in_batch * self._ranks.world_size  # of this rank; the Trainer divided it
        if self._trl or not self._cuts:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        made = shard(inputs, self._ranks)
        if self.label_smoother is None:
            return super().compute_loss(model, made, return_outputs, num_items_in_batch)
        asked = Scores(("log_probs",), smoothing=self.label_smoother.epsilon)
        outputs = model(**made, **{SCORES: asked})
        counted = made[KEY].counted if num_items_in_batch is None else num_items_in_batch
        loss = -outputs["log_probs"].sum() / counted * self._ranks.world_size
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    _cuts = True  # whether calls of compute_loss cut their batches

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        self._cuts = prediction_loss_only
        try:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._cuts = True
        if loss is not None and prediction_loss_only and self._ranks.world_size > 1:
            loss = sum_over_ranks(loss, self._ranks) / self._ranks.world_size
        return loss, logits, labels

    # Arguments -----------------------------------------------------------------------------------------------------

    def _problems(self) -> Iterator[str]:
        args, cut = self.args, "does not see whole sequences"
        yield from _differing(args)
        if args.n_gpu > 1:
            yield "one process sees several GPUs (start one process a GPU, as torchrun does)"
        if args.parallelism_config is not None or self.is_deepspeed_enabled:
            yield "parallelism_config and deepspeed would cut or deal out batches too"
        if self.accelerator.dispatch_batches:
            yield "accelerator_config: dispatch_batches deals out batches to ranks, not to rows"
        if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
            yield "train_sampling_strategy: batch_rebalance deals out batches to ranks, not to rows"
        if args.auto_find_batch_size:
            yield "auto_find_batch_size may change batches on one rank and not on the others"
        if args.use_liger_kernel:
            yield "use_liger_kernel puts a forward in place of the model's that takes a mean over one rank's labels"
        if args.neftune_noise_alpha is not None:
            yield f"neftune_noise_alpha: its noise {cut} (add it to the inputs_embeds of the whole batch)"
        if self.compute_loss_func is not None:
            yield f"compute_loss_func {cut} ({OWN_LOSS})"
        if self.label_smoother is not None:
            config = without_adapters(self.model).config
            if self._trl:
                yield "label_smoothing_factor: TRL makes logits of whole sequences for it"
            elif getattr(config, "output_router_logits", False) or getattr(config, "z_loss_coefficient", None):
                yield "label_smoothing_factor: with it transformers leaves out the loss of experts and the z-loss"


class _MasksOfRanks(TrainerCallback):  # type: ignore[misc]
    """Has each rank of a sequence draw other masks of dropout. The generator of the data's order is not touched."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if any(isinstance(module, nn.Dropout) and module.p for module in model.modules()):
            seed: Callable[[int], Any] = torch.cuda.manual_seed if args.device.type == "cuda" else torch.manual_seed
            seed(args.seed + self._rank)


# Of TrainingArguments: with others on one rank, it would make other losses or steps, or wait for the others.
_ALIKE = (
    "label_smoothing_factor", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "warmup_steps", "weight_decay", "max_grad_norm", "optim", "seed", "data_seed", "bf16", "fp16", "eval_strategy",
    "eval_steps", "save_strategy", "save_steps", "average_tokens_across_devices",
)  # fmt: skip


def _differing(args: Any) -> Iterator[str]:
    """Arguments that are not the same on all ranks. Collective over all processes."""
    mine = {name: str(getattr(args, name, None)) for name in _ALIKE}
    every: list[Any] = [mine]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    for name in _ALIKE:
        found = [x[name] for x in every]
        if len({*found}) > 1:
            yield f"{name}: the ranks have {', '.join(found[:8])} (give all of them the same)"


def _ranks_of(model: Any) -> SequenceParallel:
    inner = without_adapters(model)
    sp = ranks_of_model(inner) if isinstance(inner, nn.Module) else None
    if sp is None or inner.get_output_embeddings() is None:
        fail("model", "a causal language model that parallelize has changed", type(model).__name__)
    return sp


def _rows(sp: SequenceParallel, accelerator: Any) -> list[tuple[int, ...]]:
    """The ranks of each row, in order of their first ones. Collective over all processes."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != world:
        expected = f"the {world} ranks of torch.distributed (on CPU with use_cpu=True in TrainingArguments)"
        fail("accelerator", expected, f"{accelerator.num_processes} processes")
    mine = tuple(sp.global_ranks)
    if world == 1:
        return [mine]
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine)
    rows = sorted({*every})
    if sorted(rank for row in rows for rank in row) != [*range(world)] or len({len(row) for row in rows}) != 1:
        fail("sp", f"rows of equally many of the {world} ranks, each rank in one of them", rows)
    return rows
