# The whole project from a clean clone: `make demo`, `make test`. Everything else is a part of them.
PYTHON ?= python3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint unit format images clean clean-cache

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: ## build the environments: .venv (vLLM 0.32) and .venv-0.24
	$(PYTHON) .ci/lanes/setup.py all

demo: ## serve a small trained model through the tiers, and compare with all experts resident
	$(PYTHON) .ci/lanes/setup.py 0.32
	.venv/bin/python bench/demo.py

test: ## static checks, unit suites, end-to-end tests under both releases of vLLM
	bash .ci/run

lint: ## ruff, mypy and the dependency rule
	bash .ci/run lint

unit: ## the unit suites alone
	bash .ci/run unit

format: ## lay the code out by the house style
	$(PYTHON) .ci/lanes/setup.py 0.32
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

images: ## compile the CUDA kernels to the images that are committed
	$(PYTHON) .ci/lanes/setup.py 0.32
	.venv/bin/python -m ziggurat.kernels.build

clean: ## remove what was built in this clone (not the shared environments)
	rm -rf .venv .venv-0.24 .venv*.removing build *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .grimp_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-cache: ## remove shared environments that this version of the lanes no longer uses
	$(PYTHON) .ci/lanes/setup.py --clean-cache
