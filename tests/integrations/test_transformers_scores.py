"""Log-probabilities of labels on cut sequences, by blocks: those of the unmodified model, and losses made of them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexsp.comm.group import SequenceParallel
from flexsp.integrations.transformers import log_probs, parallelize, restore, shard, trl_head
from flexsp.testing import run_ranks
from tests.marks import slow
from tests.transformers_models import (
    VOCABULARY,
    Found,
    assert_exact,
    chunks,
    gradients,
    make,
    mean,
    packed,
    precision,
    rows,
)  # fmt: skip

pytest.importorskip("transformers")
RANKS, TEMPERATURE = 2, 0.7
Cut = tuple[list[int], dict[str, Any]]


def with_prompts(B: int, T: int) -> dict[str, Any]:
    """Rows whose first tokens are prompts, and whose last ones are padding."""
    ids, at = torch.randint(VOCABULARY, (B, T)), torch.arange(T)
    prompts, ends = torch.randint(1, T // 2, (B, 1)), torch.tensor([T, T - 3, T - 1])[:B, None]
    mask = (at < ends).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill((at < prompts) | (mask == 0), -100)}


def whole_scores(
    model: Any, batch: dict[str, Any], temperature: float = TEMPERATURE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of labels and entropies [B, T] from the unmodified model's logits, of each document."""
    ids, labels = batch["input_ids"], F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    bounds = batch["cu_seq_lens_q"].tolist() if "cu_seq_lens_q" in batch else [0, ids.shape[1]]
    with chunks(model, 16), precision(torch.float64):
        parts = [model(input_ids=ids[:, a:b]).logits for a, b in zip(bounds, bounds[1:], strict=False)]
    every = (torch.cat(parts, 1) / temperature).log_softmax(-1)
    kept = labels != -100
    chosen = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.where(kept, 0.0), -(every.exp() * every).sum(-1).where(kept, 0.0)


def loss_of(log_p: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Not linear in its arguments' sums, as losses of preferences are not."""
    return -F.logsigmoid(log_p.sum(-1)).sum() + 0.1 * (log_p * entropy).sum()


def _cut(sp: Any, name: str, calls: list[Cut]) -> list[Found]:
    model, found = parallelize(make(name).double(), sp), []
    for lengths, batch in calls:
        sp.set_lengths(lengths)
        with precision(torch.float64):
            made = shard(batch, sp)
            both = log_probs(model, made, entropy=True, temperature=TEMPERATURE, block=5)
            assert both[0].shape == made["shift_labels"].shape
            with torch.no_grad():
                alone = log_probs(model, made, temperature=TEMPERATURE)
            torch.testing.assert_close(alone, both[0].detach())
            log_p, entropy = (sp.gather(x) for x in both)
            loss_of(log_p, entropy).backward()
        found.append({"log_p": log_p.detach(), "entropy": entropy.detach(), **gradients(model)})
    return found


@pytest.mark.parametrize("name", ["olmo_hybrid", *slow("qwen3_next", "mamba2", "falcon_h1", "recurrent_gemma")])
def test_equal_those_of_the_whole_model(name: str) -> None:
    """In float64, with their gradients: uneven shards, prompts and padding, documents."""
    calls = [([17, 4], with_prompts(3, 21)), ([6, 15], packed([3, 11, 1, 6]))]
    per_rank = run_ranks(_cut, RANKS, name, calls)
    model = make(name, output_router_logits=False).double() if name == "qwen3_next" else make(name).double()
    for at, (_, batch) in enumerate(calls):
        log_p, entropy = whole_scores(model, batch)
        loss_of(log_p, entropy).backward()
        want = {"log_p": log_p.detach(), "entropy": entropy.detach(), **gradients(model)}
        assert_exact(mean([found[at] for found in per_rank]), want)
        for found in per_rank:
            assert_exact(found[at], {name: want[name] for name in ("log_p", "entropy")})


def _with_adapters(sp: Any, batch: dict[str, Any]) -> tuple[Found, Found]:
    """A loss of tokens, against the model without its adapters."""
    peft = pytest.importorskip("peft")
    sp.set_lengths([5, 13])
    torch.manual_seed(8)
    config = peft.LoraConfig(r=2, target_modules=["o_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(make("olmo_hybrid"), config).double()
    found = []
    for made in (shard(batch, sp), None):
        with precision(torch.float64):
            if made is None:
                sp.gather(torch.zeros(1, sp.lengths[sp.rank]))  # all ranks are here
                with model.disable_adapter(), torch.no_grad():
                    reference = log_softmax_of(model, batch)
                ratio = (log_softmax_of(model, batch) - reference).exp()
                loss = ratio[batch["labels"][:, 1:] != -100].square().mean()
            else:
                parallelize(model, sp)
                with model.disable_adapter(), torch.no_grad():
                    reference = log_probs(model, made)
                ratio = (log_probs(model, made) - reference).exp()
                loss = sp.token_mean(ratio.square(), made["shift_labels"] != -100)
            loss.backward()
        grads = {name: x for name, x in gradients(model).items() if "lora" in name}
        found.append({"loss": loss.detach(), **grads})
        if made is not None:
            restore(model)
    return found[0], found[1]


def log_softmax_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]


def test_a_reference_without_adapters() -> None:
    per_rank = run_ranks(_with_adapters, RANKS, rows(2, 18))
    want = per_rank[0][1]
    assert float(want["loss"]) > 1.001 and all(x.count_nonzero() for x in want.values())
    assert_exact(mean([got for got, _ in per_rank]), want)


@pytest.mark.parametrize("grad", [True, False])
def test_memory(grad: bool) -> None:
    """No tensor of all logits is made, and none is kept."""
    sp, most, kept = SequenceParallel(), 0, 0
    model, batch = parallelize(make("mamba2", num_hidden_layers=1), sp), rows(1, 300)

    def keep(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.numel() * (x.shape[-1:] == (VOCABULARY,))
        return x

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.shape[-1:] == (VOCABULARY,):
                most = max(most, made.numel())
            return made

    with torch.set_grad_enabled(grad), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), Watched():
        found = log_probs(model, shard(batch, sp), entropy=True, block=30)
    assert most == 30 * VOCABULARY
    assert found[0].dtype == found[1].dtype == torch.float32
    assert kept <= VOCABULARY * 24  # the weights of the head
    if grad:
        sum(x.sum() for x in found).backward()


def test_refused() -> None:
    sp = SequenceParallel()
    model, batch = parallelize(make("mamba2", num_hidden_layers=1), sp), rows(1, 9)
    made, base = shard(batch, sp), make("mamba2", num_hidden_layers=1)
    unlabelled = shard({"input_ids": batch["input_ids"]}, sp)
    for arguments, error in (
        ((model, batch), r"batch: expected what shard returns, got \['input_ids', 'labels'\]"),
        ((model, None), "batch: expected what shard returns, got NoneType"),
        ((model, unlabelled), "labels: expected labels, whose log-probabilities are asked for, got None"),
        ((base, made), "model: expected a causal language model that parallelize has changed, got Mamba2ForCausalLM"),
    ):
        with pytest.raises(ValueError, match=error):
            log_probs(*arguments)
    for changes, error in (
        ({"temperature": 0}, "temperature: expected a finite number > 0"),
        ({"block": 0}, "block: expected an integer >= 1"), ({"entropy": 1}, "entropy: expected True or False"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            log_probs(model, made, **changes)
    classes = parallelize(make("qwen3_next", kind="ForTokenClassification"), sp)
    with pytest.raises(ValueError, match="arguments: expected only .* got flexsp_scores"):
        log_probs(classes, shard(batch, sp, shift=False))


def losses_of_the_guide() -> dict[str, Any]:
    """The functions of docs/transformers.md, under "Log-probabilities, and losses made of them"."""
    document = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    (block,) = re.findall(r"```python\n(def grpo_loss.*?)```", document, flags=re.DOTALL)
    made: dict[str, Any] = {"torch": torch, "log_probs": log_probs}
    exec(block, made)
    return made


class Alone:
    """In place of a group, for the same functions on one rank."""

    gather = staticmethod(lambda x: x)
    token_mean = SequenceParallel().token_mean


def _losses_of_the_guide(sp: Any, batch: dict[str, Any], advantages: torch.Tensor, old: torch.Tensor) -> list[Found]:
    sp.set_lengths([9, 5])
    made, found = losses_of_the_guide(), []
    model, reference = (parallelize(make("mamba2"), sp).double() for _ in range(2))
    reference.lm_head.weight.data *= 1.1
    cut = shard(batch, sp)
    with precision(torch.float64):
        for loss in (
            made["grpo_loss"](model, cut, sp.shard(advantages), sp.shard(old), sp),
            made["dpo_loss"](model, reference, cut, sp),
        ):
            loss.backward()
            found.append({"loss": loss.detach(), **gradients(model)})
    return found


def test_losses_of_the_guide() -> None:
    batch, made = rows(4, 14), losses_of_the_guide()
    advantages, old = torch.randn(4, 14, dtype=torch.float64), -torch.rand(4, 14, dtype=torch.float64) - 3
    per_rank = run_ranks(_losses_of_the_guide, RANKS, batch, advantages, old)
    model, reference = (make("mamba2").double() for _ in range(2))
    reference.lm_head.weight.data *= 1.1
    made["log_probs"] = lambda of, _: whole_scores(of, batch, 1.0)[0]
    labels = {"shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]}
    for at, loss in enumerate((
        made["grpo_loss"](model, labels, advantages, old, Alone), made["dpo_loss"](model, reference, labels, Alone)
    )):  # fmt: skip
        loss.backward()
        assert_exact(mean([found[at] for found in per_rank]), {"loss": loss.detach(), **gradients(model)})


# The forward that trainers of TRL are given, without that library.


@dataclass
class FusedCausalLMOutput:
    label_mask: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def add_fused_lm_head(model: Any, temperature: float = 1.0, **_: Any) -> None:
    """TRL's function of this name; see `trl_head.over_ranks`."""
    raise AssertionError("the model got TRL's own forward")


NAMES = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


def padded_on_the_left() -> dict[str, Any]:
    """Prompts [B, 5] with padding before them, and answers [B, 6] with padding behind them."""
    before, behind = torch.tensor([0, 3, 1])[:, None], torch.tensor([0, 2, 4])[:, None]
    at, ids = torch.arange(11), torch.randint(VOCABULARY, (3, 11))
    mask = (at >= before) & (at < 11 - behind)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask | (at < 5), -100)}


def _with_head(sp: Any, batch: dict[str, Any]) -> Found:
    sp.set_lengths([7, 4])
    model = parallelize(make("mamba2"), sp).double()
    with trl_head.over_ranks(sys.modules[__name__], sp):
        add_fused_lm_head(model, temperature=TEMPERATURE, outputs=NAMES)
    with pytest.raises(AssertionError):
        add_fused_lm_head(model)
    with precision(torch.float64):
        found = model(**batch, fused_lm_head=True, use_cache=False)
        loss_of(found.log_probs, found.entropy).backward()
        made = {name: getattr(found, name).detach().double() for name in (*NAMES, "label_mask")}
        made |= gradients(model)
        before = model.eval()(batch["input_ids"]).logits  # calls of other code are the unmodified ones
        torch.testing.assert_close(before, restore(model)(batch["input_ids"]).logits)
    return made


def test_padding_that_the_forward_of_trl_refuses() -> None:
    sp, batch = SequenceParallel(), padded_on_the_left()
    model = parallelize(make("mamba2", num_hidden_layers=1), sp)
    with trl_head.over_ranks(sys.modules[__name__], sp):
        add_fused_lm_head(model)
    for changes, error in (
        ({"position_ids": torch.arange(11)[None]}, "padding on the right beside position_ids, got padding on the left"),
        ({"attention_mask": batch["attention_mask"].index_fill(1, torch.tensor(5), 0)}, "got padding between them"),
    ):
        with pytest.raises(ValueError, match=error):
            model(**{**batch, **changes}, fused_lm_head=True)


def test_the_forward_of_trl() -> None:
    """Of rows that are padded on both sides, every rank has all numbers."""
    batch = padded_on_the_left()
    per_rank = run_ranks(_with_head, RANKS, batch)
    model, labels = make("mamba2").double(), batch["labels"][:, 1:]
    rows_of = [x.bool() for x in batch["attention_mask"]]
    logits = torch.zeros(3, 10, VOCABULARY, dtype=torch.float64)
    with chunks(model, 16), precision(torch.float64):
        for row, mask in enumerate(rows_of):  # each row alone, without its padding
            logits[row, mask.nonzero()[:-1, 0]] = model(batch["input_ids"][row, mask][None]).logits[0, :-1]
    logits, kept = logits / TEMPERATURE, labels != -100
    every = logits.log_softmax(-1)
    want = {
        "log_probs": every.gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(kept, 0.0),
        "entropy": -(every.exp() * every).sum(-1).where(kept, 0.0),
    }  # fmt: skip
    loss_of(want["log_probs"], want["entropy"]).backward()
    want = {name: x.detach() for name, x in want.items()} | gradients(model)
    with torch.no_grad():
        want["mean_logits"] = logits.mean(-1).where(kept, 0.0)
        want["is_top1"] = (logits.argmax(-1) == labels).double()
        want["log_sum_sq_probs"] = every.exp().square().sum(-1).log().where(kept, 0.0)
    want["label_mask"] = kept.double()
    assert_exact(mean(per_rank), want)
    assert_exact(per_rank[0], {name: want[name] for name in NAMES})
