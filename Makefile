# so-tui: `make demo` sets everything up and trains the embedded tiny model; `make test` proves the rest.
#
# Variables worth knowing:
#   PYTHON=python3.12     the interpreter the environment is made with (3.11 or newer)
#   TORCH=torch==2.13.0   which torch to install
#   TORCH_INDEX=URL       another package index for torch (the CUDA or CPU build you need); empty: pip's default
#   SYSTEM_TORCH=1        use the torch that PYTHON already has (site containers, modules) and install none
#   VENV=.venv            where the environment goes

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
SYSTEM_TORCH ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LIGHT := $(VENV)/.light
TRAIN := $(VENV)/.train

# The first run compiles DeepSpeed's CPU Adam kernel; with ccache only the very first one pays for it.
export PATH := $(abspath $(BIN)):$(wildcard /usr/lib/ccache):$(PATH)
export PYTHONSAFEPATH := 1

.PHONY: help demo test test-gpu check check-aarch64 screenshots lock wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         set up everything here, then train the embedded tiny model on two ranks and show it"
	@echo "make test         every test that needs no GPU (trains for real on the CPU; about 18 minutes on two cores)"
	@echo "make check        ruff, mypy --strict, import rules"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make screenshots  redraw screenshots/ from a real run"
	@echo "make lock         renew the exact versions in locks/"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "so-tui needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV)

$(LIGHT): $(BIN)/python pyproject.toml locks/light.txt
	@echo "installing so-tui and its tools into $(VENV)"
	@$(PIP) install -r locks/light.txt
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(TRAIN): $(LIGHT) locks/train.txt
	@echo "installing torch, DeepSpeed and transformers into $(VENV)"
	@$(if $(SYSTEM_TORCH),$(BIN)/python -c 'import torch; print("using torch", torch.__version__)',$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH))
	@$(PIP) install -r locks/train.txt -c locks/light.txt
	@echo "compiling DeepSpeed's CPU Adam kernel (once, about a minute)"
	@echo '{}' | $(BIN)/python -m so_tui_trainer.tools.build_ops >$(VENV)/build_ops.log 2>&1 || { cat $(VENV)/build_ops.log; exit 1; }
	@touch $@

demo: $(TRAIN)
	@$(BIN)/so-tui run tiny

test: $(TRAIN)
	@$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(TRAIN)
	@$(BIN)/python -m pytest -m gpu

check: $(TRAIN)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory check-aarch64

# Grace is aarch64: every locked package must have a wheel for it (DeepSpeed is built from source everywhere, torch is the user's choice).
AARCH64 := $(foreach tag,manylinux2014 manylinux_2_17 manylinux_2_26 manylinux_2_28 manylinux_2_34,--platform $(tag)_aarch64)
check-aarch64: $(LIGHT)
	@grep -hv '^deepspeed==' locks/light.txt locks/train.txt >$(VENV)/aarch64.txt
	@$(PIP) install --dry-run --no-deps --only-binary=:all: --python-version 3.11 $(AARCH64) --target $(VENV)/aarch64 -r $(VENV)/aarch64.txt
	@echo "every locked package has an aarch64 wheel"

screenshots: $(TRAIN)
	@$(BIN)/python screenshots/make.py

wheel: $(LIGHT)
	@$(BIN)/python -m hatchling build -t wheel

lock:
	@PYTHON=$(PYTHON) TORCH=$(TORCH) locks/renew

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache
