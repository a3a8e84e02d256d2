"""What a YAML text says, and where it says it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.job.yaml_tree import MAX_DEPTH, parse_tree


def test_every_key_and_value_has_its_line_and_column() -> None:
    tree = parse_tree("a: 1\nb:\n  - x\n  - {c: 2}\n")
    assert tree.data == {"a": 1, "b": ["x", {"c": 2}]}
    assert tree.problems == []
    assert tree.key_positions[("b",)] == (2, 1)
    assert tree.value_positions[("a",)] == (1, 4)
    assert tree.value_positions[("b", 0)] == (3, 5)
    assert tree.key_positions[("b", 1, "c")] == (4, 6)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("no", "no"),
        ("on", "on"),
        ("014", 14),
        ("0o14", 12),
        ("0x1f", 31),
        ("12:30:00", "12:30:00"),
        ("2026-01-02", "2026-01-02"),
        ("true", True),
        ("'64'", "64"),
        ("124m", "124m"),
        ("-1.5", -1.5),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    tree = parse_tree(f"key: {text}")
    assert tree.problems == []
    assert tree.data["key"] == value
    assert type(tree.data["key"]) is type(value)


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("a: 1\na: 2\n", (2, 1), "duplicate key, first given on line 1"),
        ("a: &x 1\n", (1, 4), "anchors"),
        ("a: &x 1\nb: *x\n", (2, 4), "aliases"),
        ("a: {<<: {b: 1}}\n", (1, 5), "merge keys"),
        ("a: !!int 3\n", (1, 4), "tags are not supported"),
        ("a: !thing {}\n", (1, 4), "tags are not supported"),
        ("a:\nb: 1\n", (1, 1), "no value given"),
        ("a: ~\n", (1, 1), "no value given"),
        ("a: .nan\n", (1, 4), "must be finite, given '.nan'"),
        ("a: -.inf\n", (1, 4), "must be finite, given '-.inf'"),
        ("a: 1e999\n", (1, 4), "must be finite, given '1e999'"),
        ("a: 9223372036854775808\n", (1, 4), "must fit into 64 bits"),
        ("a: " + "9" * 5000 + "\n", (1, 4), "not an integer that can be read"),
        ('a: "\\ud800"\n', (1, 4), "not a Unicode text"),
    ],
)
def test_what_a_job_may_not_say_is_a_problem_with_its_place(
    text: str, position: tuple[int, int], message: str
) -> None:
    tree = parse_tree(text)
    assert tree.is_complete
    found = [problem for problem in tree.problems if problem.position == position]
    assert any(message in problem.message for problem in found), tree.problems


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("a:\n\tb: 1\n", (2, 1), "a tab cannot indent; use spaces"),
        ("a: [1, 2", (1, 9), "expected ',' or ']'"),
        ("a: {b: 1\nc: 2\n", (2, 2), "expected ',' or '}'; does the mapping from line 1 end?"),
        ("a: b: c", (1, 5), "a ':' cannot stand here"),
        ("a:\n  b: 1\n c: 2\n", (3, 2), "the line does not go on with what is above it"),
        ("a: }", (1, 4), "a value is expected here"),
        ("a:\n- 1\n-2\n", (4, 1), "a key without its ':'"),
        ("a: \x00", (1, 4), "the character '\\x00' is not allowed"),
        ("a: 1\n---\nb: 2\n", (2, 1), "one document only"),
        ("%YAML 1.1\n---\na: no\n", (2, 1), "YAML 1.2"),
        ("? [a]\n: 1\n", (1, 3), "a key must be a plain word"),
        ("? *x\n: 1\n", (1, 3), "a key must be a plain word"),
        ("[" * 10_000, (1, MAX_DEPTH + 1), "levels deep"),
        ("- " * 10_000, (1, 2 * MAX_DEPTH + 1), "levels deep"),
        ('a: "\\Uffffffff"', (1, 1), "not YAML"),
    ],
)
def test_where_reading_must_end_there_is_one_problem(
    text: str, position: tuple[int, int], message: str
) -> None:
    tree = parse_tree(text)
    assert not tree.is_complete
    assert tree.problems[-1].position == position
    assert message in tree.problems[-1].message


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab \n:-[]{},'\""), max_size=30))
def test_no_message_names_a_token_of_the_parser(text: str) -> None:
    assert not any("<" in problem.message for problem in parse_tree(text).problems)


def test_a_billion_laughs_are_refused_before_they_are_expanded() -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    tree = parse_tree("\n".join(lines))
    assert tree.data["a59"] == [None, None]
    assert len(tree.problems) == 60 + 2 * 59


@settings(max_examples=300, deadline=None)
@given(
    st.text(
        alphabet=st.sampled_from("ab01 \n\t:-[]{},&*!?|>'\"%#~.\\ux<=@`\x00é\ufeff"), max_size=60
    )
)
def test_no_text_makes_it_raise(text: str) -> None:
    tree = parse_tree(text)
    assert tree.is_complete or tree.problems
