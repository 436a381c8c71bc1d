# A host with NVIDIA GPUs. From the repository root:
#   docker build -t flexsp .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 flexsp                                # flexsp doctor
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/runs:/flexsp/runs" flexsp \
#       torchrun_configs/one_host_gpus.sh 8
# The host needs a driver for CUDA 13 and NVIDIA's container toolkit. Ranks of one host meet in /dev/shm, hence --ipc=host,
# and NVSHMEM and network cards pin memory, hence memlock. Between hosts add --network=host --device=/dev/infiniband.
FROM python:3.12-slim-bookworm

# A C compiler for the launchers that Triton compiles, and what NCCL and NVSHMEM load to use network cards.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

# The release that ran on H100 and H200 (docs/tested.md). PyPI's wheel for Linux brings CUDA, NCCL, NVSHMEM and Triton.
ARG TORCH=2.11.0
RUN pip install --no-cache-dir "torch==${TORCH}" && pip freeze > /constraints.txt

# With torch's own NVSHMEM and CUDA, to which nvshmem4py only adds Python functions.
RUN pip install --no-cache-dir --constraint /constraints.txt "nvshmem4py-cu13>=0.4"

WORKDIR /flexsp
COPY pyproject.toml README.md LICENSE ./
COPY flexsp ./flexsp
RUN pip install --no-cache-dir --constraint /constraints.txt --editable ".[demo]"
COPY examples ./examples
COPY torchrun_configs ./torchrun_configs

# Compiled kernels stay where a volume may keep them.
ENV TRITON_CACHE_DIR=/cache/triton FLEXSP_CODE_DIR=/cache/flexsp
# NVLink multicast is not used; where it cannot be set up, initialisation would stop at it.
ENV NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
RUN useradd --create-home --uid 1000 flexsp && mkdir -p /cache runs && chown -R flexsp: /cache /flexsp
USER 1000
CMD ["flexsp", "doctor"]
