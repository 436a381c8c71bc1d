"""Trains a hybrid model of transformers on sequences that are cut over ranks: FSDP2 on a (dp, sp) mesh.

    torchrun --standalone --nproc-per-node 8 examples/train_hybrid.py --model FOLDER --data TEXT --sp 4
    python examples/train_hybrid.py --steps 20                          (one rank, the built-in tiny Qwen3-Next)

FOLDER holds a checkpoint of transformers, or a config alone for random weights. Every row of --sp ranks takes a
sequence at a time and cuts it; the rows take other sequences, and parameters are sharded over all ranks. The run folder
receives metrics.jsonl, loss.png, checkpoints, and at its end the folder `model` for from_pretrained. A run that was
stopped, by a signal too, goes on with the same command where it was, on any number of ranks: the sequences and the rate
of a step depend on its number and the run's settings alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import ADVICE, Metrics, Ranks, UserError, agree, file_errors, on_first_rank, open_metrics
from pretrained import (
    TINY,
    config_digest,
    export,
    left_out,
    make_model,
    read_config,
    read_tokenizer,
    set_first_weights,
)  # fmt: skip
from sharded_checkpoint import find_checkpoint, load_checkpoint, remove_checkpoints, save_checkpoint
from token_data import DTYPES as TOKEN_DTYPES
from token_data import IGNORED, Tokens, make_batch, open_tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from training import Budget, Screen, add_settings, make_optimizer, one_line_errors, option, setting, settings_of

import flexsp
from flexsp.exceptions import NotAvailable
from flexsp.integrations.transformers import shard

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
STOPS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Settings:
    """What a run keeps to, and its checkpoints hold. More steps may be added before the rate has begun to fall."""

    steps: int = setting(200, "steps of the whole run")
    tokens: int = setting(2048, "tokens of a sequence, over its ranks")
    context: int = setting(0, "tokens of a document at most, 0 for as many as a sequence has")
    batch: int = setting(2, "sequences of a step; rows of ranks that are fewer take several, one after another")
    lr: float = setting(1e-3, "highest learning rate")
    warmup: int = setting(10, "steps in which the rate rises to that")
    decay: int = setting(40, "steps at the end in which it falls to zero")
    clip: float = setting(1.0, "largest norm of the gradient")
    dtype: str = setting("bfloat16", "what layers compute in, bfloat16 or float32; parameters are float32")
    seed: int = setting(0, "of the first weights and the order of the sequences")

    def __post_init__(self) -> None:
        least = {"context": 0, "warmup": 0, "decay": 0, "seed": 0}
        for name in ("steps", "tokens", "context", "batch", "warmup", "decay", "seed"):
            value, low = getattr(self, name), least.get(name, 1)
            if type(value) is not int or not low <= value < 1 << 62:
                raise UserError(f"{option(name)}: expected an integer >= {low}, got {value!r}")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < 1e18:
                raise UserError(f"{option(name)}: expected a number > 0, got {value!r}")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.warmup + self.decay > self.steps:
            expected = f"at least --warmup {self.warmup} + --decay {self.decay}"
            raise UserError(f"--steps: expected {expected}, got {self.steps}")

    def learning_rate(self, step: int) -> float:
        """Warmup, stable, decay: rises over the first steps, stays, and falls over the last ones, the last above 0."""
        rise = (step + 1) / max(1, self.warmup)
        fall = (self.steps - step) / (self.decay + 1)
        return self.lr * min(1.0, rise, fall)

    def check_longer(self, before: Settings, step: int) -> None:
        """Steps that were taken must have had the rates of these settings."""
        falls = min(self.steps - self.decay, before.steps - before.decay)
        if step > falls and self != before:
            raise UserError(
                f"--steps, --decay: expected {before.steps} and {before.decay} because before or after the change the "
                f"rate falls from step {falls} on and the run is at step {step}, got {self.steps} and {self.decay}"
            )


def fitted(given: dict[str, Any]) -> dict[str, Any]:
    """These settings; where the defaults of --warmup and --decay are too long for --steps, with as large a share of
    them as of the default --steps."""
    default = {f.name: f.default for f in fields(Settings)}
    asked = {**default, **given}
    if asked["warmup"] + asked["decay"] <= asked["steps"]:
        return given
    shares = {name: default[name] * asked["steps"] // default["steps"] for name in ("warmup", "decay")}
    return {**shares, **given}


@dataclass(frozen=True)
class World:
    """All ranks there are."""

    rank: int
    world_size: int
    cpu_group: dist.ProcessGroup | None = None  # the default one

    @property
    def global_ranks(self) -> range:
        return range(self.world_size)


@dataclass(frozen=True, eq=False)
class Mesh:
    """Ranks: all of them, and this one's place. A row of ``sp`` has the sequences i with i % rows == row."""

    world: World
    everyone: DeviceMesh
    sp: flexsp.SequenceParallel
    row: int
    rows: int


