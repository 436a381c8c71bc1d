"""Train a hybrid model whose sequences are cut over ranks: every fourth layer is softmax attention, the others linear.

    python examples/hybrid.py
    torchrun --standalone --nproc-per-node 4 examples/hybrid.py

Both print the same losses. With ``--mixers mlstm-mamba`` layers of xLSTM and of Mamba-1 take turns instead.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import flexsp
from flexsp.nn import MLSTM, Attention, GatedDeltaNet, Mamba, SequenceParallelLA

VOCABULARY, WIDTH = 32, 64


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(WIDTH), mixer
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        x = x + self.mixer(self.norm(x), cu_seqlens)
        return x + self.mlp(x)


def delta_attention(at: int) -> nn.Module:
    """Every fourth layer sees all tokens before it, with four query heads for two key heads."""
    if at % 4 == 3:
        return Attention(WIDTH, num_heads=4, num_kv_heads=2, qk_norm=True)
    return GatedDeltaNet(WIDTH, num_heads=2, head_dim=16)


def mlstm_mamba(at: int) -> nn.Module:
    return Mamba(WIDTH, state_size=8) if at % 2 else MLSTM(WIDTH, num_heads=2, use_short_conv=True)


MIXERS = {"delta-attention": delta_attention, "mlstm-mamba": mlstm_mamba}


class Hybrid(nn.Module):
    def __init__(self, layers: int, mixers: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(MIXERS[mixers](at)) for at in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.head(x)


def draw(step: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Three documents, each of which counts on by a number of its own, and their boundaries; the same on every rank."""
    made = torch.Generator().manual_seed(step)
    bounds = torch.tensor([0, length // 6, length // 2, length])
    starts, strides = torch.randint(VOCABULARY, (3,), generator=made), torch.randint(1, 6, (3,), generator=made)
    texts = [a + n * torch.arange(size) for a, n, size in zip(starts, strides, bounds.diff().tolist(), strict=True)]
    return torch.cat(texts)[None].to(device) % VOCABULARY, bounds.to(device)


def train(sp: flexsp.SequenceParallel, layers: int, mixers: str, length: int, steps: int) -> None:
    torch.manual_seed(0)  # the same parameters on every rank
    model: nn.Module = SequenceParallelLA(Hybrid(layers, mixers).to(sp.device), sp)
    if sp.world_size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        text, bounds = draw(step, length, sp.device)
        sp.set_lengths(sp.partition(text.shape[1]))
        targets = sp.shard(text.roll(-1, 1))
        losses = F.cross_entropy(model(sp.shard(text), bounds).transpose(1, 2), targets, reduction="none")
        loss = sp.token_mean(losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps:
            mean = loss.detach() / sp.world_size
            if sp.world_size > 1:
                dist.all_reduce(mean)
            if sp.rank == 0:
                print(f"step {step}: loss {mean:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--mixers", choices=[*MIXERS], default="delta-attention")
    parser.add_argument("--length", type=int, default=600, help="tokens of a sequence, over all ranks")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    sp = flexsp.init_sequence_parallel()
    train(sp, options.layers, options.mixers, options.length, options.steps)
    sp.close()


if __name__ == "__main__":
    main()
