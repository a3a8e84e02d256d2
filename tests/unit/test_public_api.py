"""What `import raybench` offers: names, signatures, and the examples in its docstrings."""

import doctest
import inspect
import subprocess
import sys
from importlib import import_module

import pytest
from commands import REPOSITORY

import raybench

MODULES = (
    "raybench",
    "raybench.analysis.frames",
    "raybench.api.run_result",
    "raybench.api.step_timing",
    "raybench.job.answer",
    "raybench.records.metrics",
)
# Scripts of users call these: a change of a name or of a default breaks them.
SIGNATURES = {
    "sweep": "(job: 'JobSource', *, set: 'Mapping[str, Any] | None' = None, filter: 'str | None' = "
    "None, results: 'str | os.PathLike[str]' = 'results', device: 'DeviceChoice' = 'auto', "
    "address: 'str' = 'auto', **options: 'Unpack[SweepOptions]') -> 'RunResult'",
    "ab": "(job: 'str | os.PathLike[str]', *, old: 'str | None' = None, new: 'str | None' = None, "
    "results: 'str | os.PathLike[str]' = 'results', **options: 'Unpack[GateOptions]') -> "
    "'GateResult'",
    "open_run": "(run: 'str | os.PathLike[str]', results: 'str | os.PathLike[str]' = 'results') -> "
    "'RunResult'",
    "measure": "(step: 'Callable[..., object]', *, items: 'float | None' = None, setup: "
    "'Callable[..., object] | None' = None, workers: 'int | None' = None, seconds: 'float' = 1.0, "
    "flush_l2: 'bool' = False, **options: 'Unpack[MeasureOptions]') -> 'StepTiming'",
    "load": "(root: 'str | Path', table: 'str', run_id: 'str | None' = None, *, params: "
    "\"Literal['dict', 'columns']\" = 'dict') -> 'pd.DataFrame'",
    "units": "(table: 'str') -> 'dict[str, str]'",
    "RunResult.table": "(self, name: 'str') -> 'pd.DataFrame'",
    "RunResult.report": "(self, format: 'ReportFormat' = 'text', *, full: 'bool' = False) -> 'str'",
    "RunResult.save_page": "(self, path: 'str | os.PathLike[str]') -> 'Path'",
    "RunResult.chart": "(self) -> 'Picture'",
    "RunResult.compare": "(self, base: 'RunResult | str | Sequence[RunResult | str]', *, repeats: "
    "'Sequence[RunResult | str]' = (), threshold: 'float' = 0.015) -> 'RunComparison'",
    "RunComparison.report": "(self, format: 'ReportFormat' = 'text', *, full: 'bool' = False) -> "
    "'str'",
    "RunComparison.save_page": "(self, path: 'str | os.PathLike[str]') -> 'Path'",
    "GateResult.report": "(self, format: 'ReportFormat' = 'text') -> 'str'",
    "Picture.save": "(self, path: 'str | os.PathLike[str]') -> 'Path'",
}
# What else the objects have.
ATTRIBUTES = {
    "RunResult": {"results", "run_id", "status", "summary", "points", "samples"},
    "RunComparison": {"document", "points", "verdicts"},
    "GateResult": {"verdict", "outcome", "exit_code", "folder", "points", "document"},
    "StepTiming": {
        *("name", "samples", "median_ms", "interval_ms", "mean_ms", "items_per_s"),
        *("doubts", "method"),
    },
    "Picture": {"svg", "png"},
}
OPTIONS = {
    "sweep": {"tags", "wait_s", "shared"},
    "measure": {"device", "address"},
    "ab": {
        *("set", "old_set", "new_set", "old_job", "old_env", "new_env", "python", "old_python"),
        *("new_python", "setup", "threshold", "max_minutes", "address", "device", "devices"),
        "wait_s",
    },
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    outcome = doctest.testmod(import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize("name", sorted(set(raybench.__all__) - {"__version__"}))
def test_public_names_are_documented(name):
    assert getattr(raybench, name).__doc__


def test_public_names_complete():
    assert dir(raybench) == sorted(raybench.__all__)


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items())
def test_signatures_stay_as_they_are(name, expected):
    function = raybench
    for part in name.split("."):
        function = getattr(function, part)
    assert str(inspect.signature(function)) == expected
    assert function.__doc__


@pytest.mark.parametrize(("name", "expected"), ATTRIBUTES.items())
def test_objects_keep_their_attributes(name, expected):
    kind = getattr(raybench, name)
    public = {attribute for attribute in dir(kind) if not attribute.startswith("_")}
    fields = {field for field in kind.__dataclass_fields__ if not field.startswith("_")}
    methods = {full.partition(".")[2] for full in SIGNATURES if full.startswith(f"{name}.")}
    assert public | fields == expected | methods


@pytest.mark.parametrize(("name", "expected"), OPTIONS.items())
def test_functions_keep_their_options(name, expected):
    function = getattr(raybench, name)
    hint = function.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")
    options = getattr(import_module(function.__module__), hint)
    assert set(options.__annotations__) == expected


ROOMS = """
import raybench.sweep.loop, raybench.measure.stopping
from raybench.sweep import loop
from raybench.measure import stopping
import raybench
assert callable(raybench.sweep) and callable(raybench.measure)
assert raybench.errors.JobError.exit_code == 2
assert loop.sweep is not raybench.sweep
"""


def test_rooms_with_names_of_functions_stay_importable():
    subprocess.run([sys.executable, "-c", ROOMS], check=True, timeout=120)
