"""Small tasks that tell token mixers apart, every variant of flexsp as a small model, and the training of one of them.

`synthetics.py` trains all of them and makes the table.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexsp.nn import (
    HGRN,
    HGRN2,
    MLSTM,
    RGLRU,
    RWKV7,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    Mamba,
    Mamba2,
    Mamba3,
    ShortConvolution,
    SimpleGLA,
)
from flexsp.ops import chunk_lightning_attn, chunk_linear_attn, chunk_retention, chunk_rwkv6

IGNORED = -100  # the label of a position that has none, as F.cross_entropy has it
SOLVED = 0.999


# ---------------------------------------------------------------- variants


@dataclass(frozen=True)
class Size:
    """Channels of a model, heads of its mixers, their channels of keys and of values, and the tokens of the short
    convolutions before them; with 1 these mix no tokens."""

    width: int = 128
    heads: int = 8
    head: int = 16
    conv: int = 4

    def short(self) -> dict[str, Any]:
        return {"use_short_conv": self.conv > 1, "conv_size": self.conv}


class OpLayer(nn.Module):
    """Projections, a short convolution, an op, the norm of each head and a projection: for ops without a layer."""

    def __init__(self, op: str, size: Size) -> None:
        super().__init__()
        self.op, self.heads = op, (size.heads, size.head)
        width = size.heads * size.head
        channels = (4 if op == "rwkv6" else 3) * width
        self.proj = nn.Linear(size.width, channels, bias=False)
        self.conv = ShortConvolution(channels, size.conv) if size.conv > 1 else nn.SiLU()
        self.norm, self.out = nn.RMSNorm(size.head), nn.Linear(width, size.width, bias=False)
        if op == "rwkv6":
            self.u = nn.Parameter(torch.zeros(self.heads))
            self.w = nn.Parameter(torch.linspace(-6, -1, width).view(self.heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, *w = self.conv(self.proj(x)).unflatten(-1, (-1, *self.heads)).unbind(2)
        if self.op == "rwkv6":
            o = chunk_rwkv6(q, k, v, -(self.w + w[0]).exp(), self.u)[0]
        elif self.op == "linear":
            o = chunk_linear_attn(1 + F.elu(q), 1 + F.elu(k), v)[0]
        elif self.op == "retention":
            o = chunk_retention(q, k, v)[0]
        else:
            o = chunk_lightning_attn(q, k, v, layer_idx=0, num_layers=2)[0]
        return self.out(self.norm(o).flatten(-2))


Make = Callable[[Size], nn.Module]


def delta(neg: bool) -> Make:
    return lambda s: DeltaNet(
        s.width, s.heads, s.heads * s.head / s.width, s.heads * s.head / s.width, allow_neg_eigval=neg, **s.short()
    )


def gated_delta(neg: bool) -> Make:
    return lambda s: GatedDeltaNet(s.width, s.heads, s.head, 1.0, allow_neg_eigval=neg, **s.short())


def kimi(neg: bool) -> Make:
    return lambda s: KimiDeltaAttention(s.width, s.heads, s.head, allow_neg_eigval=neg, **s.short())


def product(n: int, neg: bool, gate: bool = False) -> Make:
    return lambda s: GatedDeltaProduct(
        s.width, s.heads, s.head, 1.0, num_householder=n, allow_neg_eigval=neg, use_forget_gate=gate, **s.short()
    )


# A layer keeps heads * head**2 numbers of a text; HGRN and RG-LRU keep a vector of four times the width.
VARIANTS: dict[str, Make] = {
    "linear attention": lambda s: OpLayer("linear", s),
    "RetNet": lambda s: OpLayer("retention", s),
    "Lightning attention": lambda s: OpLayer("lightning", s),
    "simple GLA": lambda s: SimpleGLA(s.width, s.heads, s.head, s.head, **s.short()),
    "Mamba-2": lambda s: Mamba2(s.width, s.head, s.head, expand=1, conv_size=s.conv),
    "Mamba-3": lambda s: Mamba3(s.width, s.head, expand=1, head_dim=s.head),
    "Mamba": lambda s: Mamba(s.width, state_size=16, expand=s.heads * s.head**2 / 16 / s.width, conv_size=s.conv),
    "mLSTM": lambda s: MLSTM(s.width, s.heads, qk_dim_factor=1.0, **s.short()),
    "GLA": lambda s: GatedLinearAttention(s.width, s.heads, expand_k=1.0, **s.short()),
    "HGRN2": lambda s: HGRN2(s.width, s.heads, None, **s.short()),
    "RWKV-6": lambda s: OpLayer("rwkv6", s),
    "RWKV-7": lambda s: RWKV7(s.width, s.head),
    "HGRN": lambda s: HGRN(s.width, 4, **s.short()),
    "RG-LRU": lambda s: RGLRU(s.width, 4 * s.width, 4, conv_size=s.conv),
    "DeltaNet": delta(False),
    "DeltaNet, negative": delta(True),
    "Gated DeltaNet": gated_delta(False),
    "Gated DeltaNet, negative": gated_delta(True),
    "KDA": kimi(False),
    "KDA, negative": kimi(True),
    "DeltaProduct 2": product(2, False),
    "DeltaProduct 2, negative": product(2, True),
    "DeltaProduct 3": product(3, False),
    "DeltaProduct 3, negative": product(3, True),
    "Gated DeltaProduct 2, negative": product(2, True, gate=True),
}


# ---------------------------------------------------------------- tasks

KEYS = 64  # of associative recall: token 0 is blank, then come so many keys and as many values
SYMBOLS, NOISE, MARK = 16, 16, 17  # of selective copying


def draw_recall(batch: int, length: int, made: torch.Generator) -> tuple[Tensor, Tensor]:
    """length / 4 pairs of a key and a value, then as many blanks as those have tokens, in which each key stands once
    more, at a place drawn at random; its label is its value."""
    pairs, device = length // 4, made.device
    keys = 1 + shuffled(batch, KEYS, made)[:, :pairs]
    values = 1 + KEYS + torch.randint(KEYS, (batch, pairs), generator=made, device=device)
    places = shuffled(batch, length - 2 * pairs, made)[:, :pairs]
    questions = torch.zeros(batch, length - 2 * pairs, dtype=torch.long, device=device).scatter_(1, places, keys)
    answers = torch.full_like(questions, IGNORED).scatter_(1, places, values)
    shown = torch.stack([keys, values], -1).flatten(1)
    return torch.cat([shown, questions], 1), torch.cat([torch.full_like(shown, IGNORED), answers], 1)


def draw_copying(batch: int, length: int, made: torch.Generator) -> tuple[Tensor, Tensor]:
    """length / 8 symbols at places drawn at random among noise, then as many marks; the marks' labels are the symbols
    in their order."""
    count, device = length // 8, made.device
    symbols = torch.randint(SYMBOLS, (batch, count), generator=made, device=device)
    places = shuffled(batch, length - count, made)[:, :count].sort(1).values
    text = torch.full((batch, length - count), NOISE, device=device).scatter_(1, places, symbols)
    return torch.cat([text, torch.full_like(symbols, MARK)], 1), torch.cat([torch.full_like(text, IGNORED), symbols], 1)


def draw_parity(batch: int, length: int, made: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bits; the label of each is the parity of all up to it."""
    bits = torch.randint(2, (batch, length), generator=made, device=made.device)
    return bits, bits.cumsum(1) % 2


