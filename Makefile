# From a clean clone: `make demo` shows what lancebill does, `make test` runs the linters and all tests. Suites that need
# environments of their own, or hours, are sessions of noxfile.py: `pipx run nox -l`.
# torch is installed first, so that no other package selects its build. To select one: make demo TORCH="torch==2.13.0
# --index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0; platform_system == 'Linux'
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python $(FLAGS) -m pytest -n $(JOBS)
# The C++ kernels are built with the package where there is a compiler.
NATIVE := $(addprefix src/lancebill/,native backends/cpu/native numbers/native)
BUILT_FROM := pyproject.toml setup.py src/lancebill/native/build.py $(wildcard $(addsuffix /*.cpp,$(NATIVE)) $(addsuffix /*.h,$(NATIVE)))
# LOCKED=1 installs exactly the packages of the lock file, checked against their hashes; without it, the newest ones.
# torch and Triton are not in it: TORCH and TRITON select their builds.
LOCKED ?=
PACKAGES := $(VENV)/.packages$(if $(LOCKED),-locked)
LOCK := requirements/dev.txt

.PHONY: help demo native test test-O test-gpu gpu-site gpu-record lint format kernels wheel site clean
help:  ## show this list
	@sed -nE 's/^([a-zA-Z-]+):.*## (.*)/make \1	\2/p' Makefile | expand -t 18

demo: $(VENV)/.installed  ## turn a language model into a quantised mixture of experts, ask it, measure it
	@$(BIN)/python -m lancebill.demo

test: lint  ## run linters and all tests; creates the virtual environment if it is missing
	@$(PYTEST)

# The asserts of tests still work (tests/conftest.py), those of the library are removed. Chosen are tests of error
# handling and of the few modules that contain asserts (OWN_BUGS in tests/unit/test_architecture.py).
WITHOUT_ASSERTS := $(addprefix tests/unit/,checkpoint cli/test_cli*.py formats jit moe layer/test_from_tensors.py \
	layer/test_input_scales.py layer/test_layer_loading.py numbers/test_spec_names.py numbers/test_weight.py test_optimized.py)
test-O: FLAGS := -O
test-O: $(VENV)/.installed-dev  ## run tests of errors under python -O: no behaviour may depend on an assert
	@$(PYTEST) $(WITHOUT_ASSERTS) --ignore-glob='*/test_convert*' --ignore=tests/unit/formats/test_formats.py

# Uses the interpreter PYTHON as it is and installs nothing; what it lacks may be in GPU_SITE. Cells that need kernels
# compile them into GPU_CACHE. OUT gets part-N.json and the output of failed cells, part-N.log.
PART ?= 1
OUT ?= build/gpu-suite
GPU_SITE ?= build/gpu-site
GPU_CACHE ?= build/gpu-cache
test-gpu:  ## run PART=1 or PART=2 of the cells of a GPU machine with PYTHON, which gets no package
	@OMP_NUM_THREADS=1 LANCEBILL_CACHE=$(abspath $(GPU_CACHE)) $(PYTHON) -W ignore tests/gpu/run_cells.py \
		--part $(PART) --out $(OUT) --site $(GPU_SITE) $(if $(DEVICE),--device $(DEVICE)) $(if $(COMMIT),--commit $(COMMIT))

# Of no other kind than source code: they fit any Python.
GPU_PACKAGES := gguf typer click shellingham rich pygments markdown-it-py mdurl annotated-doc uvicorn h11 pytest iniconfig pluggy
gpu-site:  ## fill GPU_SITE with small packages that such a machine may lack
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --upgrade --no-deps --no-compile --only-binary :all: \
		--target $(GPU_SITE) $(GPU_PACKAGES)

gpu-record:  ## join both parts to one record of the GPU
	@$(PYTHON) tests/gpu/gpu_record.py $(OUT)

lint: $(VENV)/.installed-dev  ## run the linters
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.installed-dev  ## format the code and apply the linters' fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

native:  ## compile the C++ libraries, which installing also does
	-@PYTHONPATH=src $(PYTHON) -m lancebill.native

kernels: $(VENV)/.installed-dev  ## compile Hopper's kernels of the wheel into the user's cache and check them; needs no GPU
	@$(BIN)/lancebill kernels build --jobs $(JOBS)
	@$(PYTEST) --all-kernels tests/unit/backends/test_hopper_compile.py tests/unit/backends/test_hopper_sass.py

wheel: $(VENV)/.installed-dev  ## build a wheel with compiled GPU kernels into dist
	@$(BIN)/lancebill kernels build --arch all --jobs $(JOBS) --ship
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@$(BIN)/python -m pytest tests/unit/test_wheel.py

site: .venv-site/.installed  ## build the documents as a web site into build/site; every link must work
	@.venv-site/bin/mkdocs build --strict

clean:  ## remove virtual environments, build outputs and caches
	rm -rf $(VENV) .venv-site .nox build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info $(addsuffix /*.so,$(NATIVE))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit("lancebill needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	@echo "== create a virtual environment in $(VENV) and install torch"; test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH)
	@touch $@
$(VENV)/.installed: $(VENV)/.torch $(BUILT_FROM)
	@echo "== install lancebill and transformers"; $(PIP) install --quiet --editable '.[transformers,serve]' && touch $@
$(PACKAGES): $(VENV)/.torch $(LOCK)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet "$(TRITON)"
	@if test -n "$(LOCKED)"; then $(PIP) install --quiet --no-deps --require-hashes -r $(LOCK); fi && touch $@
$(VENV)/.installed-dev: $(PACKAGES) $(BUILT_FROM)
	@echo "== install lancebill and its test dependencies"; $(PIP) install --quiet $(if $(LOCKED),--no-deps) --editable '.[dev]' && touch $@
.venv-site/.installed:  # an environment of its own: nothing else needs mkdocs
	@$(PYTHON) -m venv .venv-site && .venv-site/bin/python -m pip --disable-pip-version-check install --quiet "mkdocs>=1.6,<2" && touch $@
