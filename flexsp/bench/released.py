"""Layers of released models, with the sizes of their configurations. The first are most used."""

from __future__ import annotations

from flexsp.bench.layers import Layer

__all__ = ["RELEASED"]

#     name, op, H, K, V, G, gates
RELEASED = (
    Layer("Mamba-2 2.7B", "mamba2", 80, 128, 64, 1, "initialised"),
    Layer("Nemotron-H 8B", "mamba2", 128, 128, 64, 8, "initialised"),
    Layer("Falcon-H1 34B", "mamba2", 32, 256, 128, 2, "initialised"),
    Layer("Zamba2 7B", "mamba2", 112, 64, 64, 2, "initialised"),
    Layer("Mamba-3 in Mamba-2 2.7B's sizes", "mamba3", 80, 128, 64, 1, "own"),
    Layer("mLSTM 8 x 256/256", "mlstm", 8, 256, 256, 8, "own"),
    Layer("xLSTM-7B", "mlstm", 8, 256, 512, 8, "own"),
    Layer("Qwen3-Next", "gated_delta_rule", 32, 128, 128, 16, "initialised"),
    Layer("Qwen3.5-27B", "gated_delta_rule", 48, 128, 128, 16, "initialised"),
    Layer("OLMo-hybrid 7B", "gated_delta_rule_to_2", 30, 96, 192, 30, "initialised"),
    Layer("Gated DeltaNet 8 x 256/256", "gated_deltanet", 8, 256, 256, 8, "initialised"),
    Layer("Gated DeltaNet, fla's default", "gated_deltanet", 6, 256, 512, 6, "initialised"),
    Layer("Kimi K3", "kda", 32, 128, 128, 32, "bounded"),
    Layer("Kimi Linear", "kda", 32, 128, 128, 32, "unbounded"),
    Layer("Gated DeltaNet-2, fla's default", "gdn2", 16, 128, 128, 16, "initialised"),
    Layer("RWKV-7 2.9B", "rwkv7", 40, 64, 64, 40, "own"),
    Layer("DeltaNet-1.3B", "delta_rule", 16, 128, 128, 16, "own"),
    Layer("GLA-1.3B", "gla", 4, 256, 512, 4, "mild"),
    Layer("RetNet", "retention", 10, 256, 512, 10, "own"),
    Layer("MiniMax-01", "lightning", 64, 128, 128, 64, "own"),
    Layer("HGRN2", "hgrn2", 16, 128, 128, 16, "mild"),
    Layer("RWKV-6", "rwkv6", 32, 64, 64, 32, "mild"),
    Layer("Mamba-1 2.8B", "mamba", 1, 16, 5120, 1, "own"),
    Layer("Mamba-1, D 8192", "mamba", 1, 16, 8192, 1, "own"),
    Layer("RecurrentGemma 9B", "rg_lru", 1, 1, 4096, 1, "own"),
)
