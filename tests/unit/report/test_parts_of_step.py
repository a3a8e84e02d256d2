"""Parts of the step: the step beside them, and one exposed communication in all places."""

import json
import re
from dataclasses import replace

import pytest
from builders import make_apart, make_point, make_record, make_steady, write_run

import raybench
from raybench.records.doubts import NotMeasured
from raybench.records.measurement import Breakdown

TWO = make_point(world_size=2)
# A step of 10 ms of which 7.8 ms are the ranks' own; the collectives take 1.5 ms.
COMM = {"comm_ms": (1.5,) * 4, "hooked_ms": (10.0,) * 4, "tail_ms": (1.5,) * 4}


def apart(own_ms, step_ms, **breakdown):
    return make_apart(own_ms, step_ms, optimizer_ms=1.0, **breakdown)


def in_rounds(root):
    """Round 1 is taken apart; the steps of rounds 2 and 3 take 20 % longer."""
    records = [apart([7.8], 7.8), apart([7.8, 7.8], 10.0, **COMM)]
    later = [make_record(make_point(), step_ms=9.36), make_record(TWO, step_ms=12.0)]
    rounds = [
        replace(record, round=number, attempt=number)
        for number, of_round in ((1, records), (2, later), (3, later))
        for record in of_round
    ]
    write_run(root, "run-a", rounds)


def words(text):
    return " ".join(text.split())


def line_of(text, title, start):
    """The cells of the first line that begins so, below the title of its table."""
    lines = text[text.index(title) :].splitlines()
    return next(line.split() for line in lines if re.match(start, line))


def test_parts_stand_beside_step_of_their_round(command, tmp_path):
    in_rounds(tmp_path)
    text = command("report", "run-a", "--full").out
    cells = line_of(text, "where the step of round 1 goes", " *2 ")
    assert cells == ["2", "10.00", "6.80", "1.00", "0", "1.50", "0.700", "0"]
    assert "only the first round measures the parts" in words(text)


def test_show_says_whose_parts_they_are(command, tmp_path):
    in_rounds(tmp_path)
    text = words(command("show", "run-a", TWO.point_id).out)
    assert "Each number below covers all rounds. The parts of the step are an exception" in text
    assert "round 1, whose step took 10.00 ms (parts_step_ms)" in text
    assert "unexplained_ms 0.7000 ms" in text


def test_page_draws_shares_of_step_of_their_round(command, tmp_path):
    in_rounds(tmp_path)
    page = tmp_path / "page.html"
    assert command("report", "run-a", "--format", "html", "-o", page).code == 0
    text = words(page.read_text())
    assert "shares of the step time of round 1" in text
    assert "exposed communication: 1.500 ms, 15.0% of the step" in text


def test_parts_in_tables_have_their_step(tmp_path):
    in_rounds(tmp_path)
    points = raybench.load(tmp_path, "points").query("world_size == 2").set_index("round")
    assert points["parts_step_ms"].isna().tolist() == [False, True, True]
    of_first = points.loc[1]
    parts = ("compute_ms", "optimizer_ms", "host_gap_ms", "comm_exposed_ms", "unexplained_ms")
    assert sum(of_first[name] for name in parts) == pytest.approx(of_first["parts_step_ms"])


def alone_and_two(root, two):
    write_run(root, "run-a", [apart([7.8], 7.8), two])


def test_exposed_communication_is_one_quantity(command, tmp_path):
    # The step takes 2.2 ms more than the ranks' own, and the collectives 1.5 ms.
    alone_and_two(tmp_path, apart([7.8, 7.8], 10.0, **COMM))
    text = command("report", "run-a", "--full").out
    told = "68 % of the lost time is communication that computation does not hide."
    assert told in words(text)
    assert "exposed communication 15.0 %." in words(text)
    assert "other time 7.0 %." in words(text)
    titles = line_of(text, "where the step goes", "GPUs")
    assert titles[-5:] == ["exposed", "comm", "unexplained", "slow", "rank"]
    assert line_of(text, "where the step goes", " *2 ")[-3:] == ["1.50", "0.700", "0"]
    page = tmp_path / "page.html"
    command("report", "run-a", "--format", "html", "-o", page)
    assert "exposed communication: 1.500 ms, 15.0% of the step" in words(page.read_text())
    [point] = [
        one
        for one in json.loads(command("report", "run-a", "--json").out)["points"]
        if one["world_size"] == 2
    ]
    assert point["comm_exposed_ms"] / point["step_ms_p50"] == pytest.approx(point["lost_comm"])


