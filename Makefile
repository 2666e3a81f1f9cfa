# One command each: serve, test, lint, types, bench. Nothing is installed outside .venv.
#
#   make serve MODEL=/path/to/model SERVE_ARGS="--port 9000"
#   make test TEST_ARGS="tests/engine -k preemption"
#   make PYTHON=python3.12 TORCH_ARGS="--index-url URL" serve     another Python, another build of torch

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Extra arguments of `pip install torch`: an index with CPU or CUDA builds. The default index decides otherwise.
TORCH_ARGS ?=
MODEL ?= smollm2-135m
SERVE_ARGS ?=
TEST_ARGS ?=
TEST_WORKERS ?= 2
BENCH_ARGS ?=

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check
sources := metrale_async kernels storage tests bench

.DEFAULT_GOAL := help
.PHONY: help install serve test lint types format docs bench dist wheel-test clean model
.DELETE_ON_ERROR:

help:
	@echo "make serve    set up, fetch the default model and serve it on 127.0.0.1:8888"
	@echo "make test     set up what tests need, lint, check types and run every test"
	@echo "make lint     ruff check and ruff format --check      make format   apply both"
	@echo "make types    mypy                                    make docs     rewrite README's generated tables"
	@echo "make bench    concurrency ladder and start-up time    make dist     build wheel and sdist"
	@echo "make clean    remove everything that was built"

# Stamps hold the set-up: a step runs again only if a file it depends on is newer.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created requirements.txt pyproject.toml
	$(pip) install $(TORCH_ARGS) "$$(grep '^torch==' requirements.txt)"
	@echo "installing the packages of requirements.txt"
	@$(pip) install --quiet -r requirements.txt
	@$(pip) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.txt
	@echo "installing the packages of requirements-dev.txt"
	@$(pip) install --quiet -r requirements-dev.txt
	@touch $@

install: $(VENV)/.runtime

model: $(VENV)/.runtime
	@$(python) -m metrale_async models pull $(MODEL)

serve: model
	@exec $(python) -m metrale_async serve $(MODEL) $(SERVE_ARGS)

test: lint types
	@$(python) -m metrale_async models pull smollm2-135m
	OMP_NUM_THREADS=1 $(python) -m pytest -n $(TEST_WORKERS) --dist worksteal $(TEST_ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check $(sources)
	$(VENV)/bin/ruff format --check $(sources)

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix $(sources)
	$(VENV)/bin/ruff format $(sources)

types: $(VENV)/.dev
	$(VENV)/bin/mypy

docs: $(VENV)/.runtime
	$(python) -m metrale_async.cli.reference README.md

bench: model
	$(python) -m metrale_async bench ladder $(MODEL) $(BENCH_ARGS)
	$(python) -m metrale_async bench startup $(MODEL)

dist: $(VENV)/.dev
	$(python) -m build --outdir dist

# The wheel in an empty environment, with dependencies from the package index: slow, so not part of `make test`.
wheel-test: dist
	rm -rf build/wheel-venv
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet $(TORCH_ARGS) "$$(grep '^torch==' requirements.txt)"
	build/wheel-venv/bin/python -m pip install --quiet dist/*.whl
	cd build && wheel-venv/bin/metrale-async generate --max-tokens 8 --temperature 0 "The capital of France is"
	rm -rf build/wheel-venv

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
