"""Speed-ups of a machine that becomes slower while it measures."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from itertools import product

import numpy as np
import pytest
from builders import START, make_point, make_steady, write_run

from raybench.job.plan import Plan
from raybench.sweep.rounds import Rounds

TRUTH = {1: 1.0, 2: 2.0, 4: 4.0}
POINTS = tuple(
    make_point(world_size=size, batch_size=batch) for size, batch in product(TRUTH, (8, 16, 32))
)
TRIAL_S, BLOCK_S = 5.0, 20.0


def swept(rounds, drift, noise=0.0, heat_s=0.0):
    """The records of a sweep whose steps become longer by `drift` in each block.

    The first attempt heats its devices for `heat_s`.
    """
    order = Rounds(plan=Plan(points=POINTS, baseline={"world_size": 1}), count=rounds)
    attempts = [one for number in range(1, rounds + 1) for one in order.attempts(number, {})]
    rng = np.random.default_rng(rounds)
    for place, one in enumerate(attempts):
        size, batch = one.point.world_size, one.point.batch_size
        # Timed after the set-up, which the builder lets take longer with more ranks.
        middle_s = heat_s + place * TRIAL_S + (TRIAL_S + size - 0.5) / 2
        step_ms = 10.0 * np.exp(drift * middle_s / BLOCK_S + noise * rng.standard_normal())
        heated_s = 0.0 if place else heat_s
        record = make_steady(size, step_ms, batch_size=batch)
        yield replace(
            record,
            measurements=tuple(replace(m, heated_s=heated_s) for m in record.measurements),
            attempt=place + 1,
            round=one.round,
            control_of=one.control_of,
            started_at=START + timedelta(seconds=place * TRIAL_S + heat_s - heated_s),
            duration_s=TRIAL_S + heated_s,
        )


def speed_ups(command):
    points = json.loads(command("report", "run-a", "--json").out)["points"]
    return [one["speed_up"] / TRUTH[one["world_size"]] for one in points]


@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_drift_does_not_move_speed_ups(command, tmp_path, rounds):
    write_run(tmp_path, "run-a", swept(rounds, drift=0.01))
    assert speed_ups(command) == pytest.approx([1.0] * len(POINTS), rel=5e-4)


def test_heating_does_not_move_corrected_speed_ups(command, tmp_path):
    write_run(tmp_path, "run-a", swept(2, drift=0.01, heat_s=60.0))
    assert speed_ups(command) == pytest.approx([1.0] * len(POINTS), rel=5e-4)


def test_drift_is_told_with_its_correction(command, tmp_path):
    write_run(tmp_path, "run-a", swept(2, drift=0.01))
    text = " ".join(command("report", "run-a", "--full").out.split())
    assert re.search(
        r"the machine became [\d.]+ % slower while the points of round \d with \d GPUs ran", text
    )
    assert "Speed-ups between numbers of GPUs are corrected. Step times are not corrected." in text


def test_correction_adds_little_noise(command, tmp_path):
    records = list(swept(3, drift=0.0, noise=0.01))
    scatter = {}
    for name, kept in (("with", records), ("without", [o for o in records if not o.control_of])):
        write_run(tmp_path / name, "run-a", kept)
        found = json.loads(command("report", "run-a", "--json", results=tmp_path / name).out)
        ratios = [one["speed_up"] / TRUTH[one["world_size"]] for one in found["points"]]
        scatter[name] = np.std(np.log(ratios[3:]))
    assert scatter["with"] < 1.2 * scatter["without"]
