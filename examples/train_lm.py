"""Trains a byte-level language model on one long sequence that is cut over the ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py            (or `make demo`, which also installs)

Every rank holds the whole model and a contiguous part of every sequence; flexsp carries the recurrent state from rank
to rank, so that the gradient is the one a single rank would compute on the whole sequence. The run folder receives
metrics.jsonl, loss.png, sample.txt and checkpoint.pt; started again, on any number of ranks, the run goes on there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import flexsp
from flexsp.nn import LayerCache, SequenceParallelLA, SimpleGLA

SEED = 20


class UserError(Exception):
    """Something the person who started the run has to put right."""


# ---------------------------------------------------------------- text


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, both uint8 [n]."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.train.numpy().tobytes() + self.held_out.numpy().tobytes()).hexdigest()[:16]


def standard_library() -> list[Path]:
    """The .py files Python itself came with, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skip.intersection(p.relative_to(root).parts))


def read_text(data: str | None, tokens: int) -> Text:
    """Reads ``data`` (None: the standard library) and holds out every 20th file, or the end of fewer than 20 files."""
    if data is None:
        paths, source = standard_library(), "Python's standard library"
    else:
        path, source = Path(data), data
        if not path.exists():
            raise UserError(f"--data: expected a text file or a folder, got {data!r}, which does not exist")
        paths = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [content for content in (p.read_bytes() for p in paths) if content and b"\0" not in content]
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


@dataclass(frozen=True)
class ModelConfig:
    dim: int = 160
    layers: int = 4
    heads: int = 4


class Block(nn.Module):
    """x + GLA(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = 32 * round(config.dim * 8 / 3 / 32)
        self.norm_mix = nn.RMSNorm(config.dim)
        self.mix = SimpleGLA(config.dim, num_heads=config.heads)
        self.norm_mlp = nn.RMSNorm(config.dim)
        self.up = nn.Linear(config.dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.dim, bias=False)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm_mlp(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm_mix(x))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    """Bytes [B, T] -> logits of the next byte [B, T, 256]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        for block in self.each_block():
            nn.init.normal_(block.down.weight, std=0.5 / math.sqrt(block.down.in_features * config.layers))

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


def mean_over_ranks(values: list[float], sp: flexsp.SequenceParallel) -> list[float]:
    if sp.world_size == 1:
        return values
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed, group=sp.cpu_group)
    return (summed / sp.world_size).tolist()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text, options: argparse.Namespace, sp: flexsp.SequenceParallel) -> float:
    """Mean loss (nats a byte) over --eval-windows held-out sequences."""
    model.eval()
    losses = [shard_loss(model, w, sp).item() for w in held_out_windows(text, options.eval_windows, options.tokens)]
    model.train()
    return sum(mean_over_ranks(losses, sp)) / len(losses)


# ---------------------------------------------------------------- checkpoint


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes beside ``path`` and renames, so that a run stopped while saving keeps its previous checkpoint."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(options: argparse.Namespace, config: ModelConfig, text: Text,
                    sp: flexsp.SequenceParallel) -> dict[str, Any] | None:
    """The run's checkpoint, read by rank 0 and sent to the others; None where the run starts anew."""
    path = options.folder / "checkpoint.pt"
    found: list[Any] = [None, None]
    if sp.rank == 0 and options.resume is not False:
        if path.exists():
            found = read_checkpoint(path, config, text)
        elif options.resume:
            found[1] = f"--resume: expected a checkpoint, got none at {path}"
    if sp.world_size > 1:
        dist.broadcast_object_list(found, src=sp.global_ranks[0], group=sp.cpu_group)
    if found[1]:
        raise UserError(found[1])
    return found[0]


def read_checkpoint(path: Path, config: ModelConfig, text: Text) -> list[Any]:
    """[state, None], or [None, why the run cannot go on from it]."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        problem = checkpoint_problem(path, state, config, text)
        missing = {"model", "optimizer", "step"}.difference(state)
    except Exception as error:  # whatever a damaged file makes torch.load say, the other ranks have to hear of it
        detail = (str(error).splitlines() or [""])[0]
        return [None, f"{path} cannot be read ({type(error).__name__}: {detail}): use another --name or --no-resume"]
    if missing:
        problem = f"{path} lacks {', '.join(sorted(missing))}: use another --name or --no-resume"
    return [None, problem] if problem else [state, None]


def checkpoint_problem(path: Path, state: dict[str, Any], config: ModelConfig, text: Text) -> str | None:
    if state["config"] != asdict(config):
        asked = asdict(config)
        return f"{path} holds a model with {state['config']}, asked for is {asked}: use another --name or --no-resume"
    if state["text"] != text.digest:
        return f"{path} was trained on other text than {text.source}: use another --name or --no-resume"
    return None


class Metrics:
    """metrics.jsonl of rank 0: one object a line, the lines after ``step`` of an earlier run dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.rows: list[dict[str, Any]] = []
        if step and path.exists():
            self.rows = [row for row in map(self.parse, path.read_text().splitlines()) if row and row["step"] <= step]
        self.file = path.open("w")
        for row in self.rows:
            self.file.write(json.dumps(row) + "\n")

    @staticmethod
    def parse(line: str) -> dict[str, Any] | None:
        """None for a line that a killed run left unfinished."""
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return None
        return row if isinstance(row, dict) and "step" in row else None

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4))
        for key, style, label in (("loss", "-", "training"), ("held_out_loss", "o", "held out")):
            points = [(row["step"], row[key] / math.log(2)) for row in self.rows if key in row]
            axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
        axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)


# ---------------------------------------------------------------- training


class Screen:
    """Progress on rank 0: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = Console(quiet=not enabled)
        columns = (BarColumn(bar_width=30), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=self.console, disable=not (enabled and self.console.is_terminal))
        self.task = self.bar.add_task("first step ...", total=1.0)
        self.enabled, self.next_line = enabled, 0.0

    def update(self, done: float, step: int, loss: float, speed: float, left: float) -> None:
        clock = f"{int(left) // 60}:{int(left) % 60:02d}"
        line = f"step {step}  loss {loss:.3f}  {speed:,.0f} tokens/s  {clock} left"
        self.bar.update(self.task, completed=done, description=line)
        if self.enabled and not self.console.is_terminal and time.monotonic() >= self.next_line:
            print(line, flush=True)
            self.next_line = time.monotonic() + 15

    def table(self, title: str, header: list[str], rows: Iterable[list[str]]) -> None:
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


class Budget:
    """How far this invocation is, 0 to 1: by steps, by minutes, whichever is further. Starts with the first step."""

    def __init__(self, first_step: int, options: argparse.Namespace) -> None:
        self.first, self.steps, self.seconds = first_step, options.steps, options.minutes * 60
        self.start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def fraction(self, step: int) -> float:
        by_steps = (step - self.first) / max(1, self.steps - self.first) if self.steps else 0.0
        return min(1.0, max(by_steps, self.elapsed() / self.seconds))

    def left(self, step: int) -> float:
        """Estimated seconds."""
        fraction = self.fraction(step)
        return self.elapsed() * (1 - fraction) / fraction if fraction else 0.0


def learning_rate(options: argparse.Namespace, step: int, fraction: float) -> float:
    """Warm-up over a run's first steps, then constant, then down to 5 % over the last --cooldown of the budget."""
    warm = min(1.0, (step + 1) / options.warmup)
    cool = min(1.0, (1 - fraction) / options.cooldown) if options.cooldown else 1.0
    return options.lr * warm * max(0.05, cool)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, options: argparse.Namespace,
          step: int, sp: flexsp.SequenceParallel, save: Any, metrics: Metrics | None, screen: Screen) -> int:
    """Trains from ``step`` until the budget is used; returns the number of the last step."""
    wrapped: nn.Module = SequenceParallelLA(model, sp)
    if sp.world_size > 1:
        wrapped = DistributedDataParallel(wrapped)
    budget, saved = Budget(step, options), time.monotonic()
    fraction = budget.fraction(step) if not options.steps or step < options.steps else 1.0
    while fraction < 1.0:
        started = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step, fraction)
        loss = shard_loss(wrapped, training_window(text, step, options.tokens), sp)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        # Rank 0's clock decides for all: the others contribute nothing to the second number.
        mine = budget.fraction(step) * sp.world_size if sp.rank == 0 else 0.0
        mean_loss, fraction = mean_over_ranks([loss.item(), mine], sp)
        speed = options.tokens / (time.monotonic() - started)
        screen.update(fraction, step, mean_loss, speed, budget.left(step))
        if metrics:
            metrics.add(step=step, loss=mean_loss, lr=optimizer.param_groups[0]["lr"], grad_norm=norm.item(),
                        tokens_per_s=round(speed), seconds=round(budget.elapsed(), 2), ranks=sp.world_size)
        if not math.isfinite(mean_loss):
            raise UserError(f"the loss is {mean_loss} at step {step}: try a lower --lr than {options.lr}")
        if time.monotonic() - saved > 60:
            save(step)
            saved = time.monotonic()
    return step


