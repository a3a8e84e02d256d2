# Two commands: `make sweep` shows what raybench does on this machine, `make test` checks it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Without a GPU the same job runs on CPU workers, cut down to what two cores can do in a minute.
CPU_CUT := --set workload.hidden=512 --set workload.layers=4 --set matrix.world_size=1,2 \
  --set matrix.precision=fp32,bf16 --set matrix.batch_size=64,256 --set measure.max_seconds=3 \
  --set measure.rounds=1
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)

.PHONY: setup sweep test lint unit integration browser benchmark clean long
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

# One after the other: beside each other they took longer in all, and tests that hold something
# against a clock failed. Byte code first: where none is written, each process would make it.
test: setup $(BIN)/.exporters
	@$(BIN)/python -m compileall -q raybench tests
	+$(MAKE) -j1 --keep-going lint unit integration

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/structure.py

# Many tests hold real processes against a clock, and a machine may be busy with somebody else's
# work. So a file in which one failed runs once more, whole and alone: one test alone would also
# pass where only what the others left behind makes it fail. Both outputs are shown.
# $(call run_tests,FOLDER,OPTIONS)
define run_tests
	$(BIN)/pytest --cache-clear $(2) -m "not long" $(1) || { \
	  files=$$($(BIN)/pytest --last-failed --last-failed-no-failures none --collect-only -q $(1) \
	    | sed -n 's/::.*//p' | sort -u); \
	  test -n "$$files" && $(BIN)/pytest -m "not long" $$files; }
endef

unit: setup $(BIN)/.exporters
	$(call run_tests,tests/unit,-n 3 --dist loadfile)

integration: setup
	$(call run_tests,tests/integration,-n 2 --dist loadfile --no-loadscope-reorder)

# Variants, and what takes most of a minute each: late nodes, standbys, killed drivers, a small soak.
long: setup
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long and not alone"
	$(BIN)/pytest -m alone

# The page of a report in Chromium, which must be on this machine; not part of `test`.
browser: setup
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	$(BIN)/pytest tests/browser

# The cost of a point by a fresh torchrun against a sweep; minutes, not part of `test`.
benchmark: setup
	$(BIN)/python -m benchmarks.point_cost

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