S3 = tuple(permutations(range(3)))  # p takes i to p[i]; number 0 is the identity


@cache
def s3_steps(device: torch.device) -> Tensor:
    """[before, after] -> the permutation that leads from the one to the other."""
    rows = [[S3.index(tuple(after[before.index(i)] for i in range(3))) for after in S3] for before in S3]
    return torch.tensor(rows, device=device)


def draw_s3(batch: int, length: int, made: torch.Generator) -> tuple[Tensor, Tensor]:
    """A start (token 6), then permutations of three things; the label of each is what all up to it do one after
    another, of the start the identity. Labels are drawn, and tokens are the steps between them: both are uniform."""
    after = torch.randint(len(S3), (batch, length), generator=made, device=made.device)
    after[:, 0] = 0
    steps = s3_steps(made.device)[after[:, :-1], after[:, 1:]]
    return F.pad(steps, (1, 0), value=len(S3)), after


def shuffled(batch: int, size: int, made: torch.Generator) -> Tensor:
    """[batch, size], each row a random order of 0..size-1."""
    return torch.rand(batch, size, generator=made, device=made.device).argsort(1)


@dataclass(frozen=True)
class Task:
    """``lengths`` are those of the tests, and the first of them is that of the training."""

    title: str
    draw: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
    vocabulary: int
    classes: int
    lengths: tuple[int, ...]
    layers: int
    size: Size
    guessing: float  # the accuracy of a model that sees the labelled token alone
    steps: int = 1000
    lr: float = 5e-3
    batch: int = 128

    def test_batch(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same at every call. Of a text longer than the training's, positions beyond those have labels alone."""
        made = torch.Generator(device).manual_seed(zlib.crc32(self.title.encode()) + length)
        tokens, labels = self.draw(256, length, made)
        if length > self.lengths[0]:
            labels[:, : self.lengths[0]] = IGNORED
        return tokens, labels


BARE, SMALL = Size(conv=1), Size(64, heads=4)
TASKS = {
    "parity": Task("parity", draw_parity, 2, 2, (64, 256), 1, BARE, 1 / 2, steps=500),
    "s3": Task("permutations of three", draw_s3, 7, 6, (64, 256), 1, BARE, 1 / 6, steps=800),
    "copying": Task("selective copying", draw_copying, 18, SYMBOLS, (96,), 2, Size(), 1 / SYMBOLS),
    "recall": Task("associative recall", draw_recall, 1 + 2 * KEYS, 1 + 2 * KEYS, (128,), 2, SMALL, 1 / KEYS),
}


# ---------------------------------------------------------------- training


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(width), mixer
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(x)


def make_model(variant: str, task: Task) -> nn.Module:
    """Tokens [B, T] to the logits of the labels [B, T, classes]."""
    size, width = task.size, task.size.width
    blocks = [Block(VARIANTS[variant](size), width) for _ in range(task.layers)]
    head = nn.Linear(width, task.classes)
    return nn.Sequential(nn.Embedding(task.vocabulary, width), *blocks, nn.RMSNorm(width), head)


def train(variant: str, task: Task, seed: int, device: torch.device, every: int = 50) -> dict[str, Any]:
    """A result: accuracies on test batches of the task's lengths at the end, and the step that solved it, or None.

    Solved are all lengths, at two tests running, of which the first counts; then training stops.
    """
    began = time.monotonic()
    torch.manual_seed(seed)
    model = make_model(variant, task).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), task.lr, (0.9, 0.95), weight_decay=0.01, fused=True)
    made = torch.Generator(device).manual_seed(1 + seed)
    tests = [task.test_batch(length, device) for length in task.lengths]
    curve: list[tuple[int, list[float]]] = []
    solved = None
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.lr * rate(step, task.steps)
        tokens, labels = task.draw(task.batch, task.lengths[0], made)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == task.steps:
            curve.append((step + 1, accuracies(model, tests)))
            if len(curve) > 1 and all(min(accuracy) >= SOLVED for _, accuracy in curve[-2:]):
                solved = curve[-2][0]
                break
    return {
        "accuracy": dict(zip(task.lengths, curve[-1][1], strict=True)),
        "solved": solved,
        "steps": curve[-1][0],
        "seconds": round(time.monotonic() - began, 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [[step, *accuracy] for step, accuracy in curve],
    }


def rate(step: int, steps: int) -> float:
    """Of the largest: rises over a tenth of the steps, then falls as a cosine to a twentieth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@torch.no_grad()
def accuracies(model: nn.Module, tests: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The part of labelled positions that the model gets right; waits for the device once."""
    found = [(model(tokens).argmax(-1) == labels).sum() / (labels != IGNORED).sum() for tokens, labels in tests]
    return [round(x, 5) for x in torch.stack(found).tolist()]
