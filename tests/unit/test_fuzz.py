"""The fuzzer of the command line: some of its cases, and that it finds what is wrong."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks.fuzz import run_case
from benchmarks.fuzz_cases import Case, make_case

KINDS = ("jobs", "filters", "options", "parts")


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_input_ends_in_one_of_the_exit_codes_of_a_mistake(
    kind: str, tmp_path: Path
) -> None:
    with contextlib.chdir(tmp_path):
        outcomes = [run_case(make_case(7, n, (kind,)), n, tmp_path) for n in range(25)]
    assert [(each.number, each.args, each.wrong) for each in outcomes if each.wrong] == []
    assert {outcome.code for outcome in outcomes} <= {0, 1, 2}


def test_a_case_follows_from_its_seed_and_number() -> None:
    for number in range(50):
        one, same = (make_case(3, number, KINDS) for _ in range(2))
        assert (one.args, one.files) == (same.args, same.files)
    assert len({make_case(3, number, KINDS).args for number in range(50)}) > 20


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (RuntimeError("boom"), "traceback"),
        (MemoryError(), "traceback"),
        (SystemExit(9), ""),
    ],
)
def test_a_bug_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, wrong: str
) -> None:
    def failing(*_: object, **__: object) -> str:
        raise fault

    monkeypatch.setattr(json, "dumps", failing)
    with contextlib.chdir(tmp_path):
        outcome = run_case(Case(kind="options", args=("schema",)), 0, tmp_path)
    assert outcome.wrong == wrong
