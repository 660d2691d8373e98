# The verbs of this repository; each works on a fresh clone with Python 3.11+ and make.
#
#   make install                     .venv with everything, the versions of constraints.txt
#   make demo [SEED=1] [STEPS=100] [ARGS=--overwrite]
#   make test [ARGS="tests/service -k resume"]
#   make check                       lint, format, types, import rules
#   make bench [ONLY=selection ARGS="--repeats 21"]   all in 6 minutes, or one; JSON in benchmarks/results
#   make chaos [KILLS=20] [SEED=0] [ARGS="--strategy replay"]
#                                    kill and stop real processes under load; a checker judges what everybody saw
#   make fuzz [SECONDS=60]           feed the decoders of outside bytes by coverage; not part of CI
#   make clean                       caches and build output; .venv and .replaybuf stay

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_LOG := $(VENV)/install.log
EXTRAS := trainer,demo,generate,dev

.PHONY: help install demo test check bench chaos fuzz clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   make/make/p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed; $(PYTHON) is {v[0]}.{v[1]}. Set PYTHON=...")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV); torch is the large part. Details: $(PIP_LOG)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --log $(PIP_LOG) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
	@echo "installed: replaybuf $$($(BIN)/replaybuf --version), $$($(BIN)/python -c 'import torch; print("torch", torch.__version__)')"

demo: $(STAMP)
	$(BIN)/replaybuf demo $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks $(if $(ONLY),--only $(ONLY)) $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --kills $(or $(KILLS),20) --seed $(or $(SEED),0) $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

clean:
	rm -rf dist build .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -path ./.replaybuf -prune -o -name __pycache__ -type d -exec rm -rf {} +
