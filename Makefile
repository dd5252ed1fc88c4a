# From a clean clone: `make demo` to see it work, `make test` for the linters and all tests.
# torch is installed first, so that nothing else chooses a build of it. To choose yourself:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0; platform_system == 'Linux'
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The CPU kernels are built with the package where there is a C++ compiler, and left out where there is none.
BUILT_FROM := pyproject.toml setup.py $(wildcard src/lancebill/backends/cpu/native/*.cpp src/lancebill/backends/cpu/native/*.h src/lancebill/backends/cpu/native/build.py)

MATRIX ?= 5.17.0 newest

.PHONY: help demo test test-O test-matrix lint format kernels wheel clean

help:
	@echo "make demo    a real language model as a quantised mixture of experts: look at it, ask it, measure it"
	@echo "make test    linters and tests, in a virtual environment that is made if it is missing"
	@echo "make test-O  the unit tests under python -O: nothing may hang on an assert"
	@echo "make test-matrix  whole models with transformers $(MATRIX), each in an environment of its own"
	@echo "make test-native  the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make lint    linters only"
	@echo "make kernels compile the GPU kernels into the user's cache; needs no GPU"
	@echo "make wheel   a wheel in dist that carries them compiled"
	@echo "make clean   remove the virtual environment and caches"

demo: $(VENV)/.installed
	@$(BIN)/python -m lancebill.demo

test: lint kernels
	@echo "== tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

# Asserts of tests are kept under -O (see tests/conftest.py), those of the library are not. Left out is what would only
# repeat itself: whole models, ranks, kernels, and what test_optimized.py runs under -O anyway.
test-O: $(VENV)/.installed-dev
	@echo "== tests under -O"
	@OMP_NUM_THREADS=1 $(BIN)/python -O -m pytest -n $(JOBS) tests/unit tests/backends --ignore-glob='*/test_hopper_*' \
		$(addprefix --ignore=tests/unit/,formats/test_formats.py test_optimized.py backends/test_humming.py bench/test_bench_compare.py)

test-matrix: $(addprefix test-transformers-,$(MATRIX))

test-transformers-%:
	@echo "== transformers $*"
	@$(MAKE) --no-print-directory VENV=.venv-transformers-$* .venv-transformers-$*/.installed-dev
	@.venv-transformers-$*/bin/python -m pip --disable-pip-version-check install --quiet --upgrade "transformers$(patsubst %,==%,$(filter-out newest,$*))"
	@.venv-transformers-$*/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	@OMP_NUM_THREADS=1 .venv-transformers-$*/bin/python -m pytest -n $(JOBS) tests/e2e

# What the cache has is not compiled again. Where there is no Triton, tests that need it say so and are skipped.
kernels: $(VENV)/.installed-dev
	@echo "== kernels"
	@if $(BIN)/python -c 'import triton' 2>/dev/null; then $(BIN)/lancebill kernels build --jobs $(JOBS); fi

wheel: $(VENV)/.installed-dev
	@$(BIN)/lancebill kernels build --jobs $(JOBS) --ship
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@$(BIN)/python -m pytest tests/unit/test_wheel.py

test-native: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=2 $(BIN)/python tests/native/sanitize.py

lint: $(VENV)/.installed-dev
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format"
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy

format: $(VENV)/.installed-dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit("lancebill needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	@echo "== a virtual environment in $(VENV), and torch"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(BUILT_FROM)
	@echo "== lancebill, and transformers to run models"
	@$(PIP) install --quiet --editable '.[transformers,serve]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch $(BUILT_FROM)
	@echo "== lancebill and what its tests need"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet "$(TRITON)"
	@$(PIP) install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-transformers-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info src/lancebill/backends/cpu/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
