# A fresh clone needs Python >= 3.10 and a C++ compiler; `make demo` and `make test` do the rest.
# Other interpreter: make PYTHON=python3.12 test. Arguments for the command: make demo ARGS="--help".
# `make test` runs the tests in JOBS processes. A test of several ranks mostly waits, so use more processes than cores:
# make JOBS=12 test on 8 cores. JOBS=0 runs one test after another.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
ARGS ?=

bin := $(VENV)/bin
installed := $(VENV)/.installed
not_long := -m "not long" --hypothesis-profile=repeatable

# The tests start many interpreters. Without bytecode on disk each of them compiles thinwire anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo bench wheel test test-all test-torch lint sanitize docs format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(installed) ## create .venv with thinwire (editable), its command line and all tools for tests

# The stamp file makes a second `make` instant. A changed kernel or dependency installs again.
$(installed): pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/*)
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	THINWIRE_REQUIRE_NATIVE=1 $(bin)/python -m pip install --constraint constraints.txt --editable ".[cli,dev]"
	touch $@

demo: $(installed) ## train over slow links, with AdamW and with thinwire, for the same time (as root; else predicted)
	$(bin)/thinwire demo $(ARGS)

bench: $(installed) ## measure the kernels, and the exchange between 4 local ranks
	$(bin)/thinwire bench kernels $(ARGS)
	$(bin)/thinwire bench exchange --ranks 4 $(ARGS)

# One wheel for every Python, torch and Linux with a glibc that is not older than the one in the wheel's name: auditwheel
# finds out which that is, and refuses a library that needs more than Linux always has.
DIST ?= dist
wheel: $(installed) ## build the wheel to install elsewhere, with native kernels, into dist
	rm -rf $(DIST)/unrepaired && mkdir -p $(DIST)/unrepaired
	THINWIRE_REQUIRE_NATIVE=1 $(bin)/python -m pip wheel . --no-deps --no-build-isolation --no-index --wheel-dir $(DIST)/unrepaired
ifeq ($(shell uname),Linux)
	PATH="$(abspath $(bin)):$$PATH" $(bin)/python -m auditwheel repair --wheel-dir $(DIST) $(DIST)/unrepaired/*.whl
else
	cp $(DIST)/unrepaired/*.whl $(DIST)
endif
	rm -rf $(DIST)/unrepaired

# The short suite draws the same random inputs every time: a commit that passed once passes again. Lint and sanitize use
# one core each, so they run side by side.
test: ## what every commit must pass: lint, types, imports, memory errors, short tests
	+$(MAKE) --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) lint sanitize \
	  short='$(not_long)' fuzz_inputs=500
	$(bin)/pytest --numprocesses $(JOBS) $(not_long) $(ARGS)

test-all: lint sanitize ## what a release must pass: also all instruction sets, world sizes, grids, long fuzzing
	$(bin)/pytest --numprocesses $(JOBS) $(ARGS)
	$(bin)/python -m tests.fuzz --inputs 50000

# The tests of what thinwire takes from torch.distributed and DDP, with another torch: make test-torch VERSION=2.6.0
# The oldest torch of the metadata, 2.6.0, brings 3 GB of CUDA packages unless pip is configured to find a CPU build.
VERSION ?= $(shell sed -n 's/^torch==//p' constraints.txt)
torch_venv := .venv-torch-$(VERSION)
torch_tests := tests/conformance tests/distributed/test_ddp.py tests/distributed/test_amp.py \
  tests/distributed/test_lifetime.py tests/distributed/test_state_dict.py tests/distributed/test_checkpoints.py \
  tests/distributed/test_nonfinite.py

test-torch: ## run the tests of DDP and of checkpoints with another torch: make test-torch VERSION=2.6.0
	test -x $(torch_venv)/bin/python || $(PYTHON) -m venv $(torch_venv)
	$(torch_venv)/bin/python -m pip install "torch==$(VERSION)" ".[cli]" hypothesis "numpy>=1.26" "pytest>=8.2" \
	  pytest-timeout pytest-xdist
	$(torch_venv)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(torch_venv)/bin/python -m pytest --numprocesses $(JOBS) -m "not long" $(torch_tests) $(ARGS)

lint: $(installed) ## check the style, the types, and which package may import which
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/pyright
	$(bin)/lint-imports

# Python itself is not built with the sanitizers, so they are loaded before it, and libstdc++ with them: they look for its
# exceptions when they start. pytest must not capture their reports, which it would lose with the process.
sanitized := build/sanitize
preloaded = $(foreach library,libasan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))
under_sanitizers = THINWIRE_NATIVE_LIBRARY=$(sanitized)/_native.so LD_PRELOAD="$(preloaded)" \
  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:quarantine_size_mb=16 UBSAN_OPTIONS=print_stacktrace=1
# Left out: tests that run no native kernel, tests that read beyond tensors (which end where their memory ends here), and
# tests that take long for reasons other than memory.
left_out := reference or triton or every_backend or padding or sampled_alike or unbiased or balanced or share_a_column
fuzz_inputs := 3000
checked_tests = tests/unit/test_sanitizers.py $(wildcard tests/unit/test_kernels*.py)

sanitize: $(installed) ## test and fuzz the kernels with every memory access checked by ASan and UBSan (needs GCC)
	CXX="$(CXX)" $(bin)/cmake -S . -B $(sanitized) -G Ninja -D CMAKE_MAKE_PROGRAM=$(abspath $(bin))/ninja \
	  -D THINWIRE_SANITIZE=ON
	$(bin)/cmake --build $(sanitized)
	$(under_sanitizers) $(bin)/pytest -p no:faulthandler -p no:cacheprovider --capture=sys -q $(checked_tests) $(short) \
	  -k "not ($(left_out))" --deselect tests/unit/test_kernels.py::test_vote_bit
	$(under_sanitizers) $(bin)/python -m tests.fuzz --inputs $(fuzz_inputs) --only packets steps

docs: $(installed) ## build the documentation into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet

format: $(installed) ## fix and format the sources with ruff
	$(bin)/ruff check --fix
	$(bin)/ruff format

clean: ## remove what was built; .venv keeps its downloads
	rm -rf build dist .venv-torch-* src/thinwire/kernels/_native.so $(installed) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
