#!/usr/bin/env bash
# Two hosts that meet at a rendezvous. Start the same line on both, from the same checkout of the repository:
#   RENDEZVOUS=first-host:29500 torchrun_configs/two_hosts.sh [processes per host] [arguments of the training script]
# Ranks are contiguous per host, so the sequence crosses the network once. The NVSHMEM transport between hosts needs
# GPUDirect RDMA adapters; without them add --transport process_group, which uses NCCL (or gloo without GPUs).
# Hosts that do not know each other by name take addresses: RENDEZVOUS=address-of-the-first:29500 on both, and on each
# LOCAL_ADDR=its own address.
set -euo pipefail
: "${RENDEZVOUS:?set RENDEZVOUS=host:port, the same on both hosts; the host must be reachable from the other one}"
per_host=${1:-8}
shift || true

address=()
if [ -n "${LOCAL_ADDR:-}" ]; then
    [ "${RENDEZVOUS%:*}" = "$LOCAL_ADDR" ] && first=true || first=false
    address=(--local-addr "$LOCAL_ADDR" --rdzv-conf "is_host=$first")
fi

export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # ranks share the cores of their host
# NCCL_SOCKET_IFNAME / GLOO_SOCKET_IFNAME name the network interface where the default choice is wrong.
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes "${HOSTS:-2}" --nproc-per-node "$per_host" \
    --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN_ID:-flexsp}" "${address[@]}" \
    "${SCRIPT:-examples/train_lm.py}" "$@"
