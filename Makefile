# Two commands: `make sweep` shows what raybench does on this machine, `make test` checks it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Without a GPU the same job runs on CPU workers, cut down to what two cores can do in a minute.
CPU_CUT := --set workload.hidden=512 --set workload.layers=4 --set matrix.world_size=1,2 \
  --set matrix.precision=fp32,bf16 --set matrix.batch_size=64,256 --set measure.max_seconds=3 \
  --set measure.rounds=1
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)

.PHONY: setup sweep test lint unit integration alone browser benchmark clean long
setup: $(BIN)/.ready

$(BIN)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@if command -v uv >/dev/null && [ -z "$$RAYBENCH_NO_UV" ]; then \
	  UV_FIND_LINKS="$${UV_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null || true)}" \
	  uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev]'; \
	else \
	  $(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'; \
	fi
	@touch $@

# MLflow, W&B and torchao are only needed where exporters and float8 are tested.
$(BIN)/.exporters: $(BIN)/.ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[mlflow,wandb,float8]'
	@touch $@

sweep: setup
	$(BIN)/raybench sweep jobs/ddp_scaling.yaml $(if $(GPU),,$(CPU_CUT))

# One after the other: beside each other they take longer in all. Byte code first: where none is
# written, each process would make it.
test: setup $(BIN)/.exporters
	@$(BIN)/python -m compileall -q raybench tests
	+$(MAKE) -j1 --keep-going lint unit integration alone

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/structure.py

unit: setup $(BIN)/.exporters
	$(BIN)/pytest -n 3 --dist loadfile -m "not long and not alone" tests/unit

integration: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long and not alone" \
	  tests/integration

# Tests that hold something against a clock.
alone: setup
	$(BIN)/pytest -m "alone and not long" tests/unit tests/integration

# Variants, and what takes most of a minute each: late nodes, standbys, killed drivers, a small soak.
long: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long and not alone"
	$(BIN)/pytest -m "alone and long"

# The page of a report in Chromium, which must be on this machine; not part of `test`.
browser: setup
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	$(BIN)/pytest tests/browser

# The cost of a point by a fresh torchrun against a sweep; minutes, not part of `test`.
benchmark: setup
	$(BIN)/python -m benchmarks.point_cost

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
