"""Scenarios of slow devices, set beside each other, and what each rank does in a step."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from builders import make_measurement, make_point, make_record, make_row, make_rows, scaling_rows

from raybench.analysis.answer import best_shares
from raybench.analysis.rounds import MOST_RANKS, ranks_of_step, ranks_to_show
from raybench.analysis.scaling import probe_speeds, scaling
from raybench.analysis.uneven import fleets, gain_over
from raybench.job.point import Precision
from raybench.records.measurement import Breakdown, RankShare
from raybench.report.sections import SECTIONS
from raybench.report.words import shares
from raybench.report.words.shares import fleet_name, verdict

BASELINE = {"shares": "equal"}
# Of samples about their median and mean, which it leaves where they are.
_HALF = 0.01 * np.random.default_rng(4).standard_normal(50)
_NOISE = np.random.default_rng(5).permutation([*_HALF, *-_HALF])


def ran(shares, items, own_ms, ratio=0.5, exchange_ms=1.0, **settings):
    """A step of ranks with these samples, the last of which is slowed."""
    point = make_point(
        world_size=len(items), batch_size=64, shares=shares, slow_ratio=ratio, **settings
    )
    step_ms = max(own_ms) + exchange_ms
    last = len(items) - 1
    return make_record(
        point,
        measurements=tuple(
            make_measurement(
                rank,
                [[round(step_ms * 1e6 * (1 + e)) for e in _NOISE]] if count else [[1000] * 100],
                items_per_step=count,
                breakdown=Breakdown(local_ms=((own,) * 3, (own,) * 3)),
                share=RankShare(
                    items=count,
                    fixed_ms=1.0,
                    items_per_s=64_000.0 * (ratio if rank == last else 1),
                    slow_ratio=ratio - 0.01 if rank == last else None,
                    exchange_ms=exchange_ms,
                    predicted_step_ms=step_ms * 1.02,
                    crossover_batch=40.0,
                    gradient_error=2e-8,
                ),
            )
            for rank, (count, own) in enumerate(zip(items, own_ms, strict=True))
        ),
    )


def fleet(ratio=0.5, **settings):
    """Two fast devices and one slow: a fast one does 64 samples in 10 ms."""
    slow_items = round(192 * ratio / (2 + ratio))
    rest = 192 - slow_items
    by_speed = (rest - rest // 2, rest // 2, slow_items)
    return [
        ran("equal", (64, 64, 64), (10.0, 10.0, 10.0 / ratio), ratio, **settings),
        ran("fast", (96, 96, 0), (15.0, 15.0, 0.0), ratio, **settings),
        ran("by_speed", by_speed, (30.0 / (2 + ratio),) * 3, ratio, **settings),
    ]


def in_rounds(records, sd=0.001):
    """The fleets of three rounds of these points, which scatter between rounds."""
    noise = sd * np.random.default_rng(1).standard_normal((3, len(records)))
    rows = [
        replace(
            row,
            round=number,
            attempt=number,
            step_ms_p50=row.step_ms_p50 * (1 + error),
            throughput=row.throughput / (1 + error),
        )
        for number, errors in enumerate(noise, 1)
        for row, error in zip(make_rows(records), errors, strict=True)
    ]
    return fleets(scaling(rows, BASELINE))


@pytest.fixture
def one():
    (found,) = fleets(scaling_rows(fleet(), BASELINE))
    return found


def test_fleet_holds_points_that_differ_only_in_shares(one):
    assert list(one.scenarios) == ["equal", "fast", "by_speed"]
    assert one.slow_count == 1
    assert one.probe_ratio == pytest.approx(0.49)
    both = fleets(scaling_rows([*fleet(), *fleet(0.8)], BASELINE))
    assert [len(each.scenarios) for each in both] == [3, 3]
    assert fleets(scaling_rows([ran("equal", (64, 64), (10, 20))], BASELINE)) == []


def test_fast_ranks_wait_only_for_ranks_with_work(one):
    fast = one.scenarios["fast"]
    assert fast.row.step_ms_p50 == pytest.approx(16.0)
    assert fast.throughput == pytest.approx(192 / 0.016)
    assert [rank.wait_ms for rank in fast.ranks] == [0.0, 0.0, None]
    equal = one.scenarios["equal"]
    assert [rank.wait_ms for rank in equal.ranks] == [10.0, 10.0, 0.0]
    assert equal.idle_share_of_fast == pytest.approx(10 / 21)
    assert one.scenarios["by_speed"].idle_share_of_fast == 0


def test_verdict_names_best_shares_with_their_gains(one):
    assert one.best.shares == "by_speed"
    assert gain_over(one.best, one.scenarios["equal"]).gain == pytest.approx(21 / 13 - 1)
    assert fleet_name(one, "GPUs") == "1 of 3 GPUs slowed to 49 % speed"
    words = verdict(one)
    assert words == (
        "by_speed was the fastest in this run. It is 61.5 % faster than equal shares. It is 23.1 % "
        "faster than the fast devices alone. Below a global batch of 40, using only the fast "
        "devices should be faster."
    )
    both = fleets(scaling_rows([*fleet(), *fleet(precision=Precision.BF16)], BASELINE))
    names = {fleet_name(each, "GPUs", both).removeprefix(fleet_name(one, "GPUs")) for each in both}
    assert names == {", fp32", ", bf16"}
    data = SimpleNamespace(fleets=both, ranks="GPUs", rows=[])
    asked = SimpleNamespace(items="samples")
    _, table = SECTIONS[0].blocks(SimpleNamespace(data=data, asked=asked))
    assert [cells[0] for cells in table.rows] == ["fp32", "", "", "bf16", "", ""]


def lead_of_fleets(fleets_of_run, ranks):
    return " ".join(shares.best_shares_words(best_shares(fleets_of_run), fleets_of_run, ranks))


def test_lead_names_best_shares_if_intervals_decide():
    near = [
        ran("equal", (64, 64), (10.0, 10.02), 0.89),
        ran("by_speed", (65, 63), (10.01, 10.01), 0.89),
    ]
    found = in_rounds(near)
    said = "It is undecided which division of the work is the fastest. With 1 of 2 GPUs slowed to "
    assert lead_of_fleets(found, "GPUs").startswith(said)
    assert lead_of_fleets(in_rounds([*near, *fleet()]), "GPUs").endswith(
        " The fastest division is undecided in 1 of 2 combinations of slow_ratio and world_size."
    )
    both = in_rounds([*fleet(0.9), *fleet(0.5)])
    best = "shares=by_speed is the fastest for all 2 values of slow_ratio. With 1 of 3 GPUs slowed "
    best += "to 49 % speed, it is up to 23.1 % (±"
    assert lead_of_fleets(both, "GPUs").startswith(best)
    assert verdict(both[0]).startswith("by_speed is best. It is ")


def test_one_start_names_no_best_shares():
    both = fleets(scaling_rows([*fleet(0.9), *fleet(0.5)], BASELINE))
    lead = lead_of_fleets(both, "GPUs")
    assert lead.startswith(
        "shares=by_speed was the fastest for all 2 values of slow_ratio in this run. With "
    )
    assert ", it is up to 23.1 % faster than the second fastest." in lead
    assert "±" not in lead
    alone = lead_of_fleets(both[:1], "GPUs")
    assert alone.startswith("shares=by_speed was the fastest in this run. With ")


def test_ideal_speed_up_uses_probed_device_speeds():
    two, three = ran("equal", (64, 64), (10, 10), 1.0), ran("equal", (64, 64, 64), (10, 10, 20))
    _, row = scaling_rows([two, three], {"world_size": 2, "slow_ratio": 1.0})
    assert row.speed_up == pytest.approx((192 / 21) / (128 / 11), rel=1e-3)
    # 64 samples take 1 ms and 1 more, or on the slow device 2 more.
    ideal = (2 / 2 + 1 / 3) / (2 / 2)
    assert row.efficiency == pytest.approx(row.speed_up / ideal)


def test_unequal_devices_are_found_by_their_probes():
    by_probe = []
    for record in fleet(0.5):
        ranks = [replace(m, share=replace(m.share, slow_ratio=None)) for m in record.measurements]
        point = replace(record.point, slow_ratio=1.0)
        by_probe.append(replace(record, point=point, measurements=tuple(ranks)))
    (found,) = fleets(scaling_rows(by_probe, BASELINE))
    assert found.slow_count == 1
    # 64 samples take 1 ms and 1 more, or 2 more.
    assert found.probe_ratio == pytest.approx(2 / 3)
    assert fleet_name(found, "GPUs") == "1 of 3 GPUs at 67 % speed"
    tiny = replace(make_rows(by_probe)[0], global_batch_size=1)
    assert probe_speeds(tiny) == pytest.approx([984.6, 984.6, 969.7], rel=1e-3)
    for column in ("share_by_rank", "slow_ratio_by_rank", "step_ms_mean", "speed_by_rank"):
        rows = [replace(row, **{column: None}) for row in make_rows(by_probe)]
        assert list(map(verdict, fleets(scaling(rows, {"world_size": 3}))))


def row(**changes):
    """A step of 25 ms: rank 0 computes 9.5 ms, rank 1 19; 5 ms are exchanged."""
    known = {"step_ms_p50": 25.0, "local_step_ms_by_rank": [10, 20], "device_ms_by_rank": [9.5, 19]}
    return make_row(**known | changes)


def test_only_the_fast_rank_waits():
    fast, slow = ranks_of_step(row(comm_exposed_ms=4.0))
    assert (fast.computes_ms, fast.idle_ms, fast.waits_ms) == (9.5, 0.5, 10)
    assert (slow.computes_ms, slow.idle_ms, slow.waits_ms) == (19, 1, 0)
    assert {(one.exposed_ms, one.unexplained_ms) for one in (fast, slow)} == {(4, 1)}


@pytest.mark.parametrize("device", [[9.5, 19.0], [11.0, 19.0], None])
def test_parts_of_each_rank_add_up_to_step(device):
    for one in ranks_of_step(row(device_ms_by_rank=device)):
        assert one.local_step_ms + one.waits_ms + one.unexplained_ms == pytest.approx(25)


def test_ranks_without_share_are_omitted_without_renumbering():
    found = ranks_of_step(row(share_by_rank=[64, 0, 64]))
    assert [one.rank for one in found] == [0, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"local_step_ms_by_rank": None},
        {"local_step_ms_by_rank": [10.0], "device_ms_by_rank": [9.0]},
        {"compute_ms": 90.0, "optimizer_ms": 9.0},
    ],
    ids=["not taken apart", "one rank", "parts that exceed the step"],
)
def test_indistinguishable_ranks_are_not_reported(changes):
    assert ranks_of_step(row(**changes)) == ()


def test_only_first_fastest_and_slowest_ranks_are_shown():
    own = [10.0, *[11.0] * 20, 9.0, 20.0]
    ranks = ranks_of_step(row(local_step_ms_by_rank=own, device_ms_by_rank=None))
    assert [one.rank for one in ranks_to_show(ranks)] == [0, 21, 22]
    assert len(ranks_to_show(ranks[:MOST_RANKS])) == MOST_RANKS
