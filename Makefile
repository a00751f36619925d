# so-tui: `make demo` sets everything up and trains the embedded tiny model; `make test` runs the tests.
#
# Variables worth knowing:
#   PYTHON=python3.12     the interpreter the environment is made with (3.11 or newer)
#   STACK=newest          which set of training packages to install: oldest, middle or newest (docs/versions.md)
#   TORCH=torch==2.13.0   which torch to install, if not that of the set
#   TORCH_INDEX=URL       another package index for torch (the CUDA or CPU build you need); empty: pip's default
#   SYSTEM_TORCH=1        use the torch that PYTHON already has (site containers, modules) and install none
#   VENV=.venv            where the environment goes
#   CPU_LIMIT=300         fail when the tests of a tier take more CPU seconds; without it they are only reported
#   COVERAGE=1            have `make test` measure which lines the tests run, into build/coverage
#   SYSTEM_TESTS=FILES    only these tests of `make test-system`

PYTHON ?= python3
VENV ?= .venv
STACK ?= newest
TORCH ?= torch==$(shell sed -n '/^name = "$(STACK)"/,/^$$/s/^torch = "\(.*\)"/\1/p' so_tui/machine/versions.toml)
TORCH_INDEX ?=
SYSTEM_TORCH ?=
CPU_LIMIT ?=
COVERAGE ?=
SYSTEM_TESTS ?= tests/ui/test_cost.py tests/system tests/slurm tests/security/test_looking.py \
	tests/security/test_exchanged_runs.py tests/launch/test_fetch.py tests/trainer/test_architectures.py

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LIGHT := $(VENV)/.light
PACKAGES := $(VENV)/.packages
TRAIN := $(VENV)/.train
AARCH64_TESTS := tests/system/test_aarch64_kernel.py tests/system/test_aarch64_worker.py
DOCS := $(VENV)/.docs

# The first run compiles DeepSpeed's CPU Adam kernel; with ccache only the very first one pays for it.
export PATH := $(abspath $(BIN)):$(wildcard /usr/lib/ccache):$(PATH)
export PYTHONSAFEPATH := 1

# Containers often forbid it. Tests start hundreds of processes, and each would compile all of our modules again.
unexport PYTHONDONTWRITEBYTECODE

CHECKS := check-code check-types check-imports check-words check-automation check-repository

.PHONY: help install demo test test-all test-slow test-system aarch64-test test-gpu check $(CHECKS) docs coverage-report screenshots tour lock wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         set up everything here, then train the embedded tiny model on two ranks and show it"
	@echo "make test         everything that need not train, and one real run (about six minutes on two cores)"
	@echo "make test-all     make test, then every test that trains (at most 14 minutes)"
	@echo "make test-system  the wheel in an empty environment, locked packages, Slurm (at most 18 minutes; needs a package index)"
	@echo "make aarch64-test the light install and the kernel on aarch64: natively there, elsewhere with qemu-user and Debian's packages (at most 8 minutes)"
	@echo "make check        ruff, mypy --strict, import rules, codespell, proselint, workflows and hooks, generated files, documentation"
	@echo "make docs         the documentation as a site in build/site, with every internal link checked"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make screenshots  redraw screenshots/, simulated and from a real run"
	@echo "make tour         record the tour in screenshots/ (ten minutes; needs tmux and npm)"
	@echo "make lock         renew the exact versions in locks/"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "so-tui needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV)

$(LIGHT): $(BIN)/python pyproject.toml locks/light.txt
	@echo "installing so-tui and its tools into $(VENV)"
	@$(PIP) install -r locks/light.txt
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

# Without --use-pep517, pip before 23.1 (Debian 12) runs DeepSpeed's setup.py in a way that PYTHONSAFEPATH breaks.
$(PACKAGES): $(LIGHT) locks/$(STACK).txt
	@echo "installing torch, DeepSpeed and transformers into $(VENV)"
	@$(if $(SYSTEM_TORCH),$(BIN)/python -c 'import torch; print("using torch", torch.__version__)',$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH))
	@$(PIP) install --use-pep517 -r locks/$(STACK).txt $(if $(filter newest,$(STACK)),-c locks/light.txt)
	@touch $@

$(TRAIN): $(PACKAGES)
	@echo "compiling DeepSpeed's CPU Adam kernel (once, about a minute)"
	@echo '{}' | $(BIN)/python -m so_tui_trainer.tools.build_ops >$(VENV)/build_ops.log 2>&1 || { cat $(VENV)/build_ops.log; exit 1; }
	@touch $@

# For containers: the kernels are compiled for the CPU that they first run on.
install: $(PACKAGES)

demo: $(TRAIN)
	@$(BIN)/so-tui run tiny

$(DOCS): $(LIGHT) locks/docs.txt
	@echo "installing what builds the documentation into $(VENV)"
	@$(PIP) install -r locks/docs.txt -c locks/light.txt
	@touch $@

# Tests make and remove many thousands of small files: in memory where it has room and lets programs run. Tests that install packages
# need more room.
IN_MEMORY := if awk '$$2 == "/dev/shm" && $$3 == "tmpfs" && $$4 !~ /noexec/ { found = 1 } END { exit !found }' /proc/mounts && \
	[ "$$(df --output=avail -k /dev/shm | tail -n 1)" -ge 2097152 ]; then \
	TMPDIR=$$(mktemp -d /dev/shm/tests.XXXXXX) && export TMPDIR && trap 'rm -rf "$$TMPDIR"' EXIT && trap 'exit 130' INT TERM; fi;

PYTEST := $(BIN)/python -m pytest --durations=15 --durations-min=1 $(if $(CPU_LIMIT),--cpu-limit=$(CPU_LIMIT))
# The tests of a file share a worker and its fixtures. There is one worker more than the two cores of a small machine, since tests wait
# for processes and ranks. Clusters of the system tier have deadlines that three at once would miss.
WORKERS := --dist loadfile --no-loadscope-reorder -n

# Measuring slows everything down, so that tests of speed may fail (1): tests are judged without it.
test: $(TRAIN)
	@$(if $(COVERAGE),rm -rf build/coverage)
	@$(IN_MEMORY) $(PYTEST) -m "not slow and not system and not gpu and not repository" $(WORKERS) 3 $(if $(COVERAGE),--cov --cov-report= || [ $$? = 1 ])
	@$(if $(COVERAGE),$(MAKE) --no-print-directory coverage-report)

# GitHub shows what is added to GITHUB_STEP_SUMMARY on the page of the job.
coverage-report: $(LIGHT)
	@$(BIN)/coverage xml --quiet
	@$(BIN)/coverage report --format=markdown >build/coverage/summary.md
	@cat build/coverage/summary.md
	@if [ -n "$$GITHUB_STEP_SUMMARY" ]; then cat build/coverage/summary.md >>"$$GITHUB_STEP_SUMMARY"; fi

test-all: test
	@$(MAKE) --no-print-directory test-slow

test-slow: $(TRAIN)
	@$(IN_MEMORY) $(PYTEST) -m "slow and not gpu" $(WORKERS) 3

# What the dashboard costs is measured while nothing else runs. The other tests mostly wait.
ALONE := tests/ui/test_cost.py
test-system: $(TRAIN)
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m tests.support.set_environments
	@$(if $(filter $(ALONE),$(SYSTEM_TESTS)),$(PYTEST) -m system $(ALONE))
	@$(PYTEST) -m system $(addprefix --ignore=,$(AARCH64_TESTS)) $(filter-out $(ALONE),$(SYSTEM_TESTS)) $(WORKERS) 2

# The light install, then the Adam kernel and its worker. A part that this machine cannot run says what it lacks.
aarch64-test: $(TRAIN)
	@$(BIN)/python -m tools.aarch64
	@$(PYTEST) -m system $(AARCH64_TESTS)

test-gpu: $(TRAIN)
	@$(BIN)/python -m pytest -m gpu

# Each of CHECKS is a hook of .pre-commit-config.yaml, too.
check: $(CHECKS) docs

check-code: $(LIGHT)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

check-types: $(PACKAGES)
	@$(BIN)/mypy

check-imports: $(LIGHT)
	@$(BIN)/lint-imports

check-words: $(LIGHT)
	@$(BIN)/codespell
	@$(BIN)/proselint --output-format compact check README.md CONTRIBUTING.md CHANGELOG.md $$(find docs -name '*.md')

# Each build is a whole one: Sphinx does not repeat the warnings of pages that it need not read again.
docs: $(DOCS)
	@$(BIN)/sphinx-build --builder html --fresh-env --fail-on-warning --keep-going --nitpicky --quiet --conf-dir docs . build/site
	@! grep -rnoE '<(script|link|img)[^>]+(src|href)="(https?:)?//[^"]*' --include='*.html' build/site || { echo "the site must load nothing from elsewhere"; exit 1; }
	@echo "documentation: build/site/index.html"

# The schemas come with check-jsonschema, and zizmor asks no server.
check-automation: $(LIGHT)
	@$(BIN)/zizmor --offline --quiet --persona=pedantic --collect=all --strict-collection .
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	@$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	@$(BIN)/pre-commit validate-config

# Files that are made from others, what the documents say of the repository, and the changes of code that tests must notice: each still
# has its text.
check-repository: $(LIGHT)
	@found=$$($(BIN)/python tests/mutants/run.py --check) || { echo "$$found"; exit 1; }
	@$(BIN)/python -m pytest -q -m repository tests/test_docs.py tests/test_automation.py tests/test_automation.py \
		tests/commands tests/spec/test_reference.py

screenshots: $(TRAIN)
	@$(BIN)/python screenshots/make.py

tour: $(TRAIN)
	@$(BIN)/python screenshots/tour.py

wheel: $(LIGHT)
	@$(BIN)/python -m hatchling build -t wheel

lock:
	@PYTHON=$(PYTHON) TORCH=$(TORCH) locks/renew

clean:
	rm -rf $(VENV) .venv-aarch64 build dist .pytest_cache .mypy_cache .ruff_cache
