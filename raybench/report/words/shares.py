"""Uneven shares of work in words."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.analysis.answer import BestShares
from raybench.analysis.rows import known_settings, varying
from raybench.analysis.uneven import Fleet, Gain, gain_over
from raybench.job.point import EQUAL, FAST
from raybench.report import formatting


def best_shares(found: BestShares, fleets: Sequence[Fleet], ranks: str) -> list[str]:
    """Return which shares are the best, and by how much, as sentences."""
    name = fleet_name(found.fleet, ranks, fleets)
    if found.shares is None:
        cases = f" in any of {len(fleets)} cases" if len(fleets) > 1 else ""
        return [f"No division of the work is clearly the best{cases}."]
    often = f" in {found.wins} of {len(fleets)} cases" if len(fleets) > 1 else ""
    verb = "is" if found.is_sure else "was"
    of_run = "" if found.is_sure else " of this run"
    gained = formatting.share_words(found.gain.gain, digits=1)
    if found.gain.half_width is not None:
        gained += f" ({formatting.interval_words(found.gain.half_width)})"
    most = "at most " if found.wins > 1 else ""
    sentences = [
        f"{found.shares} {verb} the fastest division of the work{often}{of_run}.",
        f"It is {most}{gained} faster than the next, with {name}.",
    ]
    if found.undecided:
        are = "case is" if found.undecided == 1 else "cases are"
        sentences.append(f"{found.undecided} {are} undecided.")
    return sentences


def fleet_name(fleet: Fleet, ranks: str, fleets: Sequence[Fleet] = ()) -> str:
    """Return `1 of 2 GPUs at 0.48 of the speed`, as devices were probed, or `2 GPUs, none slow`.

    The settings follow that tell it from others in `fleets` (which include it) for which this is
    the same. Emulated devices that were not probed are at 1.00. ranks: `GPUs` or `workers`.
    """
    more = formatting.words_of_settings(known_settings(fleet.first, apart(fleet, fleets)), ranks)
    return ", ".join(filter(None, (_slow_devices(fleet, ranks), more)))


def _slow_devices(fleet: Fleet, ranks: str) -> str:
    all_, count = formatting.ranks_words(fleet.first.world_size, ranks), fleet.slow_count
    slow = f"{count} of {all_} at {fleet.probe_ratio:.2f} of the speed"
    return slow if count else f"{all_}, none slow"


def apart(fleet: Fleet, fleets: Sequence[Fleet]) -> list[str]:
    """Return the settings that tell a fleet from those whose devices are said to be the same."""
    alike = [one for one in fleets if _slow_devices(one, "") == _slow_devices(fleet, "")]
    return varying([one.first for one in alike], ("shares",))


def verdict(fleet: Fleet) -> str:
    """Return the best shares, their gains over equal and fast, and others that may be as good.

    Then, where known, the shares predicted to be best, if neither best nor as good; and, unless
    equal or fast is best, the global batch below which fast should be faster, or that none is.
    """
    best = fleet.best
    gains = [
        f"{gain(gain_over(best, fleet.scenarios[name]))} over {name}"
        for name in (EQUAL, FAST)
        if name in fleet.scenarios and name != best.shares
    ]
    name = best.shares if fleet.is_sure else f"{best.shares} was the fastest in this run"
    text = f"{name}: {', '.join(gains)}" if gains else name
    if rivals := fleet.as_good():
        text += f"; {' and '.join(rivals)} may be as good"
    known = [one for one in fleet.scenarios.values() if one.row.predicted_step_ms is not None]
    called = min(known, key=lambda one: one.row.predicted_step_ms or 0.0, default=None)
    if called and called is not best and called.shares not in rivals:
        text += f"; {called.shares} was predicted to be"
    batch = fleet.crossover_batch
    if batch is not None and best.shares not in (EQUAL, FAST):
        below = f"below a global batch of {batch:,.0f} fast should be faster"
        text += f"; {below if batch >= 1 else 'fast should be slower at any batch'}"
    return text


def gain(found: Gain) -> str:
    """Write `+12.3% ±1.0%`; `+12.3%` without an interval."""
    half = "" if found.half_width is None else f" {formatting.half_width(found.half_width)}"
    return f"{found.gain:+.1%}{half}"
