"""`raybench explain`: words of the glossary, marks, headings and columns."""

import pytest


def explain(command, *words):
    return command("explain", *words, results=None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("busbw",), "Bus bandwidth as nccl-tests defines it"),
        (("comm_exposed_ms",), 'comm_exposed_ms ("exposed comm" in reports), in ms:'),
        (("straggler",), "straggler_ms"),
        (("idle",), "Python has not issued work"),
        (("w",), "more than ±10 % open"),
        (("marks",), "h: host-bound"),
        (("scaling", "efficiency"), "100 % is perfect scaling"),
        (("timeout",), "measure.timeout_s"),
        (("cluster",), "# "),
    ],
)
def test_a_word_a_heading_a_column_a_mark_and_a_page_are_explained(command, words, said):
    code, out, _ = explain(command, *words)
    assert code == 0
    assert said in " ".join(out.split())


def test_without_a_term_all_are_listed(command):
    code, out, _ = explain(command)
    assert code == 0
    assert {"busbw", "warm-up", "straggler", "cluster", "gate-in-ci"} <= set(
        out.replace(",", " ").split()
    )


def test_an_unknown_term_is_one_line_with_the_nearest(command):
    code, out, err = explain(command, "eficiency")
    assert (code, out) == (2, "")
    assert "did you mean 'efficiency'" in err
    assert err.count("\n") == 1
