# The verbs of this repository; each works on a fresh clone with Python 3.11+ and make.
#
#   make install                     .venv with everything, the versions of constraints.txt
#   make demo [SEED=1] [STEPS=100] [ARGS=--overwrite]
#   make test [ARGS="tests/service -k resume"] [JOBS=1]
#   make test-vllm [ARGS="-k abort"]  the engine contract and whole runs on a real vLLM, in .venv-vllm (2 GB, own versions)
#   make packages                    Debian packages that some tests need (Prometheus, Chromium, npm, zsh, fish); needs root
#   make browser                     what the tests of the console run in the page, from npm; they need a Chromium too
#   make screenshots                 do the walk of docs/walk.md with real processes and take its pictures, in 6 minutes
#   make vendor                      copy the chart library of tests/console/package-lock.json into the console
#   make test-trl                    the losses against those of TRL, which comes into .trl (12 MB)
#   make test-adapters [ONLY=trl]    each package of adapters/ on the peer it serves, in .venv-adapters/NAME
#   make check                       lint, format, types, import rules
#   make docs                        build the site into site/; run the commands, snippets, links and tables of the pages
#   make docs-version VERSION=0.1    commit the site of a release to the local branch gh-pages, beside those of other releases
#   make coverage                    coverage of replaybuf/kernel; fails below the floor
#   make bench [ONLY=selection ARGS="--repeats 21"]   all in 6 minutes, or one; JSON in benchmarks/results
#   make gpu [ARGS="--steps 40"]     vLLM and the reference trainer on one or two GPUs; JSON in benchmarks/results
#   make peers                       Reverb and TransferQueue for `make bench ONLY=peers`, in .venv-peers (3.2 GB)
#   make chaos [KILLS=20] [SEED=0] [ARGS="--fault older ranks"]
#                                    hurt real processes under load (--fault KIND ... for some kinds, --topology sentinel|cluster
#                                    for a Valkey that fails over); a checker judges it
#   make simulate-faults [SEEDS=200] [SEED=n] [SECONDS=180] [ARGS="--redis single|sentinel|cluster"]
#                                    the service on a virtual clock with faults at every await; SEED replays one schedule
#                                    (ARGS="--only 3,17 --faults-s 2" with these faults alone, as a failure prints it;
#                                    ARGS="--base product" the seeds that CI runs, which belong to the code of the product)
#   make fuzz [SECONDS=60]           feed the decoders of outside bytes by coverage; not part of CI
#   make schema [SECONDS=60]         requests that Schemathesis derives from /openapi.json, from .venv-schema (93 MB)
#   make clean                       caches and build output; .venv, .venv-*, .trl and .replaybuf stay

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PEERS ?= .venv-peers
SCHEMA_VENV ?= .venv-schema
TRL ?= .trl
ADAPTERS_VENV ?= .venv-adapters
ADAPTERS := $(or $(ONLY),$(patsubst adapters/%/pyproject.toml,%,$(wildcard adapters/*/pyproject.toml)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_LOG := $(VENV)/install.log
VLLM_STAMP := $(VLLM_VENV)/.installed
TRL_STAMP := $(TRL)/.installed
SCHEMA_STAMP := $(SCHEMA_VENV)/.installed
AXE := tests/console/node_modules/.package-lock.json
EXTRAS := trainer,lora,demo,generate,dev
KERNEL_TESTS := tests/kernel tests/testing tests/lab/simulate tests/service/test_plugins.py
KERNEL_FLOOR := 90
JOBS ?= 6
# Files in their own order: sorted by number of tests, the slow files with few tests come last and one worker ends alone.
SPREAD := --dist loadfile --no-loadscope-reorder
# Hundreds of processes start in the tests: without bytecode each of them would compile all modules it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test coverage test-vllm test-trl test-adapters check docs docs-version bench gpu peers chaos simulate-faults fuzz schema packages browser screenshots vendor clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   make/make/p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed; $(PYTHON) is {v[0]}.{v[1]}. Set PYTHON=...")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV); torch is the large part. Details: $(PIP_LOG)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[$(EXTRAS)]' \
		>$(PIP_LOG) 2>&1 || { tail -n 20 $(PIP_LOG) >&2; echo "installing failed; all that pip said: $(PIP_LOG)" >&2; exit 1; }
	@touch $@
	@echo "installed: replaybuf $$($(BIN)/replaybuf --version), $$($(BIN)/python -c 'import torch; print("torch", torch.__version__)')"

demo: $(STAMP)
	$(BIN)/replaybuf demo $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: $(STAMP) browser
	$(BIN)/python -m pytest -n $(JOBS) $(SPREAD) $(ARGS)

packages:
	@.ci/packages

browser: $(if $(shell command -v npm),$(AXE))
	@command -v npm >/dev/null || echo "no npm: tests of accessibility are skipped (Debian: apt-get install npm)"

$(AXE): tests/console/package-lock.json
	@npm ci --ignore-scripts --no-audit --no-fund --prefix tests/console
	@touch $@

screenshots: $(STAMP)
	@test -d .replaybuf/model || $(BIN)/replaybuf init-model --out .replaybuf/model
	$(BIN)/python -m tests.console.walk --model .replaybuf/model --out docs/assets/walk

vendor:
	tests/console/vendor.sh

coverage: $(STAMP)
	$(BIN)/python -m pytest -n logical --maxprocesses $(JOBS) $(SPREAD) $(KERNEL_TESTS) \
		--cov=replaybuf.kernel --cov-report=term-missing:skip-covered --cov-fail-under=$(KERNEL_FLOOR) --timeout 600 $(ARGS)

test-vllm: $(STAMP) $(VLLM_STAMP)
	VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest tests/vllm --timeout 480 $(ARGS)

test-trl: $(STAMP) $(TRL_STAMP)
	$(TRL)/python -m pytest tests/trl -o filterwarnings=default $(ARGS)

test-adapters: $(ADAPTERS:%=test-adapter-%)

test-adapter-%: $(STAMP) $(ADAPTERS_VENV)/%/.installed
	$(ADAPTERS_VENV)/$*/bin/python -m pytest adapters/$*/tests -c adapters/$*/pyproject.toml --rootdir adapters/$* $(ARGS)

# Otherwise make deletes it as an intermediate file, and installs again each time.
.PRECIOUS: $(ADAPTERS_VENV)/%/.installed
$(ADAPTERS_VENV)/%/.installed: adapters/%/pyproject.toml adapters/%/constraints.txt adapters/install.sh $(STAMP)
	@adapters/install.sh $(BIN)/python $* $(ADAPTERS_VENV)

$(TRL_STAMP): tests/trl/requirements.txt tests/install.sh $(STAMP)
	@tests/install.sh $(BIN)/python $(TRL) trl trl.trainer.grpo_trainer

$(VLLM_STAMP): tests/vllm/requirements.txt tests/vllm/install.sh
	@tests/vllm/install.sh $(PYTHON) $(VLLM_VENV)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy benchmarks/*.py
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python -m replaybuf.service.http.call.reference_pages
	$(BIN)/python docker/grafana/dashboards.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest tests/docs $(ARGS)

docs-version: $(STAMP)
	@test -n "$(VERSION)" || { echo "VERSION is missing: make docs-version VERSION=0.1" >&2; exit 1; }
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mike --quiet deploy --update-aliases $(VERSION) latest
	$(BIN)/mike --quiet set-default latest

bench: $(STAMP)
	$(BIN)/python benchmarks $(if $(ONLY),--only $(ONLY)) $(ARGS)
	$(BIN)/python benchmarks/tables.py

gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

peers:
	@benchmarks/peers/install.sh $(PYTHON) $(PEERS)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --kills $(or $(KILLS),20) --seed $(or $(SEED),0) $(ARGS)

simulate-faults: $(STAMP)
	$(BIN)/python -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

schema: $(STAMP) $(SCHEMA_STAMP)
	$(BIN)/python -m tests.schema --environment $(SCHEMA_VENV) --seconds $(or $(SECONDS),60) $(ARGS)

$(SCHEMA_STAMP): tests/schema/requirements.txt
	$(PYTHON) -m venv $(SCHEMA_VENV)
	$(SCHEMA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf dist build site .coverage .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -path ./$(VLLM_VENV) -prune -o -path ./$(TRL) -prune -o -path ./$(PEERS) -prune -o -path ./$(ADAPTERS_VENV) -prune -o -path ./$(SCHEMA_VENV) -prune -o -path ./.replaybuf -prune -o -name __pycache__ -type d -exec rm -rf {} +
