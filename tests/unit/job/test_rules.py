"""Rules that depend on the workload, and texts in which a name in braces is a setting."""

from __future__ import annotations

import pytest

from jobs import HEAD, load, problems_of
from raybench.job.rules import names_in, product_of, render, split_arguments

COLLECTIVE = HEAD + "workload: {kind: collective}\n"


@pytest.mark.parametrize(
    ("rest", "place"),
    [
        ("matrix: {batch_size: [1], world_size: 2}\n", "4:10: matrix.batch_size"),
        ("matrix: {world_size: 2}\nzip: [{batch_size: [1]}]\n", "5:8: zip[0].batch_size"),
        ("matrix: {world_size: 2}\nexclude: [{batch_size: 1}]\n", "5:12: exclude[0].batch_size"),
        ("include: [{world_size: 2, batch_size: 1}]\n", "4:27: include[0].batch_size"),
        ("matrix: {world_size: 2}\nbaseline: {batch_size: 1}\n", "5:12: baseline.batch_size"),
    ],
)
def test_a_workload_without_batches_is_given_no_batch_size(rest, place):
    refused = "workload collective takes no batch size; leave batch_size out"
    assert problems_of(COLLECTIVE + rest) == [f"job.yaml:{place}: {refused}"]
    (line,) = problems_of(COLLECTIVE + rest.replace("batch_size", "global_batch_size"))
    assert line.endswith("takes no batch size; leave global_batch_size out")
    inside = HEAD + "workload: {kind: collective, batch_size: 4}\nmatrix: {world_size: 2}\n"
    assert problems_of(inside) == [f"job.yaml:3:30: workload.batch_size: {refused}"]


def test_include_lacks_no_batch_size_where_there_is_none():
    text = "matrix: {world_size: [2], size_bytes: 8}\ninclude: [{world_size: 4, size_bytes: 16}]\n"
    assert load(COLLECTIVE + text).include == ({"world_size": 4, "size_bytes": 16},)
    (line,) = problems_of(COLLECTIVE + text.replace(", size_bytes: 16", ""))
    assert "include[0]: must give every axis of the job, lacks size_bytes" in line


def test_names_are_those_in_braces_and_doubled_braces_are_none():
    assert names_in("--batch {batch_size} --json '{{\"a\": {a}}}' {a}") == ["batch_size", "a"]
    assert names_in("") == []


@pytest.mark.parametrize("text", ["{", "}", "{}", "{0}", "{a.b}", "{a[0]}", "{a:3}", "{a!r}"])
def test_other_braces_are_refused_with_what_to_write(text):
    with pytest.raises(ValueError, match=r"write \{\{ and \}\} for braces themselves"):
        names_in(text)


def test_values_are_written_as_on_a_command_line():
    settings = {"a": 1e-3, "b": True, "c": "x y", "unused": 0}
    assert render("{a} {b} {c} {{}}", settings) == "0.001 true x y {}"
    assert split_arguments(render("--c '{c}' {c}", settings)) == ["--c", "x y", "x", "y"]


def test_items_are_a_product_of_whole_numbers():
    assert [product_of(text) for text in ("", "64", "8 * 4*2")] == [None, 64, 64]
    for wrong in ("8.5", "8 *", "-1", "8 + 1"):
        with pytest.raises(ValueError, match="must be a whole number"):
            product_of(wrong)
