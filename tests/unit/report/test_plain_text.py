"""No text from results or files can move a terminal's cursor, or break a line."""

from __future__ import annotations

import pytest

from raybench.report.formatting import plain, plain_lines, printable, shorten

BAD = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("\x1b[31mred\x1b[0m", f"{BAD}[31mred{BAD}[0m"),
        ("left\N{RIGHT-TO-LEFT OVERRIDE}right", f"left{BAD}right"),
        ("größer µs", "größer µs"),
    ],
)
def test_characters_that_control_a_terminal_are_replaced(text, shown):
    assert printable(text) == shown


def test_a_value_is_one_line_whatever_breaks_it():
    assert plain("one\n  two\r\n\tthree\N{LINE SEPARATOR}four") == "one two three four"
    assert plain(1.5) == "1.5"


def test_lines_keep_what_they_are_indented_by():
    assert plain_lines("def f():\n\treturn  1\x07\n") == ["def f():", f"        return 1{BAD}"]


def test_a_text_that_is_too_long_ends_in_an_ellipsis():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"
