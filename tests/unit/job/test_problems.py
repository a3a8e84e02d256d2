"""How a problem is said."""

from __future__ import annotations

import pytest

from raybench.job.problems import key_text, quote, say_unknown


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("matrix", "batch_size", 1), "matrix.batch_size[1]"),
        (("zip", 0, "hidden"), "zip[0].hidden"),
        (("a b\nc",), "'a b\\nc'"),
    ],
)
def test_a_path_is_dotted_and_on_one_line(path: tuple[str | int, ...], text: str) -> None:
    assert key_text(path) == text


def test_a_quoted_value_is_short_and_on_one_line() -> None:
    assert quote("a\nb") == "'a\\nb'"
    assert len(quote("x" * 1000)) == 60
    assert quote(True) == "true"
    assert quote([1, 2]) == "a list"
    assert quote({}) == "an empty mapping"


def test_an_unknown_name_gets_the_nearest_known_one_or_all() -> None:
    assert say_unknown("axis", "world_sise", ["world_size", "precision"]) == (
        "unknown axis 'world_sise'; did you mean 'world_size'?"
    )
    assert say_unknown("axis", "zzz", ["world_size", "precision"]) == (
        "unknown axis 'zzz'; known: world_size, precision"
    )
