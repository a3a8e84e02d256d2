# Two commands: `make sweep` shows what raybench does on this machine, `make test` checks it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup sweep test bytecode lint unit integration alone coverage browser benchmark clean long
setup: $(BIN)/.run

# Installs the extras that $(1) names; with uv where it is on the PATH. $(2): options of pip.
define install
@if command -v uv >/dev/null && [ -z "$$RAYBENCH_NO_UV" ]; then \
  UV_FIND_LINKS="$${UV_FIND_LINKS:-$$($(BIN)/pip config get global.find-links 2>/dev/null || true)}" \
  uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[$(1)]'; \
else \
  $(BIN)/python -m pip install -q $(2) -c constraints.txt -e '.[$(1)]'; \
fi
@touch $@
endef

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What a sweep needs.
$(BIN)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,run)

DEV := run,dev,mlflow,wandb,float8

# The tools of the tests; MLflow, W&B and torchao are only needed where exporters and float8 are tested.
# pip would make the byte code of all packages, on one core: `bytecode` makes that of fewer, beside mypy.
$(BIN)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(DEV),--no-compile)

sweep: setup
	$(BIN)/raybench sweep jobs/ddp_scaling.yaml

# One after the other: beside each other they take longer in all; but mypy leaves a core idle.
test: $(BIN)/.dev
	+@$(MAKE) -j2 --keep-going bytecode lint; linted=$$?; \
	  $(MAKE) -j1 --keep-going unit integration alone && exit $$linted

# Where none is written, each process that imports would make it. Some files of packages are for
# another Python, and do not compile.
UNUSED := site-packages/.*/tests?/|/ray/(data|llm|rllib|serve|train|tune)/|/torch/testing/_internal/
bytecode: $(BIN)/.dev
	-@$(BIN)/python -m compileall -qq -x '$(UNUSED)' $(VENV)/lib
	@$(BIN)/python -m compileall -q raybench tests

lint: $(BIN)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/structure.py

unit: $(BIN)/.dev
	$(BIN)/pytest -n 3 --dist loadfile -m "not long and not alone" tests/unit

integration: $(BIN)/.dev
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not long and not alone" \
	  tests/integration

# Tests that hold something against a clock. Only their files are read: to collect all takes longer.
ALONE = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests/unit tests/integration)
alone: $(BIN)/.dev
	$(BIN)/pytest -m "alone and not long" $(ALONE)

# Which lines the unit tests run; CI prints it.
coverage: $(BIN)/.dev
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[coverage]'
	$(BIN)/pytest -n 2 --dist loadfile -m "not long and not alone" --cov raybench \
	  --cov-report term:skip-covered tests/unit

# Variants, and what takes most of a minute each: late nodes, killed drivers, a small soak.
long: $(BIN)/.dev
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m long

# The page of a report in Chromium, which must be on this machine; not part of `test`.
browser: $(BIN)/.dev
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	$(BIN)/pytest tests/browser

# The cost of a point by a fresh torchrun against a sweep; minutes, not part of `test`.
benchmark: setup
	$(BIN)/python -m benchmarks.point_cost

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
