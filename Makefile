# CPU wheels of torch are small; on a machine with a GPU: make TORCH=torch
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: demo test test-slow check toolkits examples bench clean

# Installed again whenever pyproject.toml changes.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e ".[dev]"
	touch $@

# ART and Foolbox as pip resolves them; torchattacks without its pinned requests and its unused torchvision.
.venv/toolkits: .venv/installed
	$(BIN)/pip install -q -e ".[dev,all]"
	$(BIN)/pip install -q --no-deps "torchattacks>=3.5.1,<4"
	touch $@

toolkits: .venv/toolkits

demo: .venv/installed
	$(BIN)/jem-robust attack --norm linf --steps 10

test: .venv/toolkits
	$(BIN)/python -m pytest -q

test-slow: .venv/toolkits
	$(BIN)/python -m pytest -q -m slow

examples: .venv/toolkits
	for name in art foolbox torchattacks; do $(BIN)/python examples/$${name}_pipeline.py || exit 1; done
	$(BIN)/python examples/autoattack_rand.py

# About two hours; each script says how to run less.
bench: .venv/toolkits
	for name in engine evaluation estimates black_box training laws; do $(BIN)/python benchmarks/$$name.py || exit 1; done

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv
