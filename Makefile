# A fresh clone needs Python >= 3.10 and a C++ compiler; `make demo` and `make test` do the rest.
# Other interpreter: make PYTHON=python3.12 test. Arguments for the command: make demo ARGS="--help".
# Tests run in JOBS processes, of which half wait for their ranks at any time: make JOBS=12 test on 8 cores, JOBS=0 for one
# after another.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
ARGS ?=

bin := $(VENV)/bin
installed := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo bench test lint sanitize docs format clean

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

test: lint sanitize ## everything that decides: lint, types, layers, memory, tests
	$(bin)/pytest --numprocesses $(JOBS) $(ARGS)

lint: $(installed) ## style, types, and who may import whom
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/pyright
	$(bin)/lint-imports

# Python itself is not built with the sanitizers, so they are loaded before it, and libstdc++ with them: they look for its
# exceptions when they start. Their words go past pytest, which would lose them with the process.
sanitized := build/sanitize
preloaded = $(foreach library,libasan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))
under_sanitizers = THINWIRE_NATIVE_LIBRARY=$(sanitized)/_native.so LD_PRELOAD="$(preloaded)" \
  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:quarantine_size_mb=16 UBSAN_OPTIONS=print_stacktrace=1
# Left out: what runs no kernel, what looks beyond tensors (which end where their memory ends here), and what takes long
# for reasons that have nothing to do with memory.
left_out := reference or triton or every_backend or padding or sampled_alike or unbiased or balanced or share_a_column
checked_tests = tests/unit/test_sanitizers.py $(wildcard tests/unit/test_kernels*.py)

sanitize: $(installed) ## run the kernels' tests and fuzz them, with every access checked by ASan and UBSan (needs GCC)
	CXX="$(CXX)" $(bin)/cmake -S . -B $(sanitized) -G Ninja -D CMAKE_MAKE_PROGRAM=$(abspath $(bin))/ninja \
	  -D THINWIRE_SANITIZE=ON
	$(bin)/cmake --build $(sanitized)
	$(under_sanitizers) $(bin)/pytest -p no:faulthandler -p no:cacheprovider --capture=sys -q $(checked_tests) \
	  -m "not long" -k "not ($(left_out))" --deselect tests/unit/test_kernels.py::test_vote_bit
	$(under_sanitizers) $(bin)/python -m tests.fuzz --inputs 3000 --only packets steps

docs: $(installed) ## build the documentation into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet

format: $(installed) ## rewrite the sources in the house style
	$(bin)/ruff check --fix
	$(bin)/ruff format

clean: ## remove what was built; .venv keeps its downloads
	rm -rf build dist src/thinwire/kernels/_native.so $(installed) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
