# Two commands do all set-up: `make serve` and `make test`. Both create .venv and install pinned packages into it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 30000
JOBS ?= 2
GPU_PYTHON ?= $(BIN)/python

.PHONY: serve test lint types check gpu-check gpu-tables clean help

help:
	@echo "make serve   start an OpenAI-compatible server on the embedded model (CPU), on http://127.0.0.1:$(PORT)"
	@echo "make test    run every test this machine can run, in $(JOBS) processes"
	@echo "make lint    ruff;  make types: mypy on the heart;  make check: lint, types and tests"
	@echo "make gpu-check    on a GPU: its tests, the sanitizer over every kernel, parity, the canary; make gpu-tables: the timings"
	@echo "                  (GPU_PYTHON=python3 takes a Python with a CUDA torch; what else they need: docs/gpu.md)"

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "truegate needs Python 3.11 or newer on the PATH (or make PYTHON=/path/to/python)"; exit 64; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[serve,dev]'
	@touch $@

serve: $(VENV)/.installed
	$(BIN)/truegate serve --port $(PORT)

# one torch thread a process: two processes with two threads each on two cores spend their time waiting for each other
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

check: lint types test

# what docs/gpu.md quotes; nothing else may run on the GPU beside the tables
gpu-check: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed)
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -q -n 8 tests/gpu
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_parity.py
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/canary_engine.py --device cuda
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_memcheck.py

gpu-tables: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed)
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_decode.py qwen3 --no-self-test --profile 1 8 32 128
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_decode.py v2lite --no-self-test --fuse-shared --chunk 8320 --profile 1 8 32 128
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_kernels.py --parts
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_attention.py
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_rows.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
