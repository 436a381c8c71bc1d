"""Trains a byte-level language model on one long sequence that is cut over the ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py            (or `make demo`, which also installs)

Every rank holds the whole model and a contiguous part of every sequence; flexsp carries the recurrent state from rank
to rank, so that the gradient is the one a single rank would compute on the whole sequence. The run folder receives
metrics.jsonl, loss.png, sample.txt and checkpoint.pt; started again, on any number of ranks, the run goes on there as
if it had never stopped: the text and the learning rate of a step depend on its number and the run's settings alone.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from checkpoint import (
    ADVICE,
    Metrics,
    UserError,
    agree,
    file_errors,
    from_first_rank,
    load_checkpoint,
    on_first_rank,
    open_metrics,
    restore,
    save_checkpoint,
)
from torch.nn.parallel import DistributedDataParallel
from training import (
    Budget,
    Screen,
    add_settings,
    make_optimizer,
    mean_over_ranks,
    one_line_errors,
    read_files,
    setting,
    settings_of,
)

import flexsp
from flexsp.exceptions import NotAvailable
from flexsp.nn import LayerCache, SequenceParallelLA, SimpleGLA

SEED = 20
SECONDS_BETWEEN_CHECKPOINTS = 60.0
DTYPES = {"float32": torch.float32, "float64": torch.float64}
LARGEST_HEAD = 256  # of SimpleGLA
LIMIT = 1e18  # more is a slip, which would end in an overflow


@dataclass(frozen=True)
class Settings:
    """What a run keeps to from its first step to its last, and its checkpoint holds."""

    tokens: int = setting(8192, "bytes of a sequence, over all ranks")
    dim: int = setting(160, "width")
    layers: int = setting(4, "blocks")
    heads: int = setting(4, "heads")
    dtype: str = setting("float32", "float32 or float64")
    lr: float = setting(4e-3, "highest learning rate")
    warmup: int = setting(20, "steps in which the rate rises to that")
    hold: int = setting(40, "step from which the rate falls, with the root of the step")

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in (f.name for f in fields(self) if f.name != "dtype"):
            value, kinds = getattr(self, name), (int, float) if name == "lr" else (int,)
            if type(value) not in kinds or not value > 0:
                raise UserError(f"--{name}: expected a number > 0, got {value!r}")
            if not value < LIMIT:
                raise UserError(f"--{name}: expected a number < {LIMIT:g}, got {value!r}")
        if self.dim % self.heads:
            raise UserError(f"--dim: expected a multiple of --heads {self.heads}, got {self.dim}")
        if self.dim > self.heads * LARGEST_HEAD:
            raise UserError(f"--dim: expected at most {LARGEST_HEAD} for each of --heads {self.heads}, got {self.dim}")

    def learning_rate(self, step: int) -> float:
        """Rises over the first ``warmup`` steps, stays until step ``hold``, then falls with the root of the step."""
        return self.lr * min(1.0, (step + 1) / self.warmup, math.sqrt(self.hold / (step + 1)))


# ---------------------------------------------------------------- text


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, both uint8 [n]."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.train.numpy().tobytes() + self.held_out.numpy().tobytes()).hexdigest()[:16]


def read_text(data: str | None, tokens: int) -> Text:
    """Reads ``data`` (None: the standard library) and holds out every 20th file, or the end of fewer than 20 files."""
    files, source = read_files(data)
    if len(files) >= 20:
        held = b"\n".join(files[10::20])
        train = b"\n".join(content for i, content in enumerate(files) if i % 20 != 10)
    else:
        joined = b"\n".join(files)
        cut = len(joined) - max(tokens + 1, len(joined) // 20)
        train, held = (joined[:cut], joined[cut:]) if cut > 0 else (joined, b"")
    if min(len(train), len(held)) < tokens + 1:
        raise UserError(
            f"--data: a sequence takes {tokens + 1} bytes to train on and as many held out, got {len(train)} and "
            f"{len(held)} from {source}; give more text or fewer --tokens"
        )
    as_tensor = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held)]
    return Text(as_tensor[0], as_tensor[1], source)


@lru_cache(maxsize=2)
def epoch_order(epoch: int, length: int, tokens: int) -> tuple[list[int], int]:
    """The order of an epoch's windows and where the first of them starts: functions of the epoch alone."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
    windows = max(1, (length - 1) // tokens - 1)
    slack = length - 1 - windows * tokens
    phase = int(torch.randint(min(slack, tokens - 1) + 1, (), generator=generator))
    return torch.randperm(windows, generator=generator).tolist(), phase


def training_window(text: Text, step: int, tokens: int) -> torch.Tensor:
    """The step's bytes, int64 [1, tokens + 1]: a function of ``step``, so that a resumed run goes on in the stream."""
    windows = max(1, (len(text.train) - 1) // tokens - 1)
    order, phase = epoch_order(step // windows, len(text.train), tokens)
    start = phase + order[step % windows] * tokens
    return text.train[start : start + tokens + 1].long()[None]


def held_out_windows(text: Text, count: int, tokens: int) -> Iterator[torch.Tensor]:
    """Up to ``count`` windows spread evenly over the held-out bytes, int64 [1, tokens + 1] each."""
    available = (len(text.held_out) - 1) // tokens
    for i in range(min(count, available)):
        start = (i * available // min(count, available)) * tokens
        yield text.held_out[start : start + tokens + 1].long()[None]


# ---------------------------------------------------------------- model


class Block(nn.Module):
    """x + GLA(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim, hidden = settings.dim, 32 * max(1, round(settings.dim * 8 / 3 / 32))
        self.norm_mix = nn.RMSNorm(dim)
        self.mix = SimpleGLA(dim, num_heads=settings.heads)
        self.norm_mlp = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm_mlp(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm_mix(x))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    """Bytes [B, T] -> logits of the next byte [B, T, 256]."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, settings.dim)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.dim)
        self.head = nn.Linear(settings.dim, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        for block in self.each_block():
            nn.init.normal_(block.down.weight, std=0.5 / math.sqrt(block.down.in_features * settings.layers))

    def each_block(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.each_block():
            x = block(x)
        return self.head(self.norm(x))

    def step(self, token: torch.Tensor, caches: list[LayerCache]) -> tuple[torch.Tensor, list[LayerCache]]:
        """One byte [B] and what the layers remember -> logits [B, 256] and what they remember now."""
        x, after = self.embed(token), []
        for block, cache in zip(self.each_block(), caches, strict=True):
            mixed, cache = block.mix.step(block.norm_mix(x), cache)
            x = x + mixed
            x = x + block.mlp(x)
            after.append(cache)
        return self.head(self.norm(x)), after


def shard_loss(model: nn.Module, window: torch.Tensor, sp: flexsp.SequenceParallel) -> torch.Tensor:
    """The rank's loss on its part of ``window`` [1, tokens + 1]; the mean over ranks is the sequence's mean loss."""
    inputs, targets = (sp.shard(part, dim=1).to(sp.device) for part in (window[:, :-1], window[:, 1:]))
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    return sp.token_mean(loss)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text, count: int, tokens: int, sp: flexsp.SequenceParallel) -> float:
    """Mean loss (nats a byte) over ``count`` held-out sequences."""
    model.eval()
    losses = [shard_loss(model, window, sp).item() for window in held_out_windows(text, count, tokens)]
    model.train()
    return sum(mean_over_ranks(losses, sp)) / len(losses)


# ---------------------------------------------------------------- start or resume


def choose_settings(options: argparse.Namespace, state: dict[str, Any] | None) -> Settings:
    return settings_of(Settings, options, state["settings"] if state else None, options.checkpoint)


def read_same_text(options: argparse.Namespace, tokens: int, state: dict[str, Any] | None,
                   sp: flexsp.SequenceParallel) -> Text:
    """The text, which every rank reads for itself, once it is seen to be the same everywhere and the checkpoint's."""
    text, problem = None, ""
    try:
        text = read_text(options.data, tokens)
    except UserError as error:
        problem = str(error)
    agree(problem, sp)
    assert text is not None
    if text.digest != from_first_rank(text.digest, sp):
        problem = f"--data: rank {sp.rank} reads other text from {text.source} than rank 0"
    elif state and state["text"] != text.digest:
        problem = f"{options.checkpoint}: text: it was trained on other text than {text.source}; {ADVICE}"
    agree(problem, sp)
    return text


# ---------------------------------------------------------------- training


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, settings: Settings,
          options: argparse.Namespace, step: int, sp: flexsp.SequenceParallel, save: Callable[[int], None],
          metrics: Metrics | None, screen: Screen) -> int:
    """Trains from ``step`` until the budget is used; returns the number of the last step."""
    wrapped: nn.Module = SequenceParallelLA(model, sp)
    if sp.world_size > 1:
        wrapped = DistributedDataParallel(wrapped)
    budget, saved = Budget(step, options.steps, options.minutes * 60), time.monotonic()
    done = budget.fraction(step) if not options.steps or step < options.steps else 1.0
    while done < 1.0:
        started = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        loss = shard_loss(wrapped, training_window(text, step, settings.tokens), sp)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        if not math.isfinite(norm):
            raise UserError(f"the gradient's norm is {norm} in step {step + 1}: try a lower --lr than {settings.lr}")
        optimizer.step()
        step += 1
        # Rank 0's clock decides for all: the others contribute nothing to the second and third number.
        due = time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS or bool(metrics and metrics.problem)
        mine = [budget.fraction(step) * sp.world_size, float(due)] if sp.rank == 0 else [0.0, 0.0]
        mean_loss, done, due_mean = mean_over_ranks([loss.item(), *mine], sp)
        speed = settings.tokens / (time.monotonic() - started)
        screen.update(done, step, mean_loss, speed, budget.left(step))
        if metrics:
            metrics.add(step=step, loss=mean_loss, lr=optimizer.param_groups[0]["lr"], grad_norm=norm,
                        tokens_per_s=round(speed), seconds=round(budget.elapsed(), 2), ranks=sp.world_size)
        if due_mean:
            save(step)
            saved = time.monotonic()
    return step


# ---------------------------------------------------------------- what the run shows at its end


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def norm(tensors: list[torch.Tensor]) -> float:
    return torch.stack([tensor.norm() for tensor in tensors]).norm().item()


def compare_with_one_rank(model: nn.Module, settings: Settings, window: torch.Tensor, dtype: torch.dtype,
                          sp: flexsp.SequenceParallel) -> list[list[str]]:
    """Loss and gradient of one sequence, cut over the ranks and whole on rank 0: rows of the closing table."""
    cut, whole = (LanguageModel(settings).to(sp.device, dtype) for _ in range(2))
    for copy in (cut, whole):
        copy.load_state_dict(model.state_dict())
    loss = shard_loss(SequenceParallelLA(cut, sp), window, sp)
    loss.backward()
    for grad in gradients(cut):
        dist.all_reduce(grad)
        grad /= sp.world_size
    (loss_cut,) = mean_over_ranks([loss.item()], sp)

    def compare() -> list[list[str]]:
        inputs, targets = window[:, :-1].to(sp.device), window[0, 1:].to(sp.device)
        loss = F.cross_entropy(whole(inputs).flatten(0, 1), targets)
        loss.backward()
        norm_whole, norm_cut = norm(gradients(whole)), norm(gradients(cut))
        error = norm([a - b for a, b in zip(gradients(whole), gradients(cut), strict=True)])
        name = str(dtype).removeprefix("torch.")
        return [
            [f"loss, {name}", f"{loss.item():.9f}", f"{loss_cut:.9f}", f"{abs(loss.item() - loss_cut):.1e}"],
            [f"gradient norm, {name}", f"{norm_whole:.9f}", f"{norm_cut:.9f}", f"{abs(norm_whole - norm_cut):.1e}"],
            [f"gradient difference / norm, {name}", "", "", f"{error / norm_whole:.1e}"],
        ]

    return on_first_rank(compare, sp) or []  # the whole sequence may not fit into rank 0 alone


@torch.no_grad()
def generate(model: LanguageModel, prompt: bytes, count: int) -> str:
    """``count`` bytes after ``prompt``, one step of the recurrent state a byte."""
    generator = torch.Generator().manual_seed(SEED)
    device = model.head.weight.device
    caches = [block.mix.init_cache(1) for block in model.each_block()]
    text = list(prompt or b"\n")
    for i in range(len(text) + count - 1):
        logits, caches = model.step(torch.tensor([text[i]], device=device), caches)
        if i + 1 == len(text):
            text.append(int(torch.multinomial((logits[0] / 0.8).softmax(-1).cpu(), 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def report(model: LanguageModel, settings: Settings, text: Text, options: argparse.Namespace, step: int,
           metrics: Metrics | None, screen: Screen, sp: flexsp.SequenceParallel) -> None:
    """Evaluates, compares with one rank, generates; prints it all and draws the loss."""
    held_out = held_out_loss(SequenceParallelLA(model, sp), text, options.eval_windows, settings.tokens, sp)
    rows = []
    if sp.world_size > 1:
        window = training_window(text, step, settings.tokens)
        for dtype in DTYPES.values():
            rows += compare_with_one_rank(model, settings, window, dtype, sp)
    if metrics is None:
        return
    metrics.add(step=step, held_out_loss=held_out)
    if metrics.problem:
        raise UserError(metrics.problem)
    metrics.plot(options.folder / "loss.png")
    losses = [row["loss"] for row in metrics.rows if "loss" in row][-20:]
    train_loss = sum(losses) / len(losses) if losses else math.nan
    screen.table(
        f"after {step} steps of {settings.tokens} bytes on {sp.world_size} ranks",
        ["", "loss (nats)", "bits per byte"],
        [[name, f"{loss:.3f}", f"{loss / math.log(2):.3f}"]
         for name, loss in (("training, last 20 steps", train_loss), ("held out", held_out))],
    )
    if rows:
        screen.table("the same step", ["", "1 rank", f"{sp.world_size} ranks", "difference"], rows)
    sample = generate(model, options.prompt, options.sample)
    (options.folder / "sample.txt").write_text(sample, encoding="utf-8")
    screen.console.rule("sample, generated byte by byte from the recurrent state", align="left")
    screen.console.print(sample, markup=False, highlight=False, soft_wrap=True)
    screen.console.rule()
    screen.console.print(f"{options.folder}: metrics.jsonl, loss.png, sample.txt, checkpoint.pt", highlight=False)


def run(options: argparse.Namespace, sp: flexsp.SequenceParallel) -> None:
    """One invocation: resume or start, train, save, report."""
    state = load_checkpoint(options.checkpoint, options.resume, sp)
    settings = choose_settings(options, state)
    text = read_same_text(options, settings.tokens, state, sp)
    sp.set_lengths(sp.partition(settings.tokens))
    torch.manual_seed(SEED)
    model = LanguageModel(settings).to(sp.device, DTYPES[settings.dtype])
    optimizer = make_optimizer(model, settings.lr)
    metrics = None

    def save(step: int) -> None:
        held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "step": step}
        state = held | {"settings": asdict(settings), "text": text.digest}
        save_checkpoint(options.checkpoint, state, metrics, sp)

    if state:
        restore(options.checkpoint, state, model, optimizer)
    else:
        save(0)  # a folder that cannot be written shows now, and metrics never lie beside another run's checkpoint
    step = state["step"] if state else 0
    metrics = open_metrics(options.folder / "metrics.jsonl", step, sp)
    screen = Screen(enabled=sp.rank == 0)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    screen.console.print(
        f"{parameters:.2f} M parameters, {len(text.train) / 1e6:.1f} MB of {text.source}, {sp.world_size} ranks on "
        f"{sp.device.type}, {settings.tokens} bytes a sequence" + (f", resumed at step {step}" if step else ""),
        highlight=False,
        soft_wrap=True,
    )
    with screen.bar:
        step = train(model, optimizer, text, settings, options, step, sp, save, metrics, screen)
    save(step)
    with file_errors():
        report(model, settings, text, options, step, metrics, screen, sp)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="text file, or folder of them (default: the .py files of Python's standard library)")
    add("--name", default="demo", help="the run folder is RUNS/NAME (default: demo)")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    add("--resume", action=argparse.BooleanOptionalAction, help="insist on a checkpoint, or ignore it")
    add("--minutes", type=float, help="training time of this invocation (default: 4, without limit beside --steps)")
    add("--steps", type=int, help="stop after this step, earlier invocations of the run counted in")
    add_settings(parser, Settings)
    add("--eval-windows", type=int, default=16, help="held-out sequences (default: 16)")
    add("--sample", type=int, default=400, help="bytes to generate at the end (default: 400)")
    add("--prompt", default="def ", type=os.fsencode, help="what the sample starts from (default: 'def ')")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is some")
    add("--transport", default="auto", help="how the states travel (default: auto, see init_sequence_parallel)")
    add("--schedule", default="chain", help="in which order; hierarchical for many hosts (default: chain)")
    options = parser.parse_args(argv)
    for name, least in (("steps", 1), ("eval_windows", 1), ("sample", 1)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            raise UserError(f"--{name.replace('_', '-')}: expected a number >= {least}, got {getattr(options, name)}")
    if options.minutes is None:
        options.minutes = 4.0 if options.steps is None else math.inf
    elif not 0 < options.minutes < math.inf:
        raise UserError(f"--minutes: expected a number > 0, got {options.minutes}")
    options.folder = options.runs / options.name
    options.checkpoint = options.folder / "checkpoint.pt"
    return options


def start_ranks(options: argparse.Namespace) -> flexsp.SequenceParallel:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: expected a CUDA device, torch finds none")
    device = None if options.device == "auto" else options.device
    try:
        return flexsp.init_sequence_parallel(transport=options.transport, schedule=options.schedule, device=device)
    except (ValueError, NotAvailable) as error:
        raise UserError(str(error)) from error


def main(argv: list[str] | None = None) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold what no encoding has
    with one_line_errors("train_lm"):
        options = parse_options(argv)
        sp = start_ranks(options)
        try:
            run(options, sp)
        finally:
            sp.close()
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    main()