# ---------------------------------------------------------------- what the run shows at its end


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def norm(tensors: list[torch.Tensor]) -> float:
    return torch.stack([tensor.norm() for tensor in tensors]).norm().item()


def compare_with_one_rank(model: nn.Module, config: ModelConfig, window: torch.Tensor, dtype: torch.dtype,
                          sp: flexsp.SequenceParallel) -> list[list[str]]:
    """Loss and gradient of one sequence, cut over the ranks and whole on rank 0: rows of the closing table."""
    cut, whole = (LanguageModel(config).to(sp.device, dtype) for _ in range(2))
    for copy in (cut, whole):
        copy.load_state_dict(model.state_dict())
    loss = shard_loss(SequenceParallelLA(cut, sp), window, sp)
    loss.backward()
    for grad in gradients(cut):
        dist.all_reduce(grad)
        grad /= sp.world_size
    (loss_cut,) = mean_over_ranks([loss.item()], sp)
    rows = []
    if sp.rank == 0:
        window = window.to(sp.device)
        loss = F.cross_entropy(whole(window[:, :-1]).flatten(0, 1), window[0, 1:])
        loss.backward()
        norm_whole, norm_cut = norm(gradients(whole)), norm(gradients(cut))
        error = norm([a - b for a, b in zip(gradients(whole), gradients(cut), strict=True)])
        name = str(dtype).removeprefix("torch.")
        rows = [
            [f"loss, {name}", f"{loss.item():.9f}", f"{loss_cut:.9f}", f"{abs(loss.item() - loss_cut):.1e}"],
            [f"gradient norm, {name}", f"{norm_whole:.9f}", f"{norm_cut:.9f}", f"{abs(norm_whole - norm_cut):.1e}"],
            [f"gradient difference / norm, {name}", "", "", f"{error / norm_whole:.1e}"],
        ]
    dist.barrier(group=sp.cpu_group)
    return rows


