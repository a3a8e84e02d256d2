"""The job file: what loads, sizes, what a run answers; all else is a line with its place."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jobs import HEAD, MLP, load, places_of, plan, problems_of
from raybench.errors import JobError
from raybench.job.answer import ANSWER_METRICS, Answer
from raybench.job.loading import load_job
from raybench.job.model import Measure, answer_of_run
from raybench.job.registry import BUILTIN
from raybench.job.registry import load_workload as load_class
from raybench.results.tables import TABLES

JOB = MLP + "matrix:\n  batch_size: [64]\n"
SEARCH = MLP + "matrix: {batch_size: auto}\n"


def test_quick_means_half_a_second():
    for job in (load(JOB + "measure: quick\n"), load(JOB, "measure=quick")):
        assert job.measure.is_quick
        assert job.measure == Measure(seconds=0.5)
    assert not load(JOB).measure.is_quick


def test_quick_keeps_the_other_measure_settings():
    more = load(JOB + "measure: quick\n", "measure.rounds=3")
    less = load(JOB + "measure: {seconds: 9, rounds: 3}\n", "measure=quick")
    assert more.measure == less.measure == Measure(seconds=0.5, rounds=3)


def test_hash_changes_with_what_is_measured():
    meaning = load(JOB).meaning_sha256
    same = ["name=other", "baseline={}", "on_error=stop"]
    same += ["measure.warmup={min: 20, max: 200}", "measure.breakdown=true"]
    same += ["question=Which?", "answer={metric: throughput}", "items=tokens"]
    different = ["measure.warmup=11", "measure.breakdown=false", "matrix.cuda_graph=true"]
    different += [f"matrix.batch_size={size}" for size in ("65", "auto", "{max: 4096}")]
    different += ["workload.hidden=2", "placement.strategy=spread", "exclude=[{batch_size: 65}]"]
    assert re.fullmatch("[0-9a-f]{64}", meaning)
    assert load("# a comment\n" + JOB).meaning_sha256 == meaning
    assert all(load(JOB, text).meaning_sha256 == meaning for text in same)
    assert all(load(JOB, text).meaning_sha256 != meaning for text in different)


# The file, and how what is said of it begins.
MALFORMED = [
    (JOB + "measure: quickly\n", "6:10: measure: must be a mapping or quick, given "),
    (JOB + "matrx: {}\n", "6:1: matrx: unknown key 'matrx'; did you mean"),
    (JOB + "measure: {warmpu: 3}\n", "6:11: measure.warmpu: unknown key 'warmpu'; did you mean"),
    (
        MLP + "matrix: {batch_size: Auto}\n",
        "4:22: matrix.batch_size[0]: must be an integer, given 'Auto'; did you mean 'auto'?",
    ),
    (JOB + "exclude: {a: 1}\n", "6:10: exclude: must be a list, given a mapping"),
    (MLP + "matrix: {batch_size: [[1]]}\n", "4:23: matrix.batch_size[0]: must be one value,"),
    (JOB.replace("mlp", "mlp, hidden: [1, 2]"), "3:31: workload.hidden: must be one"),
    (JOB.replace("name: test\n", ""), "1:1: name: required"),
    (JOB.replace("1", "2", 1), "1:10: version: must be 1, given 2"),
    (MLP + "matrix:\n  batch_size: [1]\n  batch_size: [2]\n", "6:3: matrix.batch_size: duplicate"),
    (MLP + "matrix: {batch_size: []}\n", "4:22: matrix.batch_size: must not be"),
    (MLP + "zip: [{batch_size: [1, 2], hidden: [1, 2, 3]}]\n", "4:7: zip[0]: the lists of one"),
    (JOB.replace("mlp", "mlpp"), "3:18: workload.kind: unknown workload 'mlpp'; did"),
    (JOB.replace("mlp", "mlp, hiden: 3"), "3:23: workload.hiden: unknown parameter"),
    (JOB.replace("mlp", "mlp, hidden: 0"), "3:31: workload.hidden: must be greater than 0, given"),
    (JOB.replace("mlp", "mlp, hidden: true"), "3:31: workload.hidden: must be an integer, given t"),
    (JOB.replace("mlp", "mlp, hidden: '4'"), "3:31: workload.hidden: must be an integer, given '4"),
    (JOB.replace("mlp", "mlp, hidden: 4.0"), "3:31: workload.hidden: must be an integer, given 4."),
    (JOB + "  cuda_graph: [1]\n", "6:16: matrix.cuda_graph[0]: must be true or false, given 1"),
    (JOB.replace("mlp", "mlp, batch_size: 64"), "3:23: workload.batch_size: not a"),
    (JOB + "  world_sise: [1]\n", "6:3: matrix.world_sise: unknown axis 'world_sise'; did you"),
    (JOB + "  precision: [fp23]\n", "6:15: matrix.precision[0]: must be 'fp32', 'tf32', 'fp16',"),
    (JOB.replace("mlp", "mlp, hidden: 3") + "  hidden: [3]\n", "6:3: matrix.hidden: also"),
    (JOB + "  global_batch_size: [64]\n", "5:3: matrix: has both batch_size and"),
    (MLP + "matrix: {world_size: [1]}\n", "4:9: matrix: has neither batch_size nor"),
    (MLP, "1:1: matrix: has neither batch_size nor global_batch_size"),
    (JOB + "include: [{global_batch_size: 4}]\n", "6:11: include[0]: has global_batch_size, but"),
    (JOB + "  world_size: [1]\ninclude: [{batch_size: 4}]\n", "7:11: include[0]: must give"),
    (
        JOB.replace("mlp", "mlp, hidden: 3") + "include: [{batch_size: 4, hidden: 5}]\n",
        "6:27: include[0].hidden: also given by workload.hidden",
    ),
    (JOB + "exclude: [{bach_size: 64}]\n", "6:12: exclude[0].bach_size: unknown setting"),
    (JOB + "baseline: {world: 1}\n", "6:12: baseline.world: unknown setting 'world'; did you"),
    (JOB + "  world_size: [1, 0]\n", "6:19: matrix.world_size[1]: must be greater than or equal"),
    (JOB + "measure: {max_seconds: 0}\n", "6:24: measure.max_seconds: "),
    (JOB.replace("test", "../x"), "2:7: name: must match"),
    (JOB + "measure: {warmup: true}\n", "6:19: measure.warmup: must be a count or a mapping"),
    (JOB + "measure: {warmup: {min: 5, max: 2}}\n", "6:33: measure.warmup.max: must not be"),
    (JOB + "measure: {warmup: {min: 5}}\n", "6:11: measure.warmup.max: required, but"),
    (
        JOB + "measure: {iterations: {min: 5}}\n",
        "6:23: measure.iterations: must be an integer, given ",
    ),
    (
        JOB + "measure: {target_ci: 0.1}\n",
        "6:11: measure.target_ci: unknown key 'target_ci'; known: ",
    ),
    (
        JOB + "measure: {min_seconds: 1}\n",
        "6:11: measure.min_seconds: unknown key 'min_seconds'; did you mean 'seconds'?",
    ),
    (JOB + "measure: {warmup: {min: 1, max: 5, mx: 3}}\n", "6:36: measure.warmup.mx: unknown"),
    (JOB + "placement: {isolation: nodes}\n", "6:24: placement.isolation: must be 'cluster',"),
    (MLP + "matrix: {batch_size: {start: 8, max: 4}}\n", "4:38: matrix.batch_size.max: must"),
    (MLP + "matrix: {batch_size: {strat: 8}}\n", "4:23: matrix.batch_size.strat: unknown key"),
    (MLP + "matrix: {batch_size: [64, auto]}\n", "4:27: matrix.batch_size[1]: auto is for"),
    (MLP + "matrix: {global_batch_size: auto}\n", "4:29: matrix.global_batch_size[0]: auto is"),
    (MLP + "zip: [{batch_size: auto, hidden: 8}]\n", "4:20: zip[0].batch_size[0]: auto is for"),
    (JOB + "include: [{batch_size: auto}]\n", "6:24: include[0].batch_size: auto is for matrix"),
    (JOB + "exclude: [{batch_size: auto}]\n", "6:24: exclude[0].batch_size[0]: auto is for"),
    (SEARCH + "include: [{batch_size: 8}]\n", "5:1: include: does not go with"),
    (SEARCH + "exclude: [{batch_size: 64}]\n", "5:12: exclude[0].batch_size: does not go with"),
    (SEARCH + "baseline: {batch_size: 64}\n", "5:12: baseline.batch_size: does not go with"),
    (SEARCH + "env: {A: '{batch_size}'}\n", "5:10: env.A[0]: names {batch_size}, which does"),
    (
        JOB + "answer: {metric: througput}\n",
        "6:18: answer.metric: unknown metric 'througput'; did you mean 'throughput'?",
    ),
    (
        JOB + "answer: {metric: throughput, over: [hiden, world_size]}\n",
        "6:37: answer.over[0]: unknown setting 'hiden'; did you mean 'hidden'?",
    ),
    (JOB + "answer: {over: hidden}\n", "6:1: answer.metric: required, but not given"),
    (JOB + "items: 'a/b'\n", "6:8: items: must be a word in the plural, as in tokens, given 'a/b'"),
    (JOB + "question: 3\n", "6:11: question: must be a text, given 3"),
]


@pytest.mark.parametrize(("text", "expected"), MALFORMED)
def test_a_malformed_job_is_one_located_line(text, expected):
    (line,) = problems_of(text)
    assert line.startswith(f"job.yaml:{expected}")


def test_override_problem_names_the_override():
    assert places_of(JOB, "measure.repeats=0") == ["measure.repeats"]
    (line,) = problems_of(JOB, "matrix.world_sise=1")
    assert line.startswith("--set matrix.world_sise=1: matrix.world_sise: unknown axis")
    for key, place in (("batch_size", "matrix.batch_size"), ("rounds", "measure.rounds")):
        (line,) = problems_of(JOB, f"{key}=3")
        assert line == f"--set {key}=3: {key}: unknown key '{key}'; did you mean {place}?"


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (  # all that is wrong, in the order of the file
            "version: 2\nnam: x\nname: ../x\nworkload: {kind: mlp, hiden: 4}\n"
            "matrix:\n  world_sise: [1]\n  batch_size: [64, -1, a]\n"
            "exclude: [{}]\nmeasure: {warmup: 0, itertions: 5}\non_error: stopp\n",
            "version nam name workload.hiden matrix.world_sise matrix.batch_size[1] "
            "matrix.batch_size[2] exclude[0] measure.warmup measure.itertions on_error",
        ),
        (
            "version: 1\nname: x\nworkload: {kind: mlp, layers: [2]}\n"
            "matrix:\n  precision: [{a: 1}, bf16]\n  world_size: [2, 4]\n"
            "include: [{world_size: 8}]\nbaseline: {world_size: 1, precision: tf32}\n",
            "workload.layers matrix matrix.precision[0] include[0] include[0]",
        ),
        (
            MLP + "matrix: {batch_size: 1, precision: [fp32]}\nbaseline: {precision: tf33}\n",
            "baseline.precision",
        ),
        (  # an unknown workload
            "version: 1\nname: x\nworkload: {kind: yolo, anything: 1}\n"
            "matrix: {precision: [fp32, bfloat16], world_size: [1, 2], more: [1]}\n"
            "zip: [{batch_size: [1, 2], more: [1]}]\n"
            "baseline: {world_size: 3, most: 1}\nmeasure: {warmpu: 1}\n",
            "workload.kind matrix.precision[1] zip[0] zip[0].more measure.warmpu",
        ),
        (  # a typo in the name of the workload
            "version: 1\nname: x\nworkload: {kind: mpl, hiden: 1}\n"
            "matrix: {world_sise: [1, 2], batch_size: 4}\nbaseline: {precison: fp32}\n",
            "workload.kind workload.hiden matrix.world_sise baseline.precison",
        ),
        (  # an axis and a variable with a mistake are there all the same
            HEAD + "workload: {kind: script, path: setup.py, args: '{lr} {batch_size}'}\n"
            "matrix: {lr: [], batch_size: [[1]]}\nenv: {A: [true], B: [x, y]}\nbaseline: {A: x}\n"
            "include: [{A: y, B: '{', lr: 1, batch_size: 1}]\nplacement: {oversubscribe: 1}\n",
            "workload.path matrix.lr matrix.batch_size[0] env.A[0] include[0].B "
            "placement.oversubscribe",
        ),
        (  # what is wrong with a point
            MLP + "matrix: {world_size: [1, 3], global_batch_size: 8}\nmeasure: {warmpu: 1}\n",
            "matrix.global_batch_size[0] measure.warmpu",
        ),
        (
            MLP + "matrix: {batch_size: 1, world_sise: 2}\n"
            "measure: {warmup: {min: 5, max: 2}, iterations: {min: 3}}\n",
            "matrix.world_sise measure.warmup.max measure.iterations",
        ),
    ],
)
def test_all_problems_are_reported_at_once(text, places):
    assert places_of(text) == places.split()


def test_at_most_fifty_problems_are_listed():
    lines = problems_of(JOB + "".join(f"x{n}: 1\n" for n in range(3000)))
    assert len(lines) == 51
    assert lines[-1] == "job.yaml: and 2,950 more"


def test_pipe_is_refused_without_reading(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(JobError, match=r":1:1: a job is a regular file"):
            load_job(path)


def test_a_required_parameter_must_be_given(tmp_path, monkeypatch):
    (tmp_path / "required_workload.py").write_text(
        "class Mine:\n    def __init__(self, context, *, size: int): ...\n    def step(self): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = JOB.replace("mlp", '"required_workload:Mine"')
    assert problems_of(text) == ["job.yaml:3:1: workload.size: required, but not given"]
    assert load(text, "workload.size=3").settings["size"].is_required
    assert load(text, "matrix.size=3").matrix["size"] == (3,)


_WORDS = """version name workload kind mlp matrix zip exclude include baseline measure warmup
    world_size batch_size global_batch_size precision hidden fp32 placement strategy pack auto"""
_words = st.sampled_from(_WORDS.split())
_scalars = st.one_of(_words, st.integers(), st.floats(), st.booleans(), st.none(), st.text("a:,"))
_trees = st.recursive(
    _scalars,
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(_words, below)),
    max_leaves=12,
)
_sections = st.fixed_dictionaries(
    {"version": st.just(1), "name": st.just("x"), "workload": st.just({"kind": "mlp"})},
    optional=dict.fromkeys(("matrix", "zip", "exclude", "include", "baseline", "measure"), _trees),
)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    return f"[{', '.join(map(_flow, value))}]" if isinstance(value, list) else str(value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(_sections.map(_flow), _trees.map(_flow), st.text(max_size=40)))
@example(MLP + "matrix: {batch_size: [2], world_size: 3, <<: *a}")
def test_any_text_gives_job_or_located_problems(text):
    try:
        plan(text)
    except JobError as error:
        for line in str(error).split("\n"):
            assert re.match(r"job\.yaml:\d+:\d+: .+", line), line


SIZES = "version: 1\nname: sizes\nworkload: {kind: collective}\nbaseline: {}\n"


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("8:1GiB:x2", [8 * 2**power for power in range(28)]),
        ("1KiB:100KiB:x10", [1024, 10240, 102400]),
        ("4KiB", [4096]),
        ("4kB", [4000]),
        ("1.5MiB", [3 * 2**19]),
        ("8:8:x2", [8]),
        ("[4KiB, 8:64:x4, 100]", [4096, 8, 32, 100]),
        ("64", [64]),
    ],
)
def test_a_range_stands_for_its_sizes(given, sizes):
    job = load(SIZES + f"matrix: {{world_size: [2], size_bytes: {given}}}\n")
    assert list(job.axes["size_bytes"]) == sizes
    listed = load(SIZES + f"matrix: {{world_size: [2], size_bytes: {sizes}}}\n")
    assert job.meaning_sha256 == listed.meaning_sha256


def test_sizes_and_ranges_are_read_everywhere():
    text = SIZES + "matrix: {world_size: [2]}\n"
    zipped = text + "zip: [{size_bytes: 8:32:x2, cuda_graph: [true, true, false]}]\n"
    assert load(zipped).zip[0]["size_bytes"] == (8, 16, 32)
    assert load(text, "matrix.size_bytes=4KiB,8:16:x2").axes["size_bytes"] == (4096, 8, 16)
    text = SIZES + "matrix: {world_size: [2], size_bytes: 8:64:x2}\n"
    excluded = load(text + "exclude: [{size_bytes: 16:64:x2}]\n").exclude
    assert excluded[0]["size_bytes"] == (16, 32, 64)
    text += "include: [{world_size: 4, size_bytes: 1KiB}]\n"
    assert load(text).include[0]["size_bytes"] == 1024
    # A parameter takes one size.
    text = SIZES + "matrix: {world_size: [2]}\n"
    assert load(text, "workload.size_bytes=1MiB").workload.parameters["size_bytes"] == 2**20
    assert places_of(text, "workload.size_bytes=8:64:x2") == ["workload.size_bytes"]


@pytest.mark.parametrize(
    "given", ["8:1GiB", "16Gb", "0:64:x2", "0.3KiB", "8:64:x1", "64:8:x2", "many"]
)
def test_invalid_size_is_located(given):
    text = f"matrix:\n  world_size: [2]\n  size_bytes: [8, '{given}']\n"
    [line] = problems_of(SIZES + text)
    place = "job.yaml:7:19: matrix.size_bytes[1]"
    assert line.startswith(f"{place}: must be bytes, as in 4096 or 4KiB; ")
    assert line.endswith(f"as in 8:1GiB:x2, given '{given}'")


ASKED = (
    "question: Which width is fastest?\nanswer: {metric: throughput, over: [hidden, layers]}\n"
    "items: tokens\n"
)
TWO_WIDTHS = MLP + "matrix: {batch_size: 4, hidden: [8, 16], world_size: [1, 2]}\n"


def test_answer_compares_only_varying_settings():
    assert answer_of_run(TWO_WIDTHS + ASKED, [], ["world_size", "hidden"]) == Answer(
        metric="throughput", over=("hidden",), items="tokens", question="Which width is fastest?"
    )
    changed = answer_of_run(TWO_WIDTHS + ASKED, ["answer.metric=step_ms_p50"], ["hidden"])
    assert (changed.metric, changed.best) == ("step_ms_p50", "min")
    asked = TWO_WIDTHS + ASKED
    everything = answer_of_run(asked, ["answer={metric: epoch_s}"], ["hidden", "layers"])
    assert everything.over == ("hidden", "layers")


@pytest.mark.parametrize(
    ("workload", "varying", "metric", "over", "items"),
    [
        ("mlp", ["world_size", "hidden"], "speed_up", ("world_size",), "rows"),
        ("mlp", ["shares", "slow_ratio"], "throughput", ("shares", "slow_ratio"), "rows"),
        ("transformer", ["world_size", "tp"], "tokens_per_s_per_device", ("tp",), "sequences"),
        ("dit", ["ring", "world_size"], "step_ms_p50", ("ring",), "passes"),
        ("collective", ["size_bytes"], "busbw_gb_s", ("size_bytes",), "samples"),
        ("gone.module:Class", ["world_size"], "speed_up", ("world_size",), "samples"),
    ],
)
def test_answer_defaults_to_workload(workload, varying, metric, over, items):
    text = f"{HEAD}workload: {{kind: '{workload}'}}\n"
    answer = answer_of_run(text, [], varying)
    assert (answer.metric, answer.over, answer.items) == (metric, over, items)
    assert answer.question == ""


@pytest.mark.parametrize(
    "text", ["", "a: [", "answer: 3\nitems: 4\nworkload: 5\nquestion: [1]", "answer: {x: 1}"]
)
def test_unreadable_job_answers_with_speed_up(text):
    assert answer_of_run(text, ["x.y"], []) == Answer(metric="speed_up")


def test_old_run_answers_current_question():
    text = "version: 1\nname: memory_of_a_step\nworkload: {kind: transformer}\n"
    found = answer_of_run(text, (), ["precision"])
    assert found.metric == "peak_mem_allocated_bytes"
    assert found.question.startswith("How much memory does a training step need")
    other = answer_of_run(text.replace("transformer", "mlp"), (), ["precision"])
    assert (other.metric, other.question) == ("speed_up", "")


def test_answer_metrics_are_columns():
    # What `raybench.analysis.scaling` adds to the table `points`.
    derived = {"speed_up", "efficiency", "samples_per_joule"}
    assert set(ANSWER_METRICS) - derived <= {column.name for column in TABLES["points"]}


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_answers_name_existing_metrics(name):
    workload_class = load_class(name)
    known = {*ANSWER_METRICS, *(metric.name for metric in workload_class.metrics)}
    assert {answer.metric for answer in workload_class.answers} <= known
