# Every target works from a bare clone: it makes what it needs and says what it does.
# PYTHON chooses the interpreter (3.11 or newer); the environment lives in .venv.

PYTHON ?= python3
BIN := .venv/bin
# One more than there are cores, up to six: many tests wait for a daemon or a worker to start.
TEST_PROCESSES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 5 ? n + 1 : 6)))
# What depends on the versions of torch and transformers most.
OLDEST_TESTS := tests/golden/test_training.py tests/golden/test_gradients.py tests/golden/test_traced_layers.py \
	tests/golden/test_fused_layers.py tests/golden/test_kernel_candidates.py tests/unit/engine/test_attention.py
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest verify fix bench protos client dashboards job-spec reference docs dist figures clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "horizon needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.server: pyproject.toml constraints.txt $(wildcard server/horizon_server/store/kernels/*.cpp) tools/build_kernels.py | .venv/bin/python
	@echo "installing the server and its dependencies into .venv (most of the time is torch) ..."
	@$(PIP) -e '.[server]'
	@touch $@

.venv/.dev: .venv/.server
	@echo "installing the development tools into .venv ..."
	@$(PIP) -e '.[server,dev]'
	@touch $@

demo: .venv/.server ## a whole fine-tuning job on this machine: daemon, upload, training, download, proof
	@$(BIN)/horizond demo

test: .venv/.dev ## every claim once, or the tests that ARGS names
	@$(BIN)/python -m pytest $(or $(ARGS),--numprocesses $(TEST_PROCESSES) --dist worksteal)

test-all: .venv/.dev ## all cases of every claim, all fuzz cases, all kill points and the long soak: hours
	@HORIZON_TEST_ALL=1 HORIZON_FUZZ_CASES=$${HORIZON_FUZZ_CASES:-10000} HORIZON_KILLS=$${HORIZON_KILLS:-300} \
		HORIZON_SOAK_S=$${HORIZON_SOAK_S:-7200} $(MAKE) test

test-oldest: ## training, traced and fused layers and attention with the lowest versions of torch and transformers: several GB
	$(PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/python -m pip --disable-pip-version-check -q install -c constraints-oldest.txt torch transformers triton \
		numpy safetensors psutil jinja2 pytest pytest-asyncio pytest-timeout hypothesis
	@HORIZON_TEST_ALL=1 PYTHONPATH=server:client:proto .venv-oldest/bin/python -m pytest -p no:cacheprovider $(OLDEST_TESTS)

verify: .venv/.dev ## lint, types, architecture, wire contract, generated files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	cd proto && ../$(BIN)/buf lint
	cd proto && ../$(BIN)/buf format --diff --exit-code > /dev/null
	cd proto && ../$(BIN)/buf breaking --against baseline.binpb
	$(BIN)/python tools/generate_protos.py --check
	$(BIN)/python tools/generate_client_resources.py --check
	$(BIN)/python tools/generate_sync_client.py --check
	$(BIN)/python tools/generate_dashboards.py --check
	$(BIN)/python tools/generate_job_spec.py --check
	$(BIN)/python tools/generate_reference_pages.py --check
	$(BIN)/python tools/generate_models_page.py --check
	$(BIN)/python tools/generate_client_reference.py --check

fix: .venv/.dev ## let the tools mend what they can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	cd proto && ../$(BIN)/buf format --write

protos: .venv/.dev ## generate the Python code of the wire contract
	$(BIN)/python tools/generate_protos.py

client: .venv/.dev ## generate the client's records from the wire contract, the blocking client, and both reference pages
	$(BIN)/python tools/generate_client_resources.py
	$(BIN)/python tools/generate_sync_client.py
	$(BIN)/python tools/generate_client_reference.py

job-spec: .venv/.dev ## generate the job spec's JSON Schema and its reference page
	$(BIN)/python tools/generate_job_spec.py

reference: .venv/.dev ## generate the reference pages of REST, of errors and of supported models
	$(BIN)/python tools/generate_reference_pages.py
	$(BIN)/python tools/generate_models_page.py

dashboards: .venv/.dev ## generate the Grafana boards
	$(BIN)/python tools/generate_dashboards.py

docs: .venv/.dev ## the documentation site, in build/docs: a dead link or a page that nothing lists is an error
	$(BIN)/python -m sphinx -n -W --keep-going -q -c docs . build/docs
	@echo "open build/docs/index.html"

dist: .venv/.dev ## the published packages, in dist: of the client, and of the server
	$(BIN)/python tools/build_distributions.py

figures: .venv/.dev ## the size of the code, how far decisions are relayed, how lines are bent, beside what to reach
	$(BIN)/python tools/house_figures.py

bench: .venv/.dev ## benchmarks, as ratios against a reference in the same run
	$(BIN)/python -m bench

clean: ## remove everything that was made
	rm -rf .venv .venv-oldest .venv-protos .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache demo-output dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
