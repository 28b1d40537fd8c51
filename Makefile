# `make` lists the targets. Needs Python 3.10 to 3.13 with venv, a C++ compiler and make; PYTHON=python3.12 picks another.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
JOBS ?= $(shell echo $$((2 * $$(nproc)))) # many tests wait more than they compute
TORCH_BUILD ?= $(if $(filter x86_64,$(shell uname -m)),+cpu) # elsewhere what pip finds is for the CPU as it is
BENCH ?= $(filter-out benchmarks/_% benchmarks/edgebox.py,$(wildcard benchmarks/*.py))

# For llama.cpp with Vulkan, in an environment of its own. Vulkan headers before 1.3.275 lack a little: tests/vulkan.
VULKAN_VENV ?= .venv-vulkan
SOFTWARE_GPU := GGML_VK_VISIBLE_DEVICES=0

# What people use to speak to `edge-run serve`, in an environment of its own: some want older versions of others.
CLIENTS_VENV ?= .venv-clients
CLIENTS := openai anthropic ollama langchain-openai langchain-ollama litellm instructor 'pydantic-ai-slim[openai]' openai-agents
NODE_CLIENTS := openai @anthropic-ai/sdk ollama

# For llama.cpp with AddressSanitizer, in an environment of its own: the tests in which Python and native code hand memory
# to each other. Freed memory is kept back a little only, as budgets are measured; ASAN_TESTS names other tests.
ASAN_VENV ?= .venv-asan
ASAN_FLAGS := -O1 -g1 -DNDEBUG -fsanitize=address -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS
ASAN_OPTIONS := detect_leaks=0:abort_on_error=1:handle_segv=0:allocator_may_return_null=1:quarantine_size_mb=8
ASAN_REPORTS := $(ASAN_VENV)/reports
ASAN_TESTS ?= tests/asan $(wildcard tests/unit/tiers/test_weights*.py) \
    $(patsubst %,tests/unit/%.py,tiers/test_address_space tiers/test_upload runtime/graph/test_graph) \
    tests/unit/runtime/decoding/test_session.py \
    $(patsubst %,tests/integration/test_%.py,exactness slices moe speculation sampling mesh_decoder prefetch model) \
    $(wildcard tests/integration/test_engine_*.py) tests/property/test_on_demand.py

# A Debian for ARM that is emulated. Not inside this folder, where tools would search it.
ARM64 ?= $(HOME)/.cache/edge-run/arm64

.PHONY: help venv torch run test test-gpu test-real test-clients test-vulkan test-asan test-arm64 check format bench clean

help: ## list the targets
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

venv: $(VENV)/.installed ## a virtual environment with everything for development

torch: $(VENV)/.torch ## PyTorch for the CPU as well: the tests of training need it, and are skipped without

run: $(VENV)/.base ## the demo: a model that does not fit, and mmap beside it; ARGS="--model FILE" takes yours
	$(BIN)/edge-run demo $(ARGS)

test: $(VENV)/.installed ## the tests, JOBS at once; ARGS="-k frames -x" goes to pytest
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

test-gpu: $(VENV)/.installed ## the tests on this machine's GPU, which llama.cpp must be built for (edge-run doctor)
	NEED_GPU=1 $(BIN)/pytest tests/gpu $(ARGS)

test-real: $(VENV)/.installed ## the tests on real, trained models: EDGE_RUN_REAL_MODELS=FOLDER (CONTRIBUTING.md); minutes
	$(BIN)/pytest tests/real $(ARGS)

test-clients: $(CLIENTS_VENV)/.installed ## the first examples of clients of OpenAI, Anthropic and Ollama against the server
	$(CLIENTS_VENV)/bin/pytest -W ignore -p no:unraisableexception tests/clients $(ARGS)

test-vulkan: $(VULKAN_VENV)/.installed ## the same on a GPU that the processor plays: Mesa's Vulkan driver; minutes
	$(SOFTWARE_GPU) NEED_GPU=1 $(VULKAN_VENV)/bin/pytest tests/gpu $(ARGS)

test-asan: $(ASAN_VENV)/.installed ## exactness and its like with llama.cpp under AddressSanitizer; half an hour
	rm -rf $(ASAN_REPORTS) && mkdir -p $(ASAN_REPORTS)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" PYTHONMALLOC=malloc \
	    ASAN_OPTIONS=$(ASAN_OPTIONS):log_path=$(CURDIR)/$(ASAN_REPORTS)/report PYTHONPATH=$(CURDIR)/tests/asan \
	    $(ASAN_VENV)/bin/python -m pytest --timeout 1200 $(ASAN_TESTS) $(ARGS)
	@! cat $(ASAN_REPORTS)/* 2> /dev/null

test-arm64: ## the tests on ARM, emulated, by root; hours, and ARGS="--seconds 600" stops sooner: the next one goes on
	tests/arm64/make_system.sh "$(ARM64)"
	$(PYTHON) tests/arm64/run.py "$(ARM64)" $(ARGS)

check: $(VENV)/.installed ## format, lint, types, layers: what CI checks before the tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.installed ## format, and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/.installed ## every benchmark that needs no arguments; BENCH=benchmarks/one.py ARGS="..." runs one
	@failed=; for script in $(BENCH); do echo "== $$script"; \
	    $(BIN)/python $$script $(ARGS) || [ $$? = 2 ] || failed="$$failed $$script"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

clean: ## remove the virtual environment, builds and caches
	rm -rf $(VENV) $(VULKAN_VENV) $(CLIENTS_VENV) $(ASAN_VENV) build dist *.egg-info .*_cache .hypothesis .coverage* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info[:2] <= (3, 13) or sys.exit( \
	    f"edge-run needs Python 3.10 to 3.13, and this is {sys.version.split()[0]}: try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Both stamps share one environment; the development install contains the base one.
$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo "Installing edge-run. The first install compiles llama.cpp, about four minutes; pip keeps the result for the next."
	$(BIN)/pip install --editable .
	touch $@

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing edge-run. The first install compiles llama.cpp, about four minutes; pip keeps the result for the next."
	$(BIN)/pip install --editable '.[dev]'
	touch $@ $(VENV)/.base

$(VULKAN_VENV)/.installed: pyproject.toml
	@echo "Building llama.cpp with Vulkan, about 20 minutes. It needs libvulkan-dev, glslc and spirv-headers, and to run"
	@echo "without a GPU mesa-vulkan-drivers (names of Debian's packages)."
	$(PYTHON) -m venv $(VULKAN_VENV)
	CMAKE_ARGS=-DGGML_VULKAN=on CXXFLAGS="$(CXXFLAGS) -I$(CURDIR)/tests/vulkan" \
	    $(VULKAN_VENV)/bin/pip install --no-cache-dir --no-binary llama-cpp-python --editable '.[dev]'
	touch $@

$(CLIENTS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip install --editable '.[dev]' $(CLIENTS)
	if command -v npm > /dev/null; then npm install --prefix $(CLIENTS_VENV)/npm $(NODE_CLIENTS); fi
	touch $@

$(ASAN_VENV)/.installed: pyproject.toml
	@echo "Building llama.cpp with AddressSanitizer, about 6 minutes. It needs gcc."
	$(PYTHON) -m venv $(ASAN_VENV)
	CC=gcc CXX=g++ CFLAGS="$(ASAN_FLAGS)" CXXFLAGS="$(ASAN_FLAGS)" LDFLAGS=-fsanitize=address CMAKE_ARGS=-DLLAVA_BUILD=OFF \
	    SKBUILD_CMAKE_BUILD_TYPE=None SKBUILD_INSTALL_STRIP=false \
	    $(ASAN_VENV)/bin/pip install --no-cache-dir --no-binary llama-cpp-python --editable '.[dev]'
	touch $@

$(VENV)/.torch: $(VENV)/.installed
	$(BIN)/pip install --editable '.[train]' 'torch==$(strip $(TORCH)$(TORCH_BUILD))' || { echo >&2 \
	    "make torch: pip finds no torch $(strip $(TORCH)$(TORCH_BUILD)); give it the folder or the index of PyTorch's CPU builds" \
	    "(PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), or another TORCH=. TORCH_BUILD= takes any build, a CUDA one of gigabytes too."; exit 1; }
	@$(BIN)/python -c 'import sys, torch; torch.version.cuda and "$(strip $(TORCH_BUILD))" and sys.exit( \
	    "make torch: what is installed is a CUDA build: make clean, or pip uninstall torch, and again")'
	touch $@
