"""What a run answers: as its job says, else its workload, else the speed-up."""

import pytest

from jobs import HEAD, MLP, load, problems_of
from raybench.job.model import ANSWER_METRICS, Answer, answer_of_run
from raybench.job.registry import BUILTIN
from raybench.job.registry import load as load_class
from raybench.results.tables import TABLES

ASKED = (
    "question: Which width is fastest?\nanswer: {metric: throughput, over: [hidden, layers]}\n"
    "items: tokens\n"
)
JOB = MLP + "matrix: {batch_size: 4, hidden: [8, 16], world_size: [1, 2]}\n"


def test_a_job_says_what_it_asks_and_only_settings_that_vary_are_compared():
    assert answer_of_run(JOB + ASKED, [], ["world_size", "hidden"]) == Answer(
        metric="throughput",
        over=("hidden",),
        items="tokens",
        question="Which width is fastest?",
    )
    changed = answer_of_run(JOB + ASKED, ["answer.metric=step_ms_p50"], ["hidden"])
    assert (changed.metric, changed.best) == ("step_ms_p50", "min")
    everything = answer_of_run(JOB + ASKED, ["answer={metric: epoch_s}"], ["hidden", "layers"])
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
def test_a_job_that_asks_nothing_answers_as_its_workload_declares(
    workload, varying, metric, over, items
):
    text = f"{HEAD}workload: {{kind: '{workload}'}}\n"
    answer = answer_of_run(text, [], varying)
    assert (answer.metric, answer.over, answer.items) == (metric, over, items)
    assert answer.question == ""


@pytest.mark.parametrize(
    "text", ["", "a: [", "answer: 3\nitems: 4\nworkload: 5\nquestion: [1]", "answer: {x: 1}"]
)
def test_a_stored_text_that_cannot_be_read_answers_with_the_speed_up(text):
    assert answer_of_run(text, ["x.y"], []) == Answer(metric="speed_up")


def test_what_is_asked_changes_neither_the_meaning_of_a_job_nor_its_points():
    assert load(JOB + ASKED).meaning_sha256 == load(JOB).meaning_sha256


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            "answer: {metric: througput}",
            "answer.metric: unknown metric 'througput'; did you mean 'throughput'?",
        ),
        (
            "answer: {metric: throughput, over: [hiden, world_size]}",
            "answer.over[0]: unknown setting 'hiden'; did you mean 'hidden'?",
        ),
        ("answer: {over: hidden}", "answer.metric: required, but not given"),
        ("items: 'to/kens'", "items: must be a word in the plural, as in tokens, given 'to/kens'"),
        ("question: 3", "question: must be a text, given 3"),
    ],
)
def test_an_answer_that_no_run_could_give_is_refused_with_its_place(asked, line):
    (found,) = problems_of(JOB + asked + "\n")
    assert found.startswith("job.yaml:5:")
    assert found.endswith(line)


def test_an_older_run_of_a_built_in_job_answers_what_the_job_asks_today():
    text = "version: 1\nname: memory_of_a_step\nworkload: {kind: transformer}\n"
    found = answer_of_run(text, (), ["precision"])
    assert found.metric == "peak_mem_allocated_bytes"
    assert found.question.startswith("What does the memory of a training step consist of")
    other = answer_of_run(text.replace("transformer", "mlp"), (), ["precision"])
    assert (other.metric, other.question) == ("speed_up", "")


def test_the_metrics_that_can_be_asked_for_are_columns():
    # What `raybench.analysis.scaling` adds to the table `points`.
    derived = {"speed_up", "efficiency", "samples_per_joule", "wall_unsynced_share"}
    assert set(ANSWER_METRICS) - derived <= {column.name for column in TABLES["points"]}


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_workloads_answer_with_metrics_that_they_have(name):
    workload_class = load_class(name)
    known = {*ANSWER_METRICS, *(metric.name for metric in workload_class.metrics)}
    assert {answer.metric for answer in workload_class.answers} <= known
