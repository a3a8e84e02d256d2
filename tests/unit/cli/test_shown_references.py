"""How the commands show where figures stand against their references."""

import json

import pytest
from commands import EXAMPLES

CHECK = "health-20261122-222544-c2db"
SWEEP = "ddp_scaling-20261122-142621-6209"


OWN = "This run is part of the reference, so the comparison is not independent."
OF_CHECK = "Caveat: the reference values include this run and may hide a common slowdown."


def flat(text):
    return " ".join(text.split())


def shown(command, *words):
    code, out, err = command(*words, results=EXAMPLES)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("kind", ["terminal", "md", "html"])
@pytest.mark.parametrize("run", [CHECK, SWEEP])
def test_a_run_that_made_the_reference_says_so(command, run, kind):
    text = flat(shown(command, "report", run, "--full", "--format", kind))
    assert (OF_CHECK if run == CHECK else OWN) in text


def test_a_point_that_made_the_reference_says_so(command):
    points = json.loads(shown(command, "report", SWEEP, "--format", "json"))["references"]
    assert points
    assert all(point["is_made_from_this_run"] for point in points)
    shown_point = flat(shown(command, "show", SWEEP, points[0]["point_id"]))
    assert OWN in shown_point


def test_wide_ranges_are_not_counted(command):
    grades = json.loads(shown(command, "report", CHECK, "--format", "json"))["grades"]
    standings = grades["vm GPU 0"]["standings"]
    counted = [one for one in standings if one["is_counted"]]
    assert 0 < len(counted) < len(standings)
    for one in standings:
        entry = one["reference"]
        half_width = (entry["high"] - entry["low"]) / 2 / entry["value"]
        assert one["is_counted"] == (half_width <= 0.1)
    count, wide = len(counted), len(standings) - len(counted)
    assert grades["vm GPU 0"]["text"] == (
        f"{count} values (TFLOP/s, GB/s) were compared with references: all are in the normal "
        f"range. {wide} other values cannot be judged: the normal range is wider than ±10 %."
    )


def test_exported_references_count_devices_and_hosts(command):
    text = shown(command, "export", CHECK, "--format", "reference")
    of_pairs = text.partition("send 256 MiB")[2]
    assert "devices: 2" in of_pairs
    assert "hosts: 1" in of_pairs
