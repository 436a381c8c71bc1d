#!/usr/bin/env bash
# One host without GPUs: one process a rank over gloo. From the repository root:
#   torchrun_configs/one_host_cpu.sh [RANKS] [arguments of the training script]
set -euo pipefail
ranks=${1:-4}
shift || true

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # ranks share the cores: more threads than cores slow all of them
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    "${SCRIPT:-examples/train_lm.py}" --device cpu "$@"
