# make setup | quickstart | ablation | staleness | journey | test | chaos | long | lint | docs | model | clean
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

NPROC ?= 1
STEPS ?=
NAME ?= quickstart
SEEDS ?= 5
JOBS ?= 2
ARMS ?=
RUN = runs/$(NAME)
MODEL := models/SmolLM2-135M

REQUIREMENTS := requirements/cpu.txt requirements/cpu-nodeps.txt pyproject.toml
STAMP = $(VENV)/installed-$(shell cat $(REQUIREMENTS) | sha256sum | cut -c1-16)

.PHONY: help setup model quickstart ablation staleness journey test unit distributed fleet chaos long lint docs clean

help:
	@echo "make setup         environment in $(VENV): CPU versions of everything (2.4 GB; about a minute on an idle machine)"
	@echo "make quickstart    train SmolLM2-135M to add two-digit numbers; NPROC=2 for two ranks, STEPS=n to change the length"
	@echo "make ablation      what each part of DAPO does, 70 runs of a tiny model; SEEDS=n, JOBS=n, ARMS=a,b to run less"
	@echo "make staleness     are answers of older weights as good: 25 runs of the same model; SEEDS=n, JOBS=n, ARMS=a,b"
	@echo "make journey       one model through every format: convert, train, reshard, train, export, compare"
	@echo "make test          unit, distributed (several ranks) and fleet (vLLM) tests"
	@echo "make chaos         runs whose servers are killed and frozen, at three layouts of the trainer (10 minutes)"
	@echo "make long          an answer of 20,480 tokens from a real server (a minute)"
	@echo "make lint          ruff, mypy, shellcheck and hadolint"
	@echo "make docs          docs/configuration.md from the config models"
	@echo "make clean         remove the environment, models, runs and caches"

setup: $(STAMP)

# torch goes first and alone, because only torch is to come from PyTorch's index: there 2.13.0+cpu wins over the CUDA
# build of several GB, and where that index cannot be reached, pip gives up on it once instead of once per package.
# The stamp's name holds the hash of the requirements: a changed requirement makes a new one.
$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; name another with PYTHON=python3.12"; exit 2; }
	@echo "== environment: $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== torch, the CPU build"
	@$(PIP) install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_CPU_INDEX) "$$(grep '^torch==' requirements/cpu.txt)"
	@echo "== locked packages: requirements/cpu.txt"
	@$(PIP) install --quiet -r requirements/cpu.txt
	@echo "== packages without their dependencies: requirements/cpu-nodeps.txt"
	@$(PIP) install --quiet --no-deps -r requirements/cpu-nodeps.txt
	@echo "== dapo-megatron itself, editable"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/installed-*
	@touch $@

model: setup
	@$(BIN)/python tools/prepare_smollm2.py $(MODEL)

# Starts over each time: a finished run in the folder would only be found complete.
quickstart: model
	@rm -rf $(RUN)
	$(BIN)/dapo-megatron train examples/laptop/addition.yaml --nproc $(NPROC) run.dir=$(RUN) $(if $(STEPS),run.steps=$(STEPS))

# Goes on where it was stopped.
ablation: setup
	@$(BIN)/python -m examples.ablation.make_model models/chain-sum-tiny
	$(BIN)/python -m examples.ablation.run --seeds $(SEEDS) --jobs $(JOBS) $(if $(ARMS),--arms $(ARMS))

# Goes on where it was stopped.
staleness: setup
	@$(BIN)/python -m examples.ablation.make_model models/chain-sum-tiny
	$(BIN)/python -m examples.staleness.run --seeds $(SEEDS) --jobs $(JOBS) $(if $(ARMS),--arms $(ARMS))

# Hugging Face -> Megatron -> training -> another layout -> training -> Hugging Face -> transformers and vLLM.
journey: model
	examples/checkpoints/journey.sh $(MODEL) runs/journey

test: unit distributed fleet

# Unit tests share nothing: two files at a time. The others start processes of their own, one test after another.
unit: PYTEST_ARGS = -n 2 --dist loadfile
chaos long: PYTEST_ARGS = --capture=no
unit distributed fleet chaos long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/$@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck launch/*.sh examples/*/*.sh .ci/run
	$(BIN)/hadolint Dockerfile

docs: setup
	$(BIN)/python -m dapo_megatron.config.reference > docs/configuration.md

clean:
	rm -rf $(VENV) models runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
