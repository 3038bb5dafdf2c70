# Every target sets itself up from a bare clone. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

BIN := .venv/bin
RUN ?= runs/quickstart

.PHONY: help setup native quickstart serve test test-slow test-vllm test-docker test-harbor test-answers lint base report docs lock clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## Set up .venv and system packages
	@bash scripts/setup.sh

native: setup ## Compile the kernels (cached)
	@if [ -f src/strop/model/native/build.py ]; then $(BIN)/python -m strop.model.native.build; fi

quickstart: native ## From the shipped base to a served model on two cores
	@$(BIN)/strop run recipes/quickstart.toml --out $(RUN) --resume

serve: native ## Serve the result of the quickstart to any OpenAI client
	@$(BIN)/strop serve $(RUN)

report: setup ## Write the report of a run (RUN=...) and the results page
	@$(BIN)/strop report $(RUN)
	@$(BIN)/python -m strop.ui.results

test: native ## The tests, less the slow ones
	@$(BIN)/python -m pytest -m "not slow"

test-slow: native ## The slow tests
	@$(BIN)/python -m pytest -m slow

test-vllm: native ## Checkpoints in transformers and vLLM (its own 3 GB environment): same log-probabilities
	@bash scripts/setup_vllm.sh
	@$(BIN)/python benchmarks/checkpoints.py --vllm build/venv-vllm/bin/python

test-docker: setup ## The docker back end against a daemon of its own (root; installs docker.io if it is missing)
	@bash scripts/with_docker.sh $(BIN)/python -m pytest -m "slow or not slow" tests/sandboxes/test_docker.py

test-harbor: setup ## Importers and exported tasks against Harbor itself (its own 0.5 GB environment)
	@bash scripts/setup_harbor.sh
	@$(BIN)/python benchmarks/env_importers.py --harbor build/venv-harbor/bin/python

test-answers: native ## Tasks of reasoning-gym and verifiers, played and judged (their own 1 GB environment)
	@bash scripts/setup_answers.sh
	@$(BIN)/python benchmarks/env_answers.py --python build/venv-answers/bin/python

lint: setup ## Style, types, layers, generated pages
	@$(BIN)/ruff check src tests scripts
	@$(BIN)/ruff format --check src tests scripts
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/python -m strop.ui.results --check

base: native ## Pre-train a base (about 50 minutes on two idle cores, resumable)
	@$(BIN)/python -m strop.midtrain.base.build

docs: setup ## Generate the reference pages and the results page
	@$(BIN)/strop config reference --write docs/reference
	@$(BIN)/python -m strop.ui.results

lock: setup ## Write requirements.lock from .venv
	@$(BIN)/python scripts/lock.py

clean: ## Remove what make made, but no run
	@rm -rf .venv build/venv-vllm build/venv-harbor build/venv-answers .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist
