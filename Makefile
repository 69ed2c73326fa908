# A fresh clone needs Python >= 3.10 and a C++ compiler; `make demo` and `make test` do the rest.
# Other interpreter: make PYTHON=python3.12 test. Arguments for the command: make demo ARGS="--help".

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

bin := $(VENV)/bin
installed := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo bench test lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(installed) ## make .venv with thinwire (editable), its command line and everything the tests need

# The stamp makes a second `make` instant, and a changed kernel or dependency count.
$(installed): pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/*)
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --constraint constraints.txt --editable ".[cli,dev]"
	touch $@

demo: $(installed) ## train a small transformer with AdamW and with Birder on 4 local workers
	$(bin)/thinwire demo $(ARGS)

bench: $(installed) ## measure the kernels, and the exchange between 4 local ranks
	$(bin)/thinwire bench kernels $(ARGS)
	$(bin)/thinwire bench exchange --ranks 4 $(ARGS)

test: lint ## everything that decides: lint, types, layers, tests
	$(bin)/pytest $(ARGS)

lint: $(installed) ## style, types, and who may import whom
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/pyright
	$(bin)/lint-imports

format: $(installed) ## rewrite the sources in the house style
	$(bin)/ruff check --fix
	$(bin)/ruff format

clean: ## remove what was built; .venv keeps its downloads
	rm -rf build dist src/thinwire/kernels/_native.so $(installed) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
