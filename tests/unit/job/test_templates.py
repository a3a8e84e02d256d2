"""Texts of a job in which a name in braces stands for a setting."""

from __future__ import annotations

import pytest

from raybench.job.rules import names_in, product_of, render, split_arguments


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
