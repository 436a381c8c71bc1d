# make demo      trains a small language model, one sequence cut over 4 CPU processes
# make demo-hybrid  trains a small Qwen3-Next of transformers on 4 CPU processes, and compares it with one; some minutes
# make synthetics  trains small models of every variant on recall, copying and state tracking; minutes on a GPU
# make test      the CPU suite                      make lint       ruff and mypy
# make test-tools  of the CPU suite what is about documents, examples, benchmarks, plans, messages and the tests' tools
# make test-all  the CPU suite with its slow cases
# make test-fla  the tests of flash-linear-attention's layers and models on CPU, in an environment of their own
# make test-trl  the tests of TRL's trainers over ranks on CPU, in an environment of their own
# make mutate    changes the code on purpose, a line at a time, and reports what no test notices; some minutes
#                ARGS="--sample 40": at random, and says what share of the changes is noticed
# make same-code BASE=commit  whether every kernel is compiled to the same PTX as there; some minutes, no GPU
# make host-time BASE=commit  the host's time for calls of seven ops and of Mamba2, beside that there
# make docs      the documentation as a site, in build/docs; a warning is an error
# make test-gpu  the GPU tests, with the environment's own Python (torch with CUDA, pytest and pytest-xdist installed)
# make sanitize  compute-sanitizer over one small call of every distinct kernel configuration, on a GPU
#
# Needs Python >= 3.10 with its venv module; demo, test and lint install the rest into .venv and keep it for the next
# time. pip picks the build of torch. The targets need no CUDA, and a CPU wheel is the smallest and quickest to install:
# let pip see PyTorch's CPU wheels (the selector on pytorch.org gives the option). `make demo TORCH=torch` takes the
# newest release instead of the tested one; constraints.txt says what `make test CONSTRAINTS=` is for.

PYTHON      ?= python3
TORCH       ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt

RANKS   ?= 4
MINUTES ?= 4
NAME    ?= demo
DATA    ?=

# Files of tests run side by side, each whole in one process; WORKERS=0 runs all in pytest's own (-s, --pdb).
WORKERS ?= 2
ARGS    ?=

VENV := .venv
BIN  := $(VENV)/bin
# Most files of torch and transformers are never imported: those that are, Python compiles then.
PIP  := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo demo-hybrid synthetics test test-tools test-all test-fla test-trl mutate same-code host-time lint docs test-gpu test-gpu-one test-gpu-ranks sanitize clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
	    examples/train_lm.py --name $(NAME) --minutes $(MINUTES) $(if $(DATA),--data "$(DATA)")

# dp 2 x sp 2 on 4 ranks. The same on one rank, and once more with its first weights changed by a rounding: how far these
# two drift apart is what the ranks may differ by.
HYBRID_STEPS ?= 45
HYBRID := examples/train_hybrid.py --runs runs/hybrid --device cpu --dtype float32 --steps $(HYBRID_STEPS) \
    --decay 15 $(if $(DATA),--data "$(DATA)")

demo-hybrid: $(VENV)/.hybrid
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
	    $(HYBRID) --name many_ranks --sp 2
	@export OMP_NUM_THREADS=1; echo "the same on one rank"; \
	$(BIN)/python $(HYBRID) --name nudged --nudge --no-export > /dev/null & nudged=$$!; \
	$(BIN)/python $(HYBRID) --name one_rank --no-export && wait $$nudged
	$(BIN)/python examples/compare_runs.py runs/hybrid/one_rank runs/hybrid/many_ranks --nudged runs/hybrid/nudged

synthetics: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/python examples/synthetics.py $(ARGS)

# Byte code is kept, whatever the environment says: the tests start many processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile \
    --no-loadscope-reorder --durations=10

# With ARGS, which name files, all of what they name.
test: $(VENV)/.dev
	$(PYTEST) -m "not gpu and not slow" $(if $(ARGS),,--job suite) $(ARGS)

test-tools: $(VENV)/.dev
	$(PYTEST) -m "not gpu and not slow" --job tools $(ARGS)

test-all: $(VENV)/.dev
	$(PYTEST) -m "not gpu" $(ARGS)

# Another environment: where flash-linear-attention is installed, transformers imports it with each of its models.
test-fla:
	$(MAKE) VENV=.venv-fla .venv-fla/.fla
	$(MAKE) VENV=.venv-fla test-all ARGS="$(wildcard tests/integrations/test_fla*.py) $(ARGS)"

# Where datasets is installed, every process that makes a trainer of transformers imports it.
test-trl:
	$(MAKE) VENV=.venv-trl .venv-trl/.trl
	HF_HUB_OFFLINE=1 $(MAKE) VENV=.venv-trl test-all ARGS="tests/integrations/test_transformers_trl.py $(ARGS)"

$(VENV)/.trl: $(VENV)/.dev
	$(PIP) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[trl]"
	@touch $@

$(VENV)/.fla: $(VENV)/.dev
	$(PIP) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[fla]"
	@touch $@

mutate: $(VENV)/.dev
	$(BIN)/python tests/mutate.py $(ARGS)

same-code: $(VENV)/.dev
	$(BIN)/python tests/same_code.py $(BASE) $(ARGS)

host-time: $(VENV)/.dev
	$(BIN)/python tests/host_time.py $(BASE) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 10) or sys.exit(f"Python >= 3.10 is needed, this is {v}")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing flexsp, $(TORCH) and what the demo needs into $(VENV)"
	$(PIP) "$(TORCH)" -e ".[demo]"
	@touch $@

$(VENV)/.hybrid: pyproject.toml | $(BIN)/python
	@echo "installing flexsp, $(TORCH), transformers and what the demo needs into $(VENV)"
	$(PIP) "$(TORCH)" -e ".[hybrid]"
	@touch $@

# Triton is named here, not in pyproject.toml: a CPU wheel of torch brings none, and the tests interpret the kernels.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing flexsp and what the checks need into $(VENV)"
	$(PIP) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[dev]" triton
	@touch $@ $(VENV)/.demo $(VENV)/.hybrid

# All at once: pip takes its time to look at what is there already.
$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing flexsp, what the checks need and what makes the documentation into $(VENV)"
	$(PIP) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[dev,docs]" triton
	@touch $@ $(VENV)/.dev $(VENV)/.demo $(VENV)/.hybrid

# The GPU machine's interpreter and torch are used as they are. NVLink multicast stays off (NVLS), NVSHMEM stays on one
# host; each script is stopped if it hangs, and one failure does not keep the others from running.
GPU_PYTHON ?= python3
GPU_ENV := PYTHONPATH=. NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 \
    NVSHMEM_REMOTE_TRANSPORT=none

test-gpu:
	@status=0; $(MAKE) test-gpu-one || status=1; $(MAKE) test-gpu-ranks || status=1; exit $$status

# Most of the time goes into compiling kernels: GPU_WORKERS is about the number of cores, and the workers are dealt out
# over the GPUs. SHARD=1/2 takes about half of the tests.
GPU_WORKERS ?= 12
SHARD       ?= 1/1
# What passed is recorded here, and `python -m tests.tested` writes it into docs/tested.md.
TESTED      ?= benchmarks/results/tested

test-gpu-one:
	$(GPU_ENV) OMP_NUM_THREADS=1 timeout -k 10 1800 $(GPU_PYTHON) -m pytest -q -n $(GPU_WORKERS) tests/gpu \
	    --shard $(SHARD) --tested $(TESTED) $(ARGS)

SANITIZED ?= benchmarks/results/sanitize.json

sanitize:
	$(GPU_ENV) timeout -k 10 1800 $(GPU_PYTHON) tests/gpu/sanitize.py --out $(SANITIZED) $(ARGS)

test-gpu-ranks:
	$(GPU_ENV) $(GPU_PYTHON) -m tests.tested ranks --tested $(TESTED)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache
