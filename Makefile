# make help says what there is. Variables are set on the command line: make setup PIP_ARGS="..."

# The first Python that is new enough; the locks are made for 3.11.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# What `make setup` installs: cpu, or gpu for a machine with CUDA.
LOCK ?= cpu

# More arguments for pip. The default index may have torch as a CUDA build only; name one with CPU wheels by
# PIP_ARGS="--extra-index-url <index>", or a folder of wheels by PIP_ARGS="--find-links <folder>".
PIP_ARGS ?=

# More arguments for pytest, for example ARGS="-k dpo", or of make bench: ARGS="--part tldr-14m --threads 2".
ARGS ?=

# uv, which makes the locks (pip install uv); it finds CPU wheels of torch by UV_FIND_LINKS or UV_INDEX.
UV ?= uv
EXTRAS := deepspeed lora wandb tensorboard mlflow trackio bnb slurm sweep optuna reasoning gymnasium openenv report docs dev

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(LOCK)
# Environments of TRL for make bench; that of its PPO unless --algo leaves PPO out. Their locks are for the CPU;
# with LOCK=gpu torch's own needs, CUDA's libraries, come along.
RIVALS := $(if $(filter --help,$(ARGS)),,bench $(if $(filter --algo,$(ARGS)),$(if $(filter ppo,$(ARGS)),bench-ppo),bench-ppo))
CPU_LOCKS := $(foreach lock,cpu bench bench-ppo,requirements/$(lock).txt)
# torch anew: that of the lock, which is written without its +cpu, would be taken for the CUDA build.
RESOLVE = $(UV) pip compile --quiet --python-version 3.11 --no-annotate --no-header --upgrade-package torch
COMPILE = $(RESOLVE) --custom-compile-command "make lock" $(foreach extra,$(EXTRAS),--extra $(extra)) pyproject.toml

# A pytest worker for each core, the longest tests first (tests/session.py).
PYTEST = $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadscope --durations 10

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-nightly test-newest test-slurm test-faults test-gpu system check format docs snapshots bench audit-trl audit-verl reproduce atlas lock lock-check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## .venv with everything that the lock names; nothing where it is up to date

$(STAMP): requirements/$(LOCK).txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; set PYTHON=<python>" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps -r requirements/$(LOCK).txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@test $(LOCK) != gpu || ! $(BIN)/python -m pip show torch | grep '^Version: .*+cpu' || { echo "error: this torch has no CUDA; \
	remove $(VENV), and if pip is configured to find CPU wheels, set PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL to others" >&2; exit 2; }
	@touch $@

train: setup  ## the default run: online DPO of the embedded Pythia, on the CPU
	$(BIN)/python -m rlhf.train algo=dpo model=pythia

test: check  ## lint, types, import contracts, fast tests and short runs: about 10 minutes on two cores
	$(PYTEST) -m "smoke or not (run or process or system or gpu or nightly)" $(ARGS)

test-all: check  ## lint, types, import contracts and all tests but the nightly ones: about 20 minutes on two cores
	$(PYTEST) -m "not nightly" $(ARGS)

test-nightly: setup  ## the tests that test-all leaves out: long runs, further variants, tests of tools
	$(PYTEST) -m nightly $(ARGS)

# Without vLLM, which needs one version of torch and bounds transformers. pip, not the lock, chooses the versions.
test-newest: BIN := .venv-newest/bin
test-newest:  ## fast tests and ten short runs with the newest versions that pyproject.toml allows, in .venv-newest
	test -x $(BIN)/python || $(PYTHON) -m venv .venv-newest
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager $(PIP_ARGS) \
		-e ".[$$(echo $(EXTRAS) liger | tr ' ' ,)]"
	$(BIN)/python -m pip freeze --exclude-editable
	$(PYTEST) -m "smoke or not (run or process or system or gpu or nightly)" $(ARGS)

system:  ## install SLURM, a browser and a C++ compiler for the tests, by apt as root; no other target calls it
	@tests/system.sh

test-slurm: setup  ## the tests on a SLURM of two nodes, which runs as long as the tests; needs make system
	$(BIN)/python -m pytest --durations 10 tests/end_to_end/test_slurm.py $(ARGS)

test-faults: setup  ## inject random faults into short runs: ARGS="--minutes 20 --seed 7", ARGS=--help
	$(BIN)/python -m tests.faults $(ARGS)

test-gpu: setup  ## what needs a GPU, in stages: one GPU, offline, at most 10 minutes; LOCK=gpu, ARGS="--stages 3 4"
	$(BIN)/python -m tests.gpu $(ARGS)

check: setup  ## lint, format, types, import contracts, budgets of code lines
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budget

format: setup  ## rewrite the code as the formatter has it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup  ## the site of the documentation in build/site; a dead link, or a page without a place, is an error
	$(BIN)/sphinx-build -q -E -a -W --keep-going -n -b html -c docs -d build/doctrees . build/site

snapshots: setup  ## write down what recipes and sweeps resolve to, after a change that is meant
	$(BIN)/python -m tests.docs.snapshots

bench: setup $(RIVALS:%=.venv-%/.installed)  ## this project and TRL on the same work; ARGS=--help for what to choose
	$(BIN)/python -m benchmarks.against_trl.bench $(ARGS)

audit-trl: setup .venv-bench/.installed  ## optimizer steps of TRL's trainers and what rlhf audit says; ARGS="online_ipo_2"
	$(BIN)/python -m tests.referee.verdicts trl $(ARGS)

audit-verl: setup .venv-audit/.installed  ## the same with verl's own functions
	$(BIN)/python -m tests.referee.verdicts verl $(ARGS)

reproduce: setup  ## missing runs of the paper's off-policy study in miniature: studies/paper.yaml
	$(BIN)/python -m rlhf.study run studies/paper.yaml $(ARGS)

atlas: setup  ## missing runs of off-policy methods x lag: studies/off_policy.yaml; ARGS="--workers 2"
	$(BIN)/python -m rlhf.study run studies/off_policy.yaml $(ARGS)

.venv-%/.installed: requirements/%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet $(PIP_ARGS) $(if $(filter gpu,$(LOCK)),,--no-deps) -r $<
	@touch $@

lock:  ## resolve requirements/*.in anew
	$(COMPILE) requirements/cpu.in --excludes requirements/excludes.txt --output-file requirements/cpu.txt
	for name in bench bench-ppo; do $(RESOLVE) requirements/$$name.in --excludes requirements/excludes.txt \
		--output-file requirements/$$name.txt || exit 1; done
	sed -i 's/^torch==\([0-9.]*\)+cpu$$/torch==\1/' $(CPU_LOCKS)
	@! grep -n '^nvidia-' $(CPU_LOCKS) || \
		{ echo "error: torch was resolved as a CUDA build; name CPU wheels by UV_FIND_LINKS or UV_INDEX" >&2; exit 2; }
	env -u UV_FIND_LINKS -u UV_INDEX $(COMPILE) requirements/gpu.in --python-platform x86_64-manylinux_2_28 \
		--output-file requirements/gpu.txt

lock-check:  ## whether the locks still resolve and lack nothing, into an empty folder, without installing anything
	for lock in $(CPU_LOCKS); do $(UV) pip install --dry-run --quiet --python $(PYTHON) \
		--target build/lock-check --excludes requirements/excludes.txt -r $$lock || exit 1; done
	env -u UV_FIND_LINKS -u UV_INDEX $(UV) pip install --dry-run --quiet --python $(PYTHON) \
		--target build/lock-check --python-platform x86_64-manylinux_2_28 -r requirements/gpu.txt
	mkdir -p build/lock-check
	for python in 3.11 3.12; do env -u UV_FIND_LINKS -u UV_INDEX $(UV) pip compile --quiet --no-annotate --no-header \
		--python-version $$python --python-platform x86_64-manylinux_2_28 requirements/gpu.txt \
		--output-file build/lock-check/gpu-$$python.txt && \
		diff requirements/gpu.txt build/lock-check/gpu-$$python.txt || exit 1; done
	@echo "all locks resolve"

clean:  ## remove caches and build products; runs and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
