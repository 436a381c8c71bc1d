#!/usr/bin/env bash
# One host, one process a GPU; the states travel by stores over NVLink. From the repository root:
#   torchrun_configs/one_host_gpus.sh [GPUS] [arguments of the training script]
set -euo pipefail
gpus=${1:-$(nvidia-smi --list-gpus | wc -l)}
shift || true

export NVSHMEM_REMOTE_TRANSPORT=none # no network adapter is needed, nor looked for
# NVLink multicast is not used; where it cannot be set up, initialisation would stop at it.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
    "${SCRIPT:-examples/train_lm.py}" --tokens 65536 "$@"
