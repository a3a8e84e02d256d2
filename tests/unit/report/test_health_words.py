"""The words of a health check, from kinds and numbers."""

import pytest

from raybench.records.conditions import Condition, FactValue
from raybench.records.judgement import (
    Command,
    CommandKind,
    PeerValue,
    Problem,
    ProblemKind,
    Reason,
    ReasonKind,
    ValueRange,
)
from raybench.records.status import Status
from raybench.report.words import health as words


def test_every_kind_has_words():
    values = {"value": 2, "limit": 3, "names": ("NCCL_ALGO",)}
    problems = [words.problem(Problem(kind=kind, **values)) for kind in ProblemKind]
    values |= {"facts": (FactValue(name="torch", value="2.11"),)}
    reasons = []
    for kind in ReasonKind:
        is_condition = kind is ReasonKind.CONDITION
        for condition in Condition if is_condition else [None]:
            reason = Reason(kind=kind, condition=condition, **values)
            reasons.append(words.reason(reason))
    commands = [words.command_words(Command(kind=kind, hosts=("alpha",))) for kind in CommandKind]
    texts = [*problems, *reasons, *commands]
    assert [text for text in texts if "{" in text] == []
    # This one quotes the driver, which says nothing here.
    assert texts.count("") == 1


FAILED = Problem(kind=ProblemKind.FAILED, status=Status.TIMEOUT, detail="no answer")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            Reason(kind=ReasonKind.PROBLEMS, problems=(FAILED,), value=1, limit=3),
            "timed out: no answer (in 1 of 3 passes)",
        ),
        (
            Reason(kind=ReasonKind.SLOWER_THAN_PEERS, value=1.6, blame="path"),
            "takes 1.60 times as long as those alike: the path between the two is to blame",
        ),
        (
            Reason(kind=ReasonKind.SLOWER_THAN_USUAL, value=250.0),
            "takes over 100 times as long as it should",
        ),
        (
            Reason(
                kind=ReasonKind.NOTHING_KNOWN,
                model="A",
                placement="pair on a node",
                value=990.0,
                unit="TFLOP/s",
            ),
            "nothing is known of what A, pair on a node, reaches; its datasheet says 990 TFLOP/s",
        ),
        (
            Reason(kind=ReasonKind.SLOW_WITH_PARTNERS, value=3, subject="node"),
            "slow with 3 partners that are fast with others: the node is to blame",
        ),
    ],
)
def test_a_reason_in_words(said, text):
    assert words.reason(said) == text


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (
            Problem(kind=ProblemKind.NO_ROOM, value=2**31, limit=2**30 + 3 * 10**9),
            "no room: 2.0 GiB of its memory are free, the test needs 3.8",
        ),
        (
            Problem(kind=ProblemKind.MEMORY_ERRORS, value=2, limit=3),
            "3 uncorrected memory errors, 2 of them during the check",
        ),
        (
            Problem(kind=ProblemKind.MEMORY_ERRORS, limit=1),
            "1 uncorrected memory error since the driver was loaded",
        ),
        (Problem(kind=ProblemKind.OLD_XIDS, numbers=(79, 79)), "Xid 79 in the kernel's log"),
    ],
)
def test_a_problem_in_words(problem, text):
    assert words.problem(problem) == text


def test_what_is_expected_names_peers_then_the_past():
    peers = PeerValue(value=750.0, count=8, fastest=3)
    past = ValueRange(low=700.0, high=700.0, source="own checks", checks=4)
    assert words.expected([peers, past], "TFLOP/s") == (
        "750 TFLOP/s, the median of the 3 fastest of 8 alike; "
        "700 TFLOP/s (its earlier checks, 4 of them)"
    )


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (
            Command(kind=CommandKind.SET_POWER_LIMIT, uuid="GPU-3", hosts=("alpha",), value=700.0),
            "nvidia-smi --power-limit=700 -i GPU-3  # on alpha",
        ),
        (
            Command(kind=CommandKind.DRAIN_SLURM, hosts=("two words",)),
            "scontrol update nodename='two words' state=drain reason='raybench health'",
        ),
        (
            Command(kind=CommandKind.SHOW_NETWORK, hosts=("alpha", "beta")),
            "ip -s link; tc qdisc show  # on alpha and on beta",
        ),
        (
            Command(kind=CommandKind.SHOW_HOST_LINK, uuid="GPU-3", hosts=("alpha",)),
            "nvidia-smi -q -i GPU-3  # on alpha, GPU Link Info",
        ),
    ],
)
def test_a_command_as_typed(command, text):
    assert words.command_words(command) == text


def test_certainty_counts_values_with_references():
    own = "devices are compared with each other in this run."
    assert words.basis(has_peers=False, references=0, wide=0) == ""
    assert words.basis(has_peers=True, references=0, wide=0) == f"Certainty: {own}"
    assert words.basis(has_peers=True, references=2, wide=0) == (
        f"Certainty: {own} 2 values have a reference."
    )
    assert words.basis(has_peers=False, references=2, wide=1) == (
        "Certainty: 2 values have a reference; 1 of them cannot be judged by the reference, "
        "because its normal range is wider than ±10 %."
    )
