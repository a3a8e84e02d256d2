"""What `import raybench` offers, with the examples in its docstrings."""

import doctest
from importlib import import_module

import pytest
from commands import REPOSITORY

import raybench

MODULES = (
    "raybench",
    "raybench.analysis.frames",
    "raybench.job.answer",
    "raybench.records.metrics",
)


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
