"""Runs whose step times are known, written as Parquet, and the real commands over them."""

import json
import zlib
from datetime import timedelta
from typing import Any

import numpy as np
from builders import START, make_device, make_measurement, make_point, make_record, write_run

DEVICES = (make_device(0), make_device(1))


def write(root, run_id, records, devices=DEVICES, **changes):
    """Write a run of these records, in one part of each table."""
    stored = write_run(root, run_id, devices=devices, **changes)
    if records:
        stored.write_records(list(enumerate(records)))


def make_points(count):
    """Points of one device with a batch size each."""
    return [make_point(world_size=1, batch_size=2**place) for place in range(count)]


def sweep(
    root,
    run_id,
    factor=1.0,
    *,
    rounds=1,
    start_sd=0.002,
    run_shift=0.0,
    points=None,
    stall=1.0,
    day=0,
    **changes,
):
    """Write a run of steps of 8 ms x factor.

    start_sd: standard deviation of the level of a point in a round. run_shift: of the whole run,
    all points and rounds alike; both of the logarithm. stall: each 16th step takes so many times
    as long. day: when it ran.
    """
    rng = np.random.default_rng(zlib.crc32(run_id.encode()))
    records = []
    for number in range(1, rounds + 1):
        for point in make_points(3) if points is None else points:
            level = 8e6 * factor * np.exp(start_sd * rng.standard_normal() + run_shift)
            steps = level * (1 + 1e-3 * rng.standard_normal(48))
            steps[::16] *= stall
            measured = (make_measurement(0, [steps], items_per_step=point.batch_size),)
            record = make_record(
                point,
                measurements=measured,
                attempt=number,
                round=None if rounds == 1 else number,
                started_at=START + timedelta(days=day, minutes=number),
                devices=(make_device(0),),
            )
            records.append(record)
    write(root, run_id, records, started_at=START + timedelta(days=day), **changes)


def sweep_sides(root, factor, *, runs=3, seed="", new=None, **settings):
    """Write runs with the tags side=base and side=new in turns; `new` is `factor` times as slow.

    settings: of `sweep`, of all runs; new: those that the side `new` has other than the others.
    """
    shifts = settings.pop("run_sd", 0.0) * np.random.default_rng(7).standard_normal(2 * runs)
    for number in range(2 * runs):
        side = ("base", "new")[number % 2]
        sweep(
            root,
            f"{side}{number // 2}{seed}",
            factor if side == "new" else 1.0,
            day=number,
            run_shift=float(shifts[number]),
            tags={"side": side},
            **settings | (new or {} if side == "new" else {}),
        )


def sweep_both(root, *factors, base=1.0, new=1.0):
    """Write a run of either side for each factor, by which both are slower; base, new: too."""
    for number, factor in enumerate(factors):
        for side, speed in (("base", base), ("new", new)):
            sweep(root, f"{side}{number}", factor * speed, day=number, tags={"side": side})


def compare_as_json(command, *words, **options):
    """Return what `raybench compare WORDS --json` prints. options: of `command`."""
    code, out, err = command("compare", *words, "--json", **options)
    assert (code, err) == (0, "")
    content: dict[str, Any] = json.loads(out)
    return content
