"""`raybench report` over rounds of one run: intervals of rates, and who is named the best."""

import json
import re

import numpy as np
import pytest
from builders import make_device, make_measurement, make_point, make_record
from compared import write
from scipy.stats import t as student

ASKED = "answer: {metric: throughput, over: [hidden]}\nworkload: {kind: mlp}\n"


def write_rounds(root, *steps_ms, job_text=ASKED):
    """Write a run. steps_ms: for each point the step times of each of its rounds."""
    records = [
        make_record(
            make_point(params={"hidden": 64 * 2**place}),
            # 100 W.
            measurements=(
                make_measurement(0, [np.multiply(steps, 1e6)], energy_j=float(np.sum(steps)) / 10),
            ),
            attempt=number,
            round=number if len(rounds) > 1 else None,
            devices=(make_device(0),),
        )
        for place, rounds in enumerate(steps_ms)
        for number, steps in enumerate(rounds, 1)
    ]
    write(root, "run", records, [make_device(0)], job_text=job_text)


def report(command):
    code, out, _ = command("report", "run", "--json")
    assert code == 0
    return json.loads(out)


def stalled(count, step_ms=10.0):
    """Return 200 steps of which some take six times as long."""
    return [6 * step_ms] * count + [step_ms] * (200 - count)


def test_rates_have_intervals_of_their_own_rounds(tmp_path, command):
    counts = ((0, 3, 6), (1, 1, 7))
    write_rounds(tmp_path, *([stalled(count) for count in of_point] for of_point in counts))
    found = report(command)
    [case] = found["answer"]["cases"]
    lasting = 200 / (200 + 5 * np.array(counts))
    points = {point["point_id"]: point for point in found["points"]}
    for one in case["ranked"]:
        assert one["low"] < 6400 * lasting.min(axis=1).mean()
        assert one["high"] > 6400 * lasting.max(axis=1).mean() > one["value"]
        point = points[one["point_id"]]
        assert (one["low"], one["high"]) == (point["throughput_low"], point["throughput_high"])
        # The medians are all the same.
        assert point["step_ms_high"] / point["step_ms_low"] < 1.0001
    assert "There is no clear winner: hidden=" in found["lead"]


def test_show_prints_the_interval_of_the_rate(tmp_path, command):
    write_rounds(tmp_path, [stalled(count) for count in (0, 3, 6)])
    [point] = report(command)["points"]
    ends = f"{point['throughput_low']:,.0f} to {point['throughput_high']:,.0f}"
    told = f"was {point['throughput']:,.0f} samples/s; the 95 % interval is {ends}."
    assert told in command("show", "run", point["point_id"]).out


def test_a_rate_that_is_clearly_higher_is_named(tmp_path, command):
    write_rounds(tmp_path, [[10.0] * 9, [10.1] * 9], [[5.0] * 9, [5.05] * 9])
    lead = report(command)["lead"]
    assert re.match(r"The throughput reaches [\d,]+ rows/s with", lead)
    assert re.search(
        r"Each value of rows/s is known to ±[\d.]+ % or better \(95 % interval over", lead
    )
    assert "hidden=128 is the fastest. hidden=128 is 2.00 times as fast as hidden=64." in lead


def test_samples_per_joule_have_an_interval_over_rounds(tmp_path, command):
    asked = ASKED.replace("throughput", "samples_per_joule")
    write_rounds(tmp_path, [[10.0] * 9, [10.1] * 9], [[5.0] * 9, [5.05] * 9], job_text=asked)
    found = report(command)
    assert found["lead"].startswith("The highest value is 127.4 samples per joule with")
    assert "Each value of samples per joule is known to ±" in found["lead"]
    assert (
        "hidden=128 has the highest samples per joule. The value of hidden=128 is 100 % "
        in found["lead"]
    )
    best = found["answer"]["cases"][0]["ranked"][0]
    assert best["value"] == pytest.approx(128.0, rel=0.02)
    assert best["low"] < best["value"] < best["high"]


def test_one_start_names_no_best(tmp_path, command):
    write_rounds(tmp_path, [[10.0] * 9], [[9.0] * 9])
    lead = report(command)["lead"]
    assert lead.startswith("The throughput reaches 7,111 rows/s with hidden=128.")
    assert "hidden=128 was the fastest in this run. hidden=128 is 1.11 times as fast as" in lead
    assert "Not known, because one round gives no 95 % interval over the rounds." in lead


def test_equal_rates_of_one_start_have_no_fastest(tmp_path, command):
    write_rounds(tmp_path, [[10.0] * 9], [[10.0] * 9])
    told = "There is no clear winner: hidden=64 has the best value, but hidden=128 may be equal."
    assert told in report(command)["lead"]


def test_one_round_is_no_clear_loser(tmp_path, command):
    write_rounds(tmp_path, [[10.0] * 9, [10.1] * 9], [[11.0] * 9])
    told = "There is no clear winner: hidden=64 has the best value, but hidden=128 may be equal."
    assert told in report(command)["lead"]


def test_a_noisy_point_has_its_own_interval(tmp_path, command):
    noise = np.array([[0, 10, 40], [1, 2, 0], [0, 1, 3], [2, 0, 1], [0, 0, 2]]) / 1000
    steps_ms = 10 * np.exp(noise)[:, :, np.newaxis].repeat(9, axis=2)
    write_rounds(tmp_path, *steps_ms.tolist())
    noisy = report(command)["points"][0]
    half = student.ppf(0.975, 2) * noise[0].std(ddof=1) / 3**0.5
    assert np.log(noisy["step_ms_high"] / noisy["step_ms_p50"]) == pytest.approx(half, rel=1e-4)
