"""Models of transformers, cut over ranks, against the unmodified ones in float64. Run by torchrun, not by pytest:

    PYTHONPATH=. torchrun --standalone --nproc-per-node 2 tests/gpu/ranks_transformers.py [--only A,B]
        [--dtypes bfloat16] [--device cpu]

Loss and gradients may be twice as far from float64 as those of the unmodified model are in the same dtype, in the
median of some batches, or of more. Prints one line a check on rank 0; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flexsp import SequenceParallel, init_sequence_parallel
from flexsp.integrations.transformers import parallelize
from tests.harness.told import passes_on_all
from tests.transformers_models import ALL_MODELS, Found, make, packed, rows, run_documents, run_shard, run_whole

# Sizes of heads that kernels have tiles for; what a model's other sizes then have to be.
_ATTENTION: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_DELTA = _ATTENTION | {
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_MAMBA = _ATTENTION | {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "olmo_hybrid"), _DELTA),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _DELTA | {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2],
    }}),
    "kimi_linear": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "linear_head_dim": 64,
        "linear_num_heads": 2, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    "mamba2": {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "state_size": 64, "n_groups": 1},
    **dict.fromkeys(("bamba", "granitemoehybrid"), _MAMBA), "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "nemotron_h": _ATTENTION | {"ssm_state_size": 64, "mamba_num_heads": 2, "mamba_head_dim": 64, "n_groups": 1},
    "zamba2": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "mamba_d_state": 64,
        "n_mamba_heads": 2, "mamba_ngroups": 1,
    },
    "bailing_hybrid": {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    "lara_mini": _DELTA, **dict.fromkeys(("jamba", "lfm2", "lfm2_moe", "lfm3"), _ATTENTION),
    **dict.fromkeys(("mamba", "falcon_mamba"), {"hidden_size": 64, "state_size": 16}),
    "zamba": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},
    "minimax": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    "recurrent_gemma": {"hidden_size": 64, "lru_width": 64, "num_attention_heads": 4},
    "xlstm": {"hidden_size": 128, "num_heads": 2},
}  # fmt: skip
OWN = [("eager", 8), ("sdpa", 16), ("eager", 32)]  # attention and chunks of unmodified runs
LEAST = {torch.float32: 16 * 2.0**-23, torch.bfloat16: 2 * 2.0**-8}
FEW, MANY = 4, 12  # batches


def on(device: torch.device, batch: dict[str, Any]) -> dict[str, Any]:
    return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}


def averaged(sp: SequenceParallel, found: Found) -> Found:
    mean = {name: x.double() for name, x in found.items()}
    for x in mean.values():
        dist.all_reduce(x)
        x /= sp.world_size
    return mean


def errors(found: Found, want: Found) -> dict[str, float]:
    return {key: float((found[key].double() - x).norm() / x.norm()) for key, x in want.items()}


def add_ratios(
    sp: SequenceParallel, name: str, dtype: torch.dtype, lengths: list[int] | None, seed: int,
    ratios: dict[str, list[float]],
) -> None:  # fmt: skip
    """Errors over those of the unmodified model, of one batch: rows cut to `lengths`, or documents if None."""
    torch.manual_seed(seed)
    batch = rows(1, sum(lengths)) if lengths is not None else packed([3, 90, 1, 140, 66])
    batch, given = on(sp.device, batch), SIZES[name]

    def model(kind: torch.dtype, attention: str = "sdpa") -> Any:
        return make(name, attention, **given).to(sp.device, kind)

    run: Callable[..., Found] = run_documents if lengths is None else run_whole
    want = run(model(torch.float64), batch)
    own = [errors(run(model(dtype, how), batch, size), want) for how, size in OWN]
    sp.set_lengths(lengths)
    got = averaged(sp, run_shard(parallelize(model(dtype), sp), sp, batch))
    for key, error in errors(got, want).items():
        ratios.setdefault(key, []).append(error / (max(x[key] for x in own) + LEAST[dtype]))


def same_on_all_ranks(value: float, sp: SequenceParallel) -> float:
    """The largest of all ranks, which go on together."""
    largest = torch.tensor(value, dtype=torch.float64, device=sp.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def check(sp: SequenceParallel, name: str, dtype: torch.dtype, lengths: list[int] | None) -> str:
    ratios: dict[str, list[float]] = {}
    for count in (FEW, MANY):
        for _ in range(count):
            add_ratios(sp, name, dtype, lengths, len(ratios.get("loss", ())), ratios)
        unknown = sorted(key for key, of in ratios.items() if not all(map(math.isfinite, of)))
        assert not unknown, f"NaN or infinite: {unknown}"
        typical = {key: statistics.median(of) for key, of in ratios.items()}
        worst = max(typical, key=typical.__getitem__)
        if same_on_all_ranks(typical[worst], sp) < 2:
            break
    assert typical[worst] < 2, f"{worst}: {ratios[worst]}"
    return f"worst {typical[worst]:.2f} of the model's own error, {worst}; batches {len(ratios['loss'])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ALL_MODELS), help="model types, separated by commas")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    sp = init_sequence_parallel(timeout_s=60.0, device=options.device)
    world, ok = sp.world_size, True
    uneven = [150, 2, 97, 51, 30, 70, 64, 9][:world]
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    for name in options.only.split(","):
        for dtype in (getattr(torch, x) for x in options.dtypes.split(",")):
            for lengths in (uneven, None):
                what = f"{name} {str(dtype)[6:]} {'documents' if lengths is None else lengths}"
                ok &= passes_on_all(sp, what, partial(check, sp, name, dtype, lengths))
    dist.barrier()
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
