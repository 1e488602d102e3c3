# Every target makes the virtual environment it needs, from a bare python3.
#
#   make test VENV=.venv-newest PYTHON=python3.13    another environment, another Python
#   make test JAX='jax==0.10.2'                      another JAX (into a fresh VENV)
#   make test PYTEST='-k additive -x'                more words for pytest
#   make bench TORCH=1                               PyTorch as one more peer

VENV   ?= .venv
PYTHON ?= python3
JAX    ?= jax
PYTEST ?=
TORCH  ?=

BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-core doctest lint format bench images docs package audit clean
.DELETE_ON_ERROR:

help: ## say what there is to make
	@echo "regard: make one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-translate,show ## translate, then train a model from scratch (3 minutes)
	@$(BIN)/regard demo

# Workers take neighbors (worksteal): a case that is compiled, or a run that is trained, for several
# tests of a file is then rarely made by both.
RUN := $(BIN)/python -m pytest -n 2 --dist worksteal -q

test: $(VENV)/.installed-dev ## what a change could break, and every docstring example (16 minutes)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  command -v google-chrome >/dev/null || \
	  echo "no Chromium here: the browser tests are skipped (Debian: apt install chromium)"
	@$(RUN) -m 'not slow' $(PYTEST) tests
	@$(MAKE) --no-print-directory doctest

test-all: $(VENV)/.installed-dev ## every case of every test, with nightly counts (an hour)
	@HYPOTHESIS_PROFILE=nightly $(RUN) $(PYTEST) tests
	@$(MAKE) --no-print-directory doctest

NOT_CORE := bench cli modules peers d2l playground show seq2seq test_docs.py test_examples.py

test-core: $(VENV)/.installed-dev ## the core alone, a case of each test: for one more version of JAX
	@$(RUN) -m 'not slow' --most 1 $(NOT_CORE:%=--ignore=tests/%) $(PYTEST) tests
	@$(MAKE) --no-print-directory doctest

# A run of its own, without tests/conftest.py: the examples must hold for a reader, whose JAX
# has none of the strict flags and no float64.
doctest: $(VENV)/.installed-dev ## the docstring examples alone
	@JAX_COMPILATION_CACHE_DIR=.pytest_cache/d/programs JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	  $(RUN) --doctest-modules src/regard

lint: $(VENV)/.installed-dev ## ruff (lint and format) and mypy; changes nothing
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { \
	  $(BIN)/ruff format --check . ; echo "fix: make format" ; exit 1 ; }
	@$(BIN)/mypy

format: $(VENV)/.installed-dev ## let ruff format the code and fix what it can
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(VENV)/.installed-bench $(if $(TORCH),$(VENV)/.installed-torch) ## time regard against its peers
	@$(BIN)/regard bench

images: $(VENV)/.installed-dev ## the playground's screenshots, into docs/images (needs Chromium)
	@PYTHONPATH=tests $(BIN)/python tests/playground/screenshots.py

# The pages run their own code while they are built; one that fails, or a broken link, is an error.
# (Not with --quiet: then --strict counts no warnings.)
# Their programs are small: the compiler, told not to optimize, is done sooner than it saves.
DOCS_XLA := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true

docs: $(VENV)/.installed-docs ## the documentation site, into build/docs
	@rm -rf build/docs
	@NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu XLA_FLAGS='$(DOCS_XLA)' \
	  $(BIN)/python -m mkdocs build --strict
	@echo "the documentation: build/docs/index.html"

# There is no lock file: a library states bounds. This freezes what regard[all] installs today;
# --strict, because an advisory database that cannot be reached must not read as no advisories.
audit: ## look up everything that regard[all] installs in the advisory database
	@rm -rf build/audit
	@$(PYTHON) -m venv build/audit
	@build/audit/bin/python -m pip install -qq '.[all]'
	@build/audit/bin/python -m pip freeze --exclude regard > build/constraints.txt
	@build/audit/bin/python -m pip install -qq pip-audit
	@build/audit/bin/pip-audit --strict --no-deps --disable-pip -r build/constraints.txt

clean: ## remove what was built and cached; the environments stay
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each extra, older than pyproject.toml when there is something new to install.
$(VENV)/.installed-%: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "regard needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1)." ; \
	  echo "Name a newer one: make PYTHON=python3.12 ..." ; exit 1 ; }
	@test -x $(BIN)/python || { echo "making $(VENV) ..." ; $(PYTHON) -m venv $(VENV) ; }
	@echo "installing regard[$*] into $(VENV) (about a minute the first time) ..."
	@$(BIN)/python -m pip install -qq --editable '.[$*]' '$(JAX)'
	@touch $@

# Pinned, so that one run of the benchmark can be compared with the next.
$(VENV)/.installed-torch: | $(VENV)/.installed-bench
	@echo "installing torch into $(VENV) (may be large) ..."
	@$(BIN)/python -m pip install -qq torch==2.13.0
	@touch $@