def over_ranks(values: list[float], operation: Any, ranks: Ranks) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, operation, group=ranks.cpu_group)
    return found.tolist()


# ---------------------------------------------------------------- steps


class Stop:
    """Whether a signal asked this process to end: `wanted` is its number, else 0."""

    def __init__(self) -> None:
        self.wanted = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.note) for number in STOPS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def note(self, number: int, _: Any) -> None:
        self.wanted = number


@dataclass(frozen=True)
class Step:
    """What a step gives, over all ranks.

    Attributes:
        loss: mean cross entropy of the labels that count, in nats.
        aux_loss: of the routers, times its coefficient; None without.
        grad_norm: before it was clipped.
    """

    loss: float
    aux_loss: float | None
    grad_norm: float


class TrainingRun:
    """A model, its optimizer and the tokens it sees."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, tokens: Tokens, settings: Settings, mesh: Mesh
    ) -> None:
        self.model, self.optimizer, self.tokens, self.settings, self.mesh = model, optimizer, tokens, settings, mesh
        self.parts = settings.batch // mesh.rows  # sequences of this row in a step
        for name in ("router_aux_loss_coef", "z_loss_coefficient"):  # means over a row's sequences, whose losses add up
            if getattr(model, name, 0.0):
                setattr(model, name, getattr(model, name) / self.parts)

    def describe(self) -> str:
        s, mesh, tokens = self.settings, self.mesh, self.tokens
        parameters = sum(p.numel() for p in self.model.parameters()) / 1e6
        return (f"{self.model.config.model_type}, {parameters:.2f} M parameters, {len(tokens) / 1e6:.2f} M tokens of "
                f"{tokens.source}, dp {mesh.rows} x sp {mesh.sp.world_size} on {mesh.sp.device.type}, {s.batch} "
                f"sequences of {s.tokens} tokens a step")  # fmt: skip

    def batches(self, step: int) -> tuple[list[dict[str, Any]], float]:
        """This row's sequences of a step; and how many labels count in the step, over the number of rows."""
        s, vocabulary, world = self.settings, self.model.config.vocab_size, self.mesh.world
        first = step * s.batch + self.mesh.row
        windows = [self.tokens.window(first + i * self.mesh.rows, s.tokens, s.seed) for i in range(self.parts)]
        made = [make_batch(window, s.context or s.tokens, self.tokens.separator) for window in windows]
        largest = max(int(window.max()) for window in windows)
        mine = sum(int((batch["shift_labels"] != IGNORED).sum()) for batch in made)
        counted, wrong = over_ranks([mine, largest >= vocabulary], dist.ReduceOp.SUM, world)
        if wrong:
            problem = f"--data: expected tokens below the model's {vocabulary}, got {largest} in {self.tokens.source}"
            agree(problem if largest >= vocabulary else "", world)
        return made, max(1.0, counted / world.world_size)  # the ranks of a row count the same labels

    def loss(self, batch: dict[str, Any], counted: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's share of a sequence's loss, and what routers add to it. The sum over the row's sequences, and of
        that the mean over ranks, is the step's."""
        out = self.model(**shard({**batch, "num_items_in_batch": counted}, self.mesh.sp))
        aux = out.get("aux_loss")
        return out.loss, None if aux is None else aux.detach() * self.model.router_aux_loss_coef

    def take(self, step: int) -> Step:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(step)
        world = self.mesh.world  # dropout differs on every rank and in every step
        torch.manual_seed((self.settings.seed * 1_000_003 + step * world.world_size + world.rank) % (1 << 63))
        batches, counted = self.batches(step)
        losses: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        for batch in batches:
            loss, aux = self.loss(batch, counted)
            loss.backward()
            losses.append(loss.detach())
            if aux is not None:
                added.append(aux)
        for parameter in self.model.parameters():  # an expert's that no token chose
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        sums = [float(sum(losses)), float(sum(added))]
        mean, aux_mean = (x / world.world_size for x in over_ranks(sums, dist.ReduceOp.SUM, world))
        if not bool(norm.isfinite()):
            advice = f"try a lower --lr than {self.settings.lr}"
            raise UserError(f"the gradient's norm is {float(norm)} in step {step + 1}: {advice}")
        self.optimizer.step()
        return Step(mean - aux_mean, aux_mean if added else None, float(norm))


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(
    training: TrainingRun, options: argparse.Namespace, step: int, save: Callable[[int], None], metrics: Metrics | None,
    screen: Screen,
) -> tuple[int, int]:  # fmt: skip
    """Trains from ``step``; returns the last step, and the signal that ended it or 0."""
    settings, mesh, stop = training.settings, training.mesh, Stop()
    end = min(settings.steps, options.stop_after or settings.steps)
    budget = Budget(step, end, float("inf"))
    with stop.watched():
        while step < end:
            started = time.monotonic()
            found = training.take(step)
            step += 1
            problem = float(bool(metrics and metrics.problem))
            state = [float(stop.wanted), problem, float(peak_memory(mesh.sp.device))]
            wanted, problem, memory = over_ranks(state, dist.ReduceOp.MAX, mesh.world)
            speed = settings.batch * settings.tokens / (time.monotonic() - started)
            screen.update(budget.fraction(step), step, found.loss, speed, budget.left(step), int(memory))
            if metrics:
                row = {name: x for name, x in asdict(found).items() if x is not None}
                metrics.add(step=step, **row, lr=settings.learning_rate(step - 1), tokens_per_s=round(speed),
                            peak_gib=round(memory / 2**30, 3), seconds=round(budget.elapsed(), 2),
                            ranks=mesh.world.world_size, sp=mesh.sp.world_size)  # fmt: skip
            if wanted or problem or step == end or step % options.save_every == 0:
                save(step)
            if wanted:
                return step, int(wanted)
    return step, 0


# ---------------------------------------------------------------- start or resume


def choose(options: argparse.Namespace, config: str, mesh: Mesh) -> tuple[Settings, Path | None, dict[str, Any]]:
    """Settings; the checkpoint to go on from, if there is one, and what it says of the run. Collective.

    Args:
        config: the digest of the model's.
    """
    found = find_checkpoint(options.folder / "checkpoints", options.resume, mesh.world)
    path, about = found if found else (None, {})
    held = about.get("settings")
    settings = settings_of(Settings, options, held, path or options.folder, ("steps", "decay"), fitted)
    if held:
        settings.check_longer(Settings(**held), about["step"])
    if held and about["model"] != config:
        raise UserError(f"--model: expected the config that {path} was trained with, got another; {ADVICE}")
    if settings.batch % mesh.rows:
        ranks = f"{mesh.rows * mesh.sp.world_size} ranks by --sp {mesh.sp.world_size}"
        raise UserError(f"--batch: expected a multiple of {mesh.rows} ({ranks}), got {settings.batch}")
    if settings.tokens < mesh.sp.world_size:
        expected = f"at least one for each of {mesh.sp.world_size} ranks"
        raise UserError(f"--tokens: expected {expected}, got {settings.tokens}")
    return settings, path, about


def read_tokens(
    options: argparse.Namespace, tokenizer: Any, settings: Settings, about: dict[str, Any], mesh: Mesh
) -> Tokens:
    """Tokens that are those of the checkpoint, or an error on every rank. Collective."""
    o, tokens, problem = options, None, ""
    try:
        tokens = open_tokens(o.data, tokenizer, o.separator, o.token_dtype, o.folder, mesh.world)
        if not sum(tokens.windows(settings.tokens)):
            longest = max(map(len, tokens.shards))
            problem = f"--data: expected a shard of {settings.tokens + 1} tokens, got {longest} in the longest"
        elif about and about["data"] != tokens.digest:
            problem = f"--data: expected what the run was trained on, got other tokens from {tokens.source}; {ADVICE}"
    except UserError as error:
        problem = str(error)
    agree(problem, mesh.world)
    assert tokens is not None
    return tokens


def run(options: argparse.Namespace, mesh: Mesh) -> int:
    """One invocation: start or resume, train, save, export. The signal that ended it, or 0."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config, tokenizer = read_config(options.model), read_tokenizer(options.model)
    same = config_digest(config)  # models change their config
    settings, path, about = choose(options, same, mesh)
    model = make_model(config, mesh.sp, mesh.everyone, DTYPES[settings.dtype], options.checkpointing)
    tokens = read_tokens(options, tokenizer, settings, about, mesh)
    optimizer = make_optimizer(model, settings.lr)
    if path:
        load_checkpoint(path, model, optimizer, mesh.world)
    else:
        set_first_weights(model, options.model, config, settings.seed, options.nudge, mesh.world)
    if options.resume is False:
        remove_checkpoints(options.folder / "checkpoints", mesh.world)
    on_first_rank(lambda: options.folder.mkdir(parents=True, exist_ok=True), mesh.world)
    step = about["step"] if about else 0
    metrics = open_metrics(options.folder / "metrics.jsonl", step, mesh.world)
    held = {"settings": asdict(settings), "data": tokens.digest, "model": same}

    def save(step: int) -> None:
        agree(metrics.problem if metrics else "", mesh.world)
        about = {**held, "step": step}
        save_checkpoint(options.folder / "checkpoints", model, optimizer, about, options.keep, mesh.world)

    screen, training = Screen(enabled=mesh.world.rank == 0), TrainingRun(model, optimizer, tokens, settings, mesh)
    if left_out(config):
        screen.console.print(left_out(config), highlight=False, soft_wrap=True)
    screen.console.print(training.describe(), f"from step {step}" if step else "", highlight=False, soft_wrap=True)
    with screen.bar:
        step, wanted = train(training, options, step, save, metrics, screen)
    if metrics and find_spec("matplotlib"):
        with file_errors():
            metrics.plot(options.folder / "loss.png", "nats per token", 1.0)
    if step < settings.steps:
        screen.console.print(f"stopped at step {step} of {settings.steps}; the same command goes on", highlight=False)
    elif options.export:
        export(model, config, tokenizer, options.folder / "model", DTYPES[options.export_dtype], mesh.world)
        screen.console.print(f"{options.folder}: metrics.jsonl, loss.png, checkpoints, model", highlight=False)
    return wanted


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=TINY, help="folder with config.json, with weights or not, or such a file (default: tiny)")
    add("--data", help="text file, token shard (.npy, .bin) or folder of them (default: Python's standard library)")
    add("--token-dtype", choices=TOKEN_DTYPES, default="uint16", help="of .bin shards (default: uint16)")
    add("--separator", type=int, help="token that ends a document (default: the tokenizer's)")
    add("--name", default="hybrid", help="the run folder is RUNS/NAME (default: hybrid)")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs, which all ranks see (default: runs)")
    add("--sp", type=int, help="ranks that share a sequence (default: all)")
    add("--resume", action=argparse.BooleanOptionalAction, help="insist on a checkpoint, or remove those of the run")
    add("--save-every", type=int, default=100, help="steps between checkpoints (default: 100)")
    add("--keep", type=int, default=2, help="checkpoints to keep (default: 2)")
    add("--stop-after", type=int, help="save and end after this step of the run")
    add("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="compute layers again in backward")
    add("--export", action=argparse.BooleanOptionalAction, default=True, help="write the trained model at the end")
    add("--export-dtype", choices=tuple(DTYPES), default="float32", help="of the exported model (default: float32)")
    add("--nudge", action="store_true", help="change the first weights by a rounding, for compare_runs.py")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is some")
    add("--transport", default="auto", help="how the states travel (default: auto, see init_sequence_parallel)")
    add_settings(parser, Settings)
    options = parser.parse_args(argv)
    for name in ("sp", "save_every", "keep", "stop_after"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"{option(name)}: expected an integer >= 1, got {value}")
    options.folder = options.runs / options.name
    return options


def start(options: argparse.Namespace) -> torch.device:
    """torch.distributed on this rank's device."""
    if "RANK" not in os.environ and not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: expected a CUDA device, torch finds none")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return device


def make_mesh(options: argparse.Namespace, device: torch.device) -> Mesh:
    ranks = dist.get_world_size()
    size = options.sp or ranks
    if ranks % size:
        raise UserError(f"--sp: expected a divisor of the {ranks} ranks, got {size}")
    mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("dp", "sp"))
    try:
        sp = flexsp.init_sequence_parallel(mesh["sp"], transport=options.transport, device=device)
    except (ValueError, NotAvailable) as error:
        raise UserError(str(error)) from error
    everyone = mesh["dp", "sp"]._flatten("dp_sp")
    return Mesh(World(dist.get_rank(), ranks), everyone, sp, mesh["dp"].get_local_rank(), ranks // size)


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("train_hybrid"):
        options = parse_options(argv)
        device = start(options)
        try:
            mesh = make_mesh(options, device)
            try:
                wanted = run(options, mesh)
            finally:
                mesh.sp.close()
        finally:
            dist.destroy_process_group()
    if wanted:
        raise SystemExit(128 + wanted)


if __name__ == "__main__":
    main()
