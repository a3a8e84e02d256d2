"""The job file: what loads, and that everything else is a line with its place."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from raybench.errors import JobError
from raybench.job.model import Job, Measure, Span, load_job
from raybench.job.plan import make_plan
from raybench.job.sections import BatchSearch

HEAD = "version: 1\nname: test\nworkload: {kind: mlp}\n"
MATRIX = "matrix:\n  batch_size: [64]\n"
JOBS = Path(__file__).parents[3] / "jobs"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> Job:
    Path("job.yaml").write_text(text)
    return load_job(Path("job.yaml"), overrides)


def problems_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load(text, *overrides)
    return str(caught.value).splitlines()


def test_a_baseline_beside_a_wrong_value_of_its_setting_is_no_bug() -> None:
    [problem] = problems_of(
        HEAD + MATRIX + "  precision: [fp32, fp9]\nbaseline: {precision: fp32}\n"
    )
    assert "matrix.precision[1]: must be 'fp32'" in problem


def test_a_short_job_has_the_documented_defaults() -> None:
    job = load(HEAD + MATRIX)
    assert (job.version, job.name, job.workload.kind) == (1, "test", "mlp")
    assert job.matrix == {"batch_size": (64,)}
    assert (job.zip, job.exclude, job.include) == ((), (), ())
    assert job.baseline == {"world_size": 1}
    assert job.measure.model_dump() == {
        "warmup": {"min": 20, "max": 200},
        "iterations": {"min": 5, "max": 10_000},
        "target_ci": 0.01,
        "min_seconds": 2.0,
        "max_seconds": 20.0,
        "rounds": 1,
        "repeats": 1,
        "timeout_s": 300.0,
        "breakdown": True,
        "check_gradients": False,
        "fresh_workers": False,
    }
    assert (job.placement.strategy, job.placement.isolation) == ("pack", "cluster")
    assert job.on_error == "continue"
    assert job.text == HEAD + MATRIX


def test_quick_is_short_for_the_settings_of_a_short_look() -> None:
    for job in (load(HEAD + MATRIX + "measure: quick\n"), load(HEAD + MATRIX, "measure=quick")):
        assert job.measure.is_quick
        assert job.measure == Measure(min_seconds=0.0, iterations=Span(min=5, max=1000))
    assert not load(HEAD + MATRIX).measure.is_quick


@pytest.mark.parametrize("given", ["quickly", "5", "[quick]"])
def test_how_it_is_measured_is_a_mapping_or_quick(given: str) -> None:
    with pytest.raises(JobError, match="measure: must be a mapping or quick, given "):
        load(HEAD + MATRIX + f"measure: {given}\n")


def test_a_full_job_loads_as_it_is_written() -> None:
    job = load(
        "version: 1\nname: full\n"
        "workload: {kind: mlp, layers: 2}\n"
        "matrix: {world_size: [1, 2], precision: bf16}\n"
        "zip: [{batch_size: [16, 64], hidden: [512, 256]}]\n"
        "exclude: [{world_size: 2, batch_size: [16, 64]}]\n"
        "include: [{world_size: 4, precision: fp32, batch_size: 8, hidden: 64}]\n"
        "baseline: {precision: fp32}\n"
        "measure: {warmup: 1, max_seconds: 5}\n"
        "placement: {strategy: spread}\n"
        "on_error: stop\n"
    )
    assert job.workload.parameters == {"layers": 2}
    assert job.matrix == {"world_size": (1, 2), "precision": ("bf16",)}
    assert job.zip == ({"batch_size": (16, 64), "hidden": (512, 256)},)
    assert job.exclude == ({"world_size": (2,), "batch_size": (16, 64)},)
    assert job.include == ({"world_size": 4, "precision": "fp32", "batch_size": 8, "hidden": 64},)
    assert (job.measure.warmup, job.measure.max_seconds) == (Span(min=1, max=1), 5.0)
    assert (job.placement.strategy, job.on_error) == ("spread", "stop")


def test_overrides_take_the_place_of_what_the_file_says() -> None:
    job = load(HEAD + MATRIX, "matrix.world_size=1,2", "measure.warmup=3", "workload.hidden=512")
    assert job.matrix == {"batch_size": (64,), "world_size": (1, 2)}
    assert job.measure.warmup == Span(min=3, max=3)
    assert job.workload.parameters == {"hidden": 512}
    assert job.text == HEAD + MATRIX


def test_warmup_and_iterations_are_counts_or_bounds() -> None:
    text = HEAD + MATRIX + "measure: {warmup: {min: 3, max: 9}, iterations: 7}\n"
    measure = load(text, "measure.iterations={min: 5, max: 5}").measure
    assert (measure.warmup, measure.iterations) == (Span(min=3, max=9), Span(min=5, max=5))


@pytest.mark.parametrize(
    ("given", "search"),
    [
        ("auto", BatchSearch(start=64)),
        ("{start: 8}", BatchSearch(start=8)),
        ("{start: 8, max: 99}", BatchSearch(start=8, max=99)),
        ("{max: 99}", BatchSearch(start=64, max=99)),
    ],
)
def test_batch_sizes_can_be_searched(given: str, search: BatchSearch) -> None:
    job = load(HEAD + f"matrix: {{world_size: [1, 2], batch_size: {given}}}\n")
    assert job.batch_search == search
    assert job.axes == {"world_size": (1, 2), "batch_size": (search.start,)}
    assert load(HEAD + MATRIX, f"matrix.batch_size={given}").batch_search == search
    assert load(HEAD + MATRIX).batch_search is None


def test_auto_is_a_text_like_any_other_for_the_parameters_of_a_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts_workload.py").write_text(
        "class Mine:\n    def __init__(self, context, *, mode: str = 'x'): ...\n"
        "    def step(self): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    job = load(HEAD.replace("mlp", '"texts_workload:Mine"') + MATRIX + "  mode: auto\n")
    assert job.matrix["mode"] == ("auto",)


def test_the_meaning_changes_with_what_is_run_and_with_nothing_else() -> None:
    meaning = load(HEAD + MATRIX).meaning_sha256
    same = ["name=other", "baseline={}", "on_error=stop"]
    same += ["measure.warmup={min: 20, max: 200}", "measure.breakdown=true"]
    different = [
        "measure.warmup=11",
        "measure.breakdown=false",
        "matrix.cuda_graph=true",
        "matrix.batch_size=65",
        "matrix.batch_size=auto",
        "matrix.batch_size={max: 4096}",
        "workload.hidden=2",
        "placement.strategy=spread",
        "exclude=[{batch_size: 65}]",
    ]
    assert re.fullmatch("[0-9a-f]{64}", meaning)
    assert load("# a comment\n" + HEAD + MATRIX).meaning_sha256 == meaning
    assert all(load(HEAD + MATRIX, text).meaning_sha256 == meaning for text in same)
    assert all(load(HEAD + MATRIX, text).meaning_sha256 != meaning for text in different)


MALFORMED: list[tuple[str, str, str]] = [
    # name, the file, the line that must be told (or how it must begin)
    ("unknown key", HEAD + MATRIX + "matrx: {}\n", "6:1: matrx: unknown key 'matrx'; did you mean"),
    ("version as a truth", HEAD.replace("1", "true", 1) + MATRIX, "1:10: version: must be 1, giv"),
    ("version as a number", HEAD.replace("1", "1.0", 1) + MATRIX, "1:10: version: must be 1, give"),
    (
        "section as a huge number",
        HEAD + MATRIX + "measure: 0x" + "f" * 5000 + "\n",
        "6:10: measure: an integer must fit into 64 bits",
    ),
    (
        "baseline that no point has",
        HEAD + MATRIX + "  precision: [fp32, bf16]\nbaseline: {precision: tf32}\n",
        "7:23: baseline.precision: no point has precision 'tf32'; the points have 'fp32', 'bf16'",
    ),
    (
        "baseline with a default that no point has",
        HEAD + MATRIX + "  world_size: [2, 4]\nbaseline: {layers: 3, world_size: 2}\n",
        "7:20: baseline.layers: no point has layers 3; the points have 4",
    ),
    (
        "unknown key below",
        HEAD + MATRIX + "measure: {warmpu: 3}\n",
        "6:11: measure.warmpu: unknown key 'warmpu'; did you mean 'warmup'?",
    ),
    (
        "wrong type",
        HEAD + MATRIX + "measure: {warmup: many}\n",
        "6:19: measure.warmup: must be a count or a mapping {min: , max: }, given 'many'",
    ),
    (
        "number as text",
        HEAD + "matrix: {batch_size: ['64']}\n",
        "4:23: matrix.batch_size[0]: must be an integer, given '64'",
    ),
    (
        "another case of auto",
        HEAD + "matrix: {batch_size: Auto}\n",
        "4:22: matrix.batch_size[0]: must be an integer, given 'Auto'; did you mean 'auto'?",
    ),
    (
        "list for a mapping",
        HEAD + "matrix: [1]\n",
        "4:9: matrix: must be a mapping of keys to values, given a list",
    ),
    (
        "mapping for a list",
        HEAD + MATRIX + "exclude: {a: 1}\n",
        "6:10: exclude: must be a list, given a mapping",
    ),
    (
        "list inside a list",
        HEAD + "matrix: {batch_size: [[1]]}\n",
        "4:23: matrix.batch_size[0]: must be one value, given a list",
    ),
    (
        "list for a parameter",
        HEAD.replace("mlp", "mlp, hidden: [1, 2]") + MATRIX,
        "3:31: workload.hidden: must be one value, given a list",
    ),
    ("missing name", "version: 1\nworkload: {kind: mlp}\n" + MATRIX, "1:1: name: required"),
    ("missing kind", "version: 1\nname: x\nworkload: {}\n" + MATRIX, "3:1: workload.kind: req"),
    ("other version", HEAD.replace("1", "2", 1) + MATRIX, "1:10: version: must be 1, given 2"),
    (
        "duplicate key",
        HEAD + MATRIX + "name: again\n",
        "6:1: name: duplicate key, first given on line 2",
    ),
    (
        "duplicate axis",
        HEAD + "matrix:\n  batch_size: [1]\n  batch_size: [2]\n",
        "6:3: matrix.batch_size: duplicate key, first given on line 5",
    ),
    ("empty axis", HEAD + "matrix: {batch_size: []}\n", "4:22: matrix.batch_size: must not be"),
    (
        "unequal zip",
        HEAD + "zip: [{batch_size: [1, 2], hidden: [1, 2, 3]}]\n",
        "4:7: zip[0]: the lists of one entry must be of equal length, "
        "given batch_size 2, hidden 3",
    ),
    ("empty zip entry", HEAD + MATRIX + "zip: [{}]\n", "6:7: zip[0]: must not be empty"),
    (
        "unknown workload",
        HEAD.replace("mlp", "mlpp") + MATRIX,
        "3:18: workload.kind: unknown workload 'mlpp'; did you mean 'mlp'?",
    ),
    (
        "unknown parameter",
        HEAD.replace("mlp", "mlp, hiden: 3") + MATRIX,
        "3:23: workload.hiden: unknown parameter 'hiden'; did you mean 'hidden'?",
    ),
    (
        "parameter out of range",
        HEAD.replace("mlp", "mlp, hidden: 0") + MATRIX,
        "3:31: workload.hidden: must be greater than 0, given 0",
    ),
    (
        "axis as parameter",
        HEAD.replace("mlp", "mlp, batch_size: 64") + MATRIX,
        "3:23: workload.batch_size: not a parameter; put it into matrix",
    ),
    (
        "unknown axis",
        HEAD + MATRIX + "  world_sise: [1]\n",
        "6:3: matrix.world_sise: unknown axis 'world_sise'; did you mean 'world_size'?",
    ),
    (
        "unknown precision",
        HEAD + MATRIX + "  precision: [fp23]\n",
        "6:15: matrix.precision[0]: must be 'fp32', 'tf32', 'fp16', 'bf16' or 'float8', given "
        "'fp23'; did you mean 'fp32'?",
    ),
    (
        "fixed and swept",
        HEAD.replace("mlp", "mlp, hidden: 3") + MATRIX + "  hidden: [3]\n",
        "6:3: matrix.hidden: also given by workload.hidden; keep one of them",
    ),
    (
        "matrix and zip",
        HEAD + MATRIX + "zip: [{batch_size: [1], hidden: [1]}]\n",
        "6:8: zip[0].batch_size: also given by matrix.batch_size; keep one of them",
    ),
    (
        "both batch sizes",
        HEAD + MATRIX + "  global_batch_size: [64]\n",
        "5:3: matrix: has both batch_size and global_batch_size",
    ),
    (
        "no batch size",
        HEAD + "matrix: {world_size: [1]}\n",
        "4:9: matrix: has neither batch_size nor global_batch_size",
    ),
    ("no matrix at all", HEAD, "1:1: matrix: has neither batch_size nor global_batch_size"),
    (
        "other batch size in include",
        HEAD + MATRIX + "include: [{global_batch_size: 4}]\n",
        "6:11: include[0]: has global_batch_size, but matrix has batch_size",
    ),
    (
        "include lacks an axis",
        HEAD + MATRIX + "  world_size: [1]\ninclude: [{batch_size: 4}]\n",
        "7:11: include[0]: must give every axis of the job, lacks world_size",
    ),
    (
        "include with a fixed parameter",
        HEAD.replace("mlp", "mlp, hidden: 3") + MATRIX + "include: [{batch_size: 4, hidden: 5}]\n",
        "6:27: include[0].hidden: also given by workload.hidden",
    ),
    (
        "unknown key of exclude",
        HEAD + MATRIX + "exclude: [{bach_size: 64}]\n",
        "6:12: exclude[0].bach_size: unknown setting 'bach_size'; did you mean 'batch_size'?",
    ),
    (
        "unknown key of baseline",
        HEAD + MATRIX + "baseline: {world: 1}\n",
        "6:12: baseline.world: unknown setting 'world'; did you mean 'world_size'?",
    ),
    ("tab", "version: 1\n\tname: x\n", "2:1: not YAML: a tab cannot indent; use spaces"),
    ("not a mapping", "- a\n", "1:1: a job file is a mapping of keys to values, given a list"),
    ("empty file", "", "1:1: a job file is a mapping of keys to values, given an empty file"),
    ("zero world size", HEAD + MATRIX + "  world_size: [1, 0]\n", "6:19: matrix.world_size[1]: "),
    ("negative batch", HEAD + "matrix: {batch_size: -1}\n", "4:22: matrix.batch_size[0]: must be"),
    ("zero budget", HEAD + MATRIX + "measure: {max_seconds: 0}\n", "6:24: measure.max_seconds: "),
    (
        "ten million points",
        HEAD + "matrix:\n" + "".join(
            f"  {name}: [{', '.join(map(str, range(1, 101)))}]\n"
            for name in ("batch_size", "hidden", "layers", "bucket_cap_mb")
        ),
        "5:3: matrix: a job has at most 100,000 points, given 100,000,000",
    ),
    ("deep nesting", HEAD + "matrix: " + "[" * 500, "4:24: matrix"),
    ("anchor", HEAD + "matrix: {batch_size: &a [1]}\n", "4:22: matrix.batch_size: anchors (&)"),
    ("alias", HEAD + MATRIX + "  hidden: *a\n", "6:11: matrix.hidden: aliases (*)"),
    ("merge key", HEAD + "matrix: {<<: {batch_size: [1]}}\n", "4:10: matrix.'<<': merge keys"),
    ("not a number", HEAD + MATRIX + "measure: {timeout_s: .nan}\n", "6:22: measure.timeout_s: "),
    ("infinite", HEAD + MATRIX + "measure: {timeout_s: .inf}\n", "6:22: measure.timeout_s: must"),
    (
        "huge integer",
        HEAD + "matrix: {batch_size: 99999999999999999999}\n",
        "4:22: matrix.batch_size: an integer must fit into 64 bits",
    ),
    ("large integer", HEAD + MATRIX + "  world_size: 99999999\n", "6:15: matrix.world_size[0]: "),
    ("name leaves the folder", HEAD.replace("test", "../x") + MATRIX, "2:7: name: must match"),
    ("name with a slash", HEAD.replace("test", "a/b") + MATRIX, "2:7: name: must match"),
    ("name with a dot first", HEAD.replace("test", "..") + MATRIX, "2:7: name: must match"),
    ("name with a line end", HEAD.replace("test", '"a\\n"') + MATRIX, "2:7: name: must match"),
    ("long name", HEAD.replace("test", "x" * 65) + MATRIX, "2:7: name: must match"),
    ("no value", HEAD + MATRIX + "measure:\n", "6:1: measure: no value given"),
    (
        "count with a fraction",
        HEAD + MATRIX + "measure: {iterations: 10.0}\n",
        "6:23: measure.iterations: must be a count or a mapping {min: , max: }, given 10.0",
    ),
    (
        "list for a count",
        HEAD + MATRIX + "measure: {iterations: [1, 2]}\n",
        "6:23: measure.iterations: must be a count or a mapping {min: , max: }, given a list",
    ),
    (
        "true for a count",
        HEAD + MATRIX + "measure: {warmup: true}\n",
        "6:19: measure.warmup: must be a count or a mapping {min: , max: }, given true",
    ),
    (
        "bounds the wrong way round",
        HEAD + MATRIX + "measure: {warmup: {min: 5, max: 2}}\n",
        "6:33: measure.warmup.max: must not be below min, which is 5, given 2",
    ),
    (
        "bounds without a maximum",
        HEAD + MATRIX + "measure: {iterations: {min: 5}}\n",
        "6:11: measure.iterations.max: required, but not given",
    ),
    (
        "bounds of zero",
        HEAD + MATRIX + "measure: {iterations: {min: 0, max: 5}}\n",
        "6:29: measure.iterations.min: must be greater than or equal to 1, given 0",
    ),
    (
        "unknown bound",
        HEAD + MATRIX + "measure: {warmup: {min: 1, max: 5, mx: 3}}\n",
        "6:36: measure.warmup.mx: unknown key 'mx'; did you mean 'max'?",
    ),
    (
        "breakdown as a word",
        HEAD + MATRIX + "measure: {breakdown: no}\n",
        "6:22: measure.breakdown: must be true or false, given 'no'",
    ),
    (
        "graph as a number",
        HEAD + MATRIX + "  cuda_graph: [1]\n",
        "6:16: matrix.cuda_graph[0]: must be true or false, given 1",
    ),
    (
        "graph as a parameter",
        HEAD.replace("mlp", "mlp, cuda_graph: true") + MATRIX,
        "3:23: workload.cuda_graph: not a parameter; put it into matrix",
    ),
    (
        "other isolation",
        HEAD + MATRIX + "placement: {isolation: nodes}\n",
        "6:24: placement.isolation: must be 'cluster', 'node' or 'device', given 'nodes'; "
        "did you mean 'node'?",
    ),
    (
        "search with a maximum below its start",
        HEAD + "matrix: {batch_size: {start: 8, max: 4}}\n",
        "4:38: matrix.batch_size.max: must not be below start, which is 8, given 4",
    ),
    (
        "search from zero",
        HEAD + "matrix: {batch_size: {start: 0}}\n",
        "4:30: matrix.batch_size.start: must be greater than or equal to 1, given 0",
    ),
    (
        "unknown key of a search",
        HEAD + "matrix: {batch_size: {strat: 8}}\n",
        "4:23: matrix.batch_size.strat: unknown key 'strat'; did you mean 'start'?",
    ),
    (
        "search among values",
        HEAD + "matrix: {batch_size: [64, auto]}\n",
        "4:27: matrix.batch_size[1]: auto is for matrix alone, as its whole value",
    ),
    (
        "search bounds among values",
        HEAD + "matrix: {batch_size: [{start: 8}]}\n",
        "4:23: matrix.batch_size[0]: must be one value, given a mapping",
    ),
    (
        "search for a global batch size",
        HEAD + "matrix: {global_batch_size: auto}\n",
        "4:29: matrix.global_batch_size[0]: auto is for matrix alone",
    ),
    (
        "search for another axis",
        HEAD + MATRIX + "  hidden: {start: 8}\n",
        "6:11: matrix.hidden[0]: must be one value, given a mapping",
    ),
    (
        "search in zip",
        HEAD + "zip: [{batch_size: auto, hidden: 8}]\n",
        "4:20: zip[0].batch_size[0]: auto is for matrix alone",
    ),
    (
        "search in include",
        HEAD + MATRIX + "include: [{batch_size: auto}]\n",
        "6:24: include[0].batch_size: auto is for matrix alone",
    ),
    (
        "search in exclude",
        HEAD + MATRIX + "exclude: [{batch_size: auto}]\n",
        "6:24: exclude[0].batch_size[0]: auto is for matrix alone",
    ),
    (
        "search with included points",
        HEAD + "matrix: {batch_size: auto}\ninclude: [{batch_size: 8}]\n",
        "5:1: include: does not go with matrix.batch_size: auto; put these points into another job",
    ),
    (
        "search with an excluded batch size",
        HEAD + "matrix: {batch_size: auto}\nexclude: [{batch_size: 64}]\n",
        "5:12: exclude[0].batch_size: a batch size that matrix.batch_size: auto finds cannot be ex",
    ),
    (
        "search with a batch size as the baseline",
        HEAD + "matrix: {batch_size: auto}\nbaseline: {batch_size: 64}\n",
        "5:12: baseline.batch_size: a batch size that matrix.batch_size: auto finds cannot be the",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED]
)
def test_a_malformed_job_is_one_located_line(text: str, expected: str) -> None:
    (line,) = problems_of(text)
    assert line.startswith(f"job.yaml:{expected}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("matrix.world_size", "must be KEY=VALUE"),
        ("matrix.world_sise=1", "matrix.world_sise: unknown axis 'world_sise'; did you mean"),
        ("measur.warmup=1", "measur: unknown key 'measur'; did you mean 'measure'?"),
        ("measure.warmup=[1", "measure.warmup: not YAML"),
        ("measure.warmup=0", "measure.warmup: must be from 1 to 1,000,000,000, given 0"),
        ("matrix.batch_size=1,x", "matrix.batch_size[1]: must be an integer, given 'x'"),
        ("workload.kind=mpl", "workload.kind: unknown workload 'mpl'; did you mean 'mlp'?"),
        ("name.x=1", "name is not a mapping"),
    ],
)
def test_a_bad_override_is_one_line_that_names_it(override: str, expected: str) -> None:
    (line,) = problems_of(HEAD + MATRIX, override)
    assert line.startswith(f"--set {override}: {expected}")


def test_a_file_that_is_missing_a_folder_or_unreadable_is_one_line(tmp_path: Path) -> None:
    closed = tmp_path / "closed.yaml"
    closed.write_text(HEAD)
    closed.chmod(0)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: \xe9\n")
    paths = [tmp_path / "missing.yaml", tmp_path, latin]
    if not _root_reads_all(closed):
        paths.append(closed)
    for path in paths:
        with pytest.raises(JobError) as caught:
            load_job(path)
        assert re.match(rf"{re.escape(str(path))}:\d+:\d+: .+", str(caught.value))
        assert "\n" not in str(caught.value)


def _root_reads_all(path: Path) -> bool:
    try:
        path.read_bytes()
    except PermissionError:
        return False
    return stat.S_IMODE(path.stat().st_mode) == 0


def test_all_problems_of_a_file_come_at_once_and_in_its_order() -> None:
    lines = problems_of(
        "version: 2\nnam: x\nname: ../x\nworkload: {kind: mlp, hiden: 4}\n"
        "matrix:\n  world_sise: [1]\n  batch_size: [64, -1, a]\n"
        "exclude: [{}]\nmeasure: {warmup: 0, itertions: 5}\non_error: stopp\n",
        "measure.repeats=0",
    )
    assert [line.split(": ")[1] for line in lines] == [
        "version",
        "nam",
        "name",
        "workload.hiden",
        "matrix.world_sise",
        "matrix.batch_size[1]",
        "matrix.batch_size[2]",
        "exclude[0]",
        "measure.warmup",
        "measure.itertions",
        "on_error",
        "measure.repeats",
    ]


def test_a_wrong_value_does_not_put_off_what_is_wrong_beside_it() -> None:
    lines = problems_of(
        "version: 1\nname: x\nworkload: {kind: mlp, layers: [2]}\n"
        "matrix:\n  precision: [{a: 1}, bf16]\n  world_size: [2, 4]\n"
        "include: [{world_size: 8}]\n"
        "baseline: {world_size: 1, precision: tf32}\n",
    )
    assert [line.split(": ")[1] for line in lines] == [
        "workload.layers",
        "matrix",
        "matrix.precision[0]",
        "include[0]",
        "include[0]",
        "baseline.world_size",
    ]


def test_a_baseline_is_not_looked_for_among_values_that_are_wrong() -> None:
    for text in (
        "matrix: {batch_size: 1, precision: [fp32, bf17]}\nbaseline: {precision: tf32}\n",
        "matrix: {batch_size: 1, precision: [fp32]}\nbaseline: {precision: tf33}\n",
        "matrix: {batch_size: 1}\nzip: [{layers: [1, x]}]\nbaseline: {layers: 9}\n",
    ):
        assert len(problems_of(HEAD + text)) == 1


def test_an_unknown_workload_does_not_put_off_what_is_wrong_with_every_other() -> None:
    lines = problems_of(
        "version: 1\nname: x\nworkload: {kind: mpl, anything: 1}\n"
        "matrix: {precision: [fp32, bfloat16], world_size: [1, 2], more: [1]}\n"
        "zip: [{batch_size: [1, 2], more: [1]}]\n"
        "baseline: {world_size: 3, most: 1}\nmeasure: {warmpu: 1}\n",
    )
    assert [line.split(": ")[1] for line in lines] == [
        "workload.kind",
        "matrix.precision[1]",
        "zip[0]",
        "zip[0].more",
        "baseline.world_size",
        "measure.warmpu",
    ]


def test_a_wrong_key_does_not_put_off_what_is_wrong_with_the_points() -> None:
    lines = problems_of(
        HEAD + "matrix: {world_size: [1, 3], global_batch_size: 8}\nmeasure: {warmpu: 1}\n"
    )
    assert [line.split(": ")[1] for line in lines] == [
        "matrix.global_batch_size[0]",
        "measure.warmpu",
    ]


def test_a_file_of_thousands_of_mistakes_is_fifty_lines_and_a_count() -> None:
    lines = problems_of(HEAD + MATRIX + "".join(f"x{n}: 1\n" for n in range(3000)))
    assert len(lines) == 51
    assert lines[-1] == "job.yaml: and 2,950 more"


def test_what_is_no_regular_file_is_refused_without_being_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(JobError, match=r":1:1: a job is a regular file"):
            load_job(path)


def test_bad_bounds_do_not_hide_what_is_wrong_elsewhere() -> None:
    lines = problems_of(
        HEAD + "matrix: {batch_size: 1, world_sise: 2}\n"
        "measure: {warmup: {min: 5, max: 2}, iterations: {min: 3}}\n"
    )
    assert [line.split(": ")[1] for line in lines] == [
        "matrix.world_sise",
        "measure.warmup.max",
        "measure.iterations.max",
    ]


def test_a_required_parameter_must_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "required_workload.py").write_text(
        "class Mine:\n    def __init__(self, context, *, size: int): ...\n    def step(self): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = HEAD.replace("mlp", '"required_workload:Mine"') + MATRIX
    assert problems_of(text) == ["job.yaml:3:1: workload.size: required, but not given"]
    assert load(text, "workload.size=3").settings["size"].is_required
    assert load(text, "matrix.size=3").matrix["size"] == (3,)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_job_of_the_repository_loads_and_stays_small(path: Path) -> None:
    job = load_job(path)
    plan = make_plan(job)
    assert job.name == path.stem
    assert plan.warnings == ()
    assert 0 < len(plan.points) <= 40
    first_line = job.text.partition("\n")[0]
    assert first_line == "# yaml-language-server: $schema=../raybench/job.schema.json"


_WORDS = """version name workload kind mlp matrix zip exclude include baseline measure warmup
    world_size batch_size global_batch_size precision hidden fp32 placement strategy pack
    auto start max"""
_words = st.sampled_from(_WORDS.split())
_scalars = st.one_of(
    _words, st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=5)
)
_trees = st.recursive(
    _scalars,
    lambda below: st.one_of(
        st.lists(below, max_size=3), st.dictionaries(st.one_of(_words, st.text(max_size=3)), below)
    ),
    max_leaves=12,
)
_sections = st.fixed_dictionaries(
    {"version": st.just(1), "name": st.just("x"), "workload": st.just({"kind": "mlp"})},
    optional={
        name: _trees
        for name in ("matrix", "zip", "exclude", "include", "baseline", "measure", "placement", "x")
    },
)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return str(value)


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.one_of(
        _sections.map(_flow),
        _trees.map(_flow),
        st.text(max_size=40),
        st.text(max_size=40).map(lambda text: HEAD + text),
    )
)
@example(HEAD + "matrix: {batch_size: [2], world_size: 3, <<: *a}")
def test_no_text_makes_anything_but_a_job_or_located_lines(text: str) -> None:
    path = Path("fuzz.yaml")
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    try:
        job = load_job(path)
        make_plan(job)
    except JobError as error:
        for line in str(error).split("\n"):
            assert re.match(r"fuzz\.yaml:\d+:\d+: .+", line), line
    else:
        assert isinstance(job, Job)