@torch.no_grad()
def generate(model: LanguageModel, prompt: str, count: int) -> str:
    """``count`` bytes after ``prompt``, one step of the recurrent state a byte."""
    generator = torch.Generator().manual_seed(SEED)
    device = model.head.weight.device
    caches = [block.mix.init_cache(1) for block in model.each_block()]
    text = list(prompt.encode() or b"\n")
    for i in range(len(text) + count - 1):
        logits, caches = model.step(torch.tensor([text[i]], device=device), caches)
        if i + 1 == len(text):
            text.append(int(torch.multinomial((logits[0] / 0.8).softmax(-1).cpu(), 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def report(model: LanguageModel, config: ModelConfig, text: Text, options: argparse.Namespace, step: int,
           metrics: Metrics | None, screen: Screen, sp: flexsp.SequenceParallel) -> None:
    """Evaluates, compares with one rank, generates; prints it all and draws the loss."""
    before = held_out_loss(SequenceParallelLA(model, sp), text, options, sp)
    rows = []
    if sp.world_size > 1:
        for dtype in (torch.float32, torch.float64):
            rows += compare_with_one_rank(model, config, training_window(text, step, options.tokens), dtype, sp)
    if metrics is None:
        return
    metrics.add(step=step, held_out_loss=before)
    metrics.plot(options.folder / "loss.png")
    losses = [row["loss"] for row in metrics.rows if "loss" in row][-20:]
    train_loss = sum(losses) / len(losses) if losses else math.nan
    screen.table(
        f"after {step} steps of {options.tokens} bytes on {sp.world_size} ranks",
        ["", "loss (nats)", "bits per byte"],
        [[name, f"{loss:.3f}", f"{loss / math.log(2):.3f}"]
         for name, loss in (("training, last 20 steps", train_loss), ("held out", before))],
    )
    if rows:
        screen.table("the same step", ["", "1 rank", f"{sp.world_size} ranks", "difference"], rows)
    sample = generate(model, options.prompt, options.sample)
    (options.folder / "sample.txt").write_text(sample, encoding="utf-8")
    screen.console.rule("sample, generated byte by byte from the recurrent state", align="left")
    screen.console.print(sample, markup=False, highlight=False, soft_wrap=True)
    screen.console.rule()
    screen.console.print(f"{options.folder}: metrics.jsonl, loss.png, sample.txt, checkpoint.pt", highlight=False)


def run(options: argparse.Namespace, text: Text, sp: flexsp.SequenceParallel) -> None:
    """One invocation: resume or start, train, save, report."""
    config = ModelConfig(options.dim, options.layers, options.heads)
    torch.manual_seed(SEED)
    model = LanguageModel(config).to(sp.device)
    optimizer = make_optimizer(model, options.lr)
    step = 0
    if state := load_checkpoint(options, config, text, sp):
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    screen = Screen(enabled=sp.rank == 0)
    metrics = None
    if sp.rank == 0:
        options.folder.mkdir(parents=True, exist_ok=True)
        metrics = Metrics(options.folder / "metrics.jsonl", step)

    def save(step: int) -> None:
        if sp.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            save_checkpoint(options.folder / "checkpoint.pt", state | {"config": asdict(config), "text": text.digest})

    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    screen.console.print(
        f"{parameters:.2f} M parameters, {len(text.train) / 1e6:.1f} MB of {text.source}, {sp.world_size} ranks on "
        f"{sp.device.type}, {options.tokens} bytes a sequence" + (f", resumed at step {step}" if step else ""),
        highlight=False,
        soft_wrap=True,
    )
    with screen.bar:
        step = train(model, optimizer, text, options, step, sp, save, metrics, screen)
    save(step)
    report(model, config, text, options, step, metrics, screen, sp)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the process with the message of a UserError, which rank 0 alone prints."""
    try:
        yield
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            raise SystemExit(f"train_lm: {error}") from None
        time.sleep(2)  # torchrun stops the others once one has ended: rank 0 first gets to speak
        raise SystemExit(1) from None


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="text file, or folder of them (default: the .py files of Python's standard library)")
    add("--name", default="demo", help="the run folder is RUNS/NAME (default: demo)")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    add("--resume", action=argparse.BooleanOptionalAction, help="insist on a checkpoint, or ignore it")
    add("--minutes", type=float, default=4.0, help="training time of this invocation (default: 4)")
    add("--steps", type=int, help="stop after this step, earlier invocations of the run counted in")
    add("--tokens", type=int, default=8192, help="bytes of a sequence, over all ranks (default: 8192)")
    add("--dim", type=int, default=ModelConfig.dim, help=f"width (default: {ModelConfig.dim})")
    add("--layers", type=int, default=ModelConfig.layers, help=f"blocks (default: {ModelConfig.layers})")
    add("--heads", type=int, default=ModelConfig.heads, help=f"heads (default: {ModelConfig.heads})")
    add("--lr", type=float, default=4e-3, help="learning rate (default: 4e-3)")
    add("--warmup", type=int, default=20, help="steps of linear warm-up (default: 20)")
    add("--cooldown", type=float, default=0.4, help="last part of the budget in which lr falls (default: 0.4)")
    add("--eval-windows", type=int, default=16, help="held-out sequences (default: 16)")
    add("--sample", type=int, default=400, help="bytes to generate at the end (default: 400)")
    add("--prompt", default="def ", help="what the sample starts from (default: 'def ')")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is some")
    add("--transport", default="auto", help="how the states travel (default: auto, see init_sequence_parallel)")
    options = parser.parse_args(argv)
    for name in ("tokens", "warmup", "eval_windows", "minutes", "layers"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: expected a number > 0, got {getattr(options, name)}")
    options.folder = options.runs / options.name
    return options


def start_ranks(options: argparse.Namespace) -> flexsp.SequenceParallel:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: expected a CUDA device, torch finds none")
    device = None if options.device == "auto" else options.device
    sp = flexsp.init_sequence_parallel(transport=options.transport, device=device)
    sp.set_lengths(sp.partition(options.tokens))
    return sp


def main(argv: list[str] | None = None) -> None:
    options = parse_options(argv)
    with one_line_errors():
        text = read_text(options.data, options.tokens)
        sp = start_ranks(options)
        try:
            run(options, text, sp)
        finally:
            sp.close()
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    main()
