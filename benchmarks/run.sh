#!/usr/bin/env bash
# All measurements of the README on this machine's GPUs, into benchmarks/results/ (or the folder given).
#   benchmarks/run.sh [FOLDER] [arguments of `flexsp bench op`...]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
shift || true
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
# NVLink multicast stays off, and NVSHMEM looks for no network: one host.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 NVSHMEM_REMOTE_TRANSPORT=none
python=${PYTHON:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')

"$python" -m flexsp bench op --out "$out" "$@"
"$python" -m flexsp bench models --lengths 32768 --out "$out"
ranks=1
for n in 2 4 8; do
    if [ "$n" -le "$gpus" ]; then ranks=$ranks,$n; fi
done
"$python" -m flexsp bench scale --case all --ranks "$ranks" --out "$out"
"$python" -m flexsp bench host --out "$out"
if command -v ncu >/dev/null || [ -x /usr/local/cuda/bin/ncu ]; then
    for op in generated_simple_gla generated_gla generated_deltanet; do
        "$python" -m flexsp bench traffic --op "$op" --out "$out"
    done
fi
"$python" -m flexsp bench plot --case simple_gla "$out"/scale_*.json --out "$out/weak_scaling.png"
if [ "$gpus" -ge 4 ]; then "$python" -m flexsp bench predict "$out"/scale_*.json; fi
if [ "$out" = benchmarks/results ]; then
    "$python" -m flexsp bench document README.md benchmarks/README.md docs/variants.md
else
    "$python" -m flexsp bench table "$out"/{op,scale,host}_*.json
fi