def test_unknown_exposed_communication_has_one_reason(command, tmp_path):
    reason = "no collective of torch.distributed ran in a step"
    two = make_steady(2, 10.0)
    unknown = dict.fromkeys(("compute_ms", "comm_exposed_ms"), NotMeasured.NO_COLLECTIVES)
    ranks = [replace(one, breakdown=Breakdown(not_measured=unknown)) for one in two.measurements]
    alone_and_two(tmp_path, replace(two, measurements=tuple(ranks)))
    text = words(command("report", "run-a", "--full").out)
    assert f"The reason why scaling is not ideal is unknown: {reason}." in text
    assert f"1 of 1 point The causes are unknown, because {reason}" in text
    page = tmp_path / "page.html"
    command("report", "run-a", "--format", "html", "-o", page)
    assert f"The causes are unknown, because {reason}" in words(page.read_text())


def test_contradicted_baseline_is_named_as_reason(command, tmp_path):
    # The baseline's instrumented steps were 30 % slower than the timed ones.
    write_run(tmp_path, "run-a", [apart([10.4], 8.0), apart([7.8, 7.8], 10.0, **COMM)])
    text = words(command("report", "run-a", "--full").out)
    reason = "at the baseline point, the parts add up to more than the step"
    assert f"The reason why scaling is not ideal is unknown: {reason}." in text
    # Beside the answer, and in the list of losses.
    assert text.count(reason) == 2
    assert "was not measured" not in text
    reasons = raybench.load(tmp_path, "scaling")["why_no_losses"]
    assert reasons.dropna().tolist() == [NotMeasured.PARTS_EXCEED]
    assert reasons.dtype == "string"


def test_each_reason_for_unknown_loss_is_counted(command, tmp_path):
    def pair(batch_size, own_ms, base_own_ms):
        one, two = (make_point(world_size=n, batch_size=batch_size) for n in (1, 2))
        yield apart([base_own_ms], 8.0, point=one)
        yield apart([own_ms, own_ms], 10.0, point=two, **COMM)

    contradicted = [*pair(16, 7.8, 10.4), *pair(32, 7.8, 10.4), *pair(64, 13.0, 8.0)]
    write_run(tmp_path, "run-a", [*contradicted, *pair(128, 7.8, 8.0)])
    own = "the parts add up to more than the step"
    of_base = f"at the baseline point, {own}"
    text = words(command("report", "run-a").out)
    assert "does not hide. The cause is unknown at 3 points." in text
    write_run(tmp_path, "run-b", contradicted)
    text = words(command("report", "run-b", "--full").out)
    assert "The reason why scaling is not ideal is unknown." in text
    assert f"2 of 3 points The causes are unknown, because {of_base}." in text
    assert f"1 of 3 points The causes are unknown, because {own}." in text


def test_narrow_table_keeps_parts_that_add_up(command, tmp_path, monkeypatch):
    write_run(tmp_path, "run-a", [apart([7.8], 7.8), apart([7.8, 7.8], 10.0, idle_ms=2.0, **COMM)])
    monkeypatch.setenv("COLUMNS", "75")
    titles = line_of(command("report", "run-a", "--full").out, "where the step goes", "GPUs")
    assert titles[-5:] == ["host", "gap", "exposed", "comm", "unexplained"]


def test_tables_name_exposed_communication_alike():
    names = [name for table in ("points", "summary") for name in raybench.units(table)]
    assert names.count("comm_exposed_ms") == 2
    assert "exposed_comm_ms" not in names


def test_unmeasured_losses_are_not_listed_as_unexplained(command, tmp_path):
    write_run(tmp_path, "run-a", [make_steady(1, 8.0), make_steady(2, 8.4)])
    text = words(command("report", "run-a", "--full").out)
    assert "The reason why scaling is not ideal was not measured." in text
    assert "% unexplained" not in text
