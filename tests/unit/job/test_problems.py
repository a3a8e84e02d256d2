"""How a problem is said."""

from __future__ import annotations

from raybench.job.problems import key_text, quote, say_unknown


def test_paths_and_values_are_short_and_on_one_line():
    assert key_text(("matrix", "batch_size", 1)) == "matrix.batch_size[1]"
    assert key_text(("zip", 0, "hidden")) == "zip[0].hidden"
    assert key_text(("a b\nc",)) == "'a b\\nc'"
    assert quote("a\nb") == "'a\\nb'"
    assert len(quote("x" * 1000)) == 60
    assert [quote(value) for value in (True, [1, 2], {})] == ["true", "a list", "an empty mapping"]


def test_an_unknown_name_gets_the_nearest_known_one_or_all():
    known = ["world_size", "precision"]
    assert say_unknown("axis", "world_sise", known) == (
        "unknown axis 'world_sise'; did you mean 'world_size'?"
    )
    assert say_unknown("axis", "zzz", known) == "unknown axis 'zzz'; known: world_size, precision"
