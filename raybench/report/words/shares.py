"""Uneven shares of work in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raybench.analysis.answer import BestShares
from raybench.analysis.rows import ScaledRow, varying
from raybench.analysis.uneven import Gain, UnevenFleet, gain_over
from raybench.job.point import BY_ACCUMULATION, BY_SPEED, EQUAL, FAST
from raybench.report import formatting
from raybench.report.formatting import cases_words, interval_words, share_words
from raybench.report.point_settings import settings_words
from raybench.results.point_row import step_of_parts
from raybench.stats.shares import fast_devices

# A smaller gain in throughput is not worth a change.
_LEAST_GAIN = 0.02


def best_shares_words(
    best: BestShares, fleets: Sequence[UnevenFleet], ranks_noun: str
) -> list[str]:
    """Return sentences on the best shares, their largest gain, and the undecided fleets."""
    fleet_count, name = len(fleets), fleet_name(best.fleet, ranks_noun, fleets)
    # Settings in which the fleets differ.
    settings = varying([fleet.first for fleet in fleets], left_out=("shares",))
    gain = _faster_or_slower(best.gain)
    # No fleet has a winner.
    if best.shares is None:
        in_cases = ""
        if fleet_count > 1:
            in_cases = f" {cases_words(fleet_count, fleet_count, settings)}"
        return [
            f"It is undecided which division of the work is the fastest{in_cases}.",
            f"With {name}, {best.fleet.best.shares} is {gain} than the second best division.",
        ]
    where = f" {cases_words(best.wins, fleet_count, settings)}" if fleet_count > 1 else ""
    verb = "is" if best.is_sure else "was"
    in_run = "" if best.is_sure else " in this run"
    up_to = "up to " if best.wins > 1 else ""
    sentences = [
        f"shares={best.shares} {verb} the fastest{where}{in_run}.",
        f"With {name}, it is {up_to}{gain} than the second fastest.",
    ]
    if best.undecided:
        where = cases_words(best.undecided, fleet_count, settings)
        sentences.append(f"The fastest division is undecided {where}.")
    return sentences


_MEANINGS = {
    EQUAL: "every device gets the same part of the batch",
    FAST: "only the fast devices get work",
    BY_SPEED: "parts follow the speed of the devices",
    BY_ACCUMULATION: "the number of micro-batches follows the speed",
}


def meaning(shares: Iterable[str]) -> str:
    """Return the meaning of the column of shares, `division of the work: equal = …`."""
    present = set(shares)
    meanings = [f"{name} = {text}" for name, text in _MEANINGS.items() if name in present]
    return f"division of the work: {'; '.join(meanings)}"


def fleet_name(fleet: UnevenFleet, ranks_noun: str, fleets: Sequence[UnevenFleet] = ()) -> str:
    """Return the slow devices and distinguishing settings: `1 of 2 GPUs at 48 % speed, bf16`.

    Args:
        fleet: points that differ in `shares` alone. Without probes the speed is shown as 100 %.
        ranks_noun: `GPUs` or `workers`.
        fleets: all fleets of the run.
    """
    settings = settings_words(fleet.first, distinguishing_settings_of(fleet, fleets), ranks_noun)
    return ", ".join(filter(None, (_slow_devices_words(fleet, ranks_noun), settings)))


def _slow_devices_words(fleet: UnevenFleet, ranks_noun: str) -> str:
    """Return `1 of 2 GPUs at 48 % speed` or `2 GPUs, none slow`."""
    devices = formatting.ranks_words(fleet.first.world_size, ranks_noun)
    if not fleet.slow_count:
        return f"{devices}, none slow"
    # The job has set the speed of slow devices to this share of their full speed.
    is_emulated = fleet.first.slow_ratio < 1
    how = "slowed to" if is_emulated else "at"
    return f"{fleet.slow_count} of {devices} {how} {share_words(fleet.probe_ratio)} speed"


def distinguishing_settings_of(fleet: UnevenFleet, fleets: Sequence[UnevenFleet]) -> list[str]:
    """Return the settings that distinguish a fleet from fleets with the same slow devices."""
    # The words tell whether the slow devices are the same; the noun makes no difference.
    words = _slow_devices_words(fleet, ranks_noun="")
    alike = [other for other in fleets if _slow_devices_words(other, ranks_noun="") == words]
    # Shares differ within each fleet, so they do not distinguish fleets.
    return varying([other.first for other in alike], left_out=("shares",))


def verdict(fleet: UnevenFleet) -> str:
    """Return sentences on the best shares: gains, rivals, prediction, and the crossover batch."""
    best = fleet.best
    is_best = "is best." if fleet.is_sure else "was the fastest in this run."
    sentences = [f"{best.shares} {is_best}"]
    for name, words in ((EQUAL, "equal shares"), (FAST, "the fast devices alone")):
        if name in fleet.scenarios and name != best.shares:
            gain = gain_over(best, fleet.scenarios[name])
            sentences.append(f"It is {_faster_or_slower(gain)} than {words}.")
    if rivals := fleet.tied_shares():
        sentences.append(f"{' and '.join(rivals)} may be as good.")
    # Predicted step in ms -> shares; the first of equal predictions counts.
    predictions: dict[float, str] = {}
    for scenario in fleet.scenarios.values():
        if scenario.row.predicted_step_ms is not None:
            predictions.setdefault(scenario.row.predicted_step_ms, scenario.shares)
    if predictions:
        predicted_best = predictions[min(predictions)]
        if predicted_best not in (best.shares, *rivals):
            sentences.append(f"{predicted_best} was predicted to be the fastest.")
    batch = fleet.crossover_batch
    if batch is not None and best.shares not in (EQUAL, FAST):
        if batch >= 1:
            sentences.append(
                f"Below a global batch of {batch:,.0f}, using only the fast devices should be "
                "faster."
            )
        else:
            sentences.append("Using only the fast devices should be slower with any batch.")
    return " ".join(sentences)


def _faster_or_slower(gain: Gain) -> str:
    """Return a difference of samples/s as `12.3 % (±1.0 %) faster`."""
    half = "" if gain.half_width is None else f" ({interval_words(gain.half_width)})"
    word = "faster" if gain.gain >= 0 else "slower"
    return f"{share_words(abs(gain.gain), digits=1)}{half} {word}"


def gain_cell(gain: Gain) -> str:
    """Return `+12.3% ±1.0%` for a cell; `+12.3%` without an interval."""
    half = "" if gain.half_width is None else f" {formatting.half_width(gain.half_width)}"
    return f"{gain.gain:+.1%}{half}"


def estimated_gains(speeds: Sequence[float], exchange: float) -> str:
    """Return a clause on the gain in throughput of shares by speed, and of the fast devices alone.

    The gains are upper bounds, because steps are assumed to have no fixed costs. The clause is
    empty if no gain reaches 2 %.

    Args:
        speeds: speed of each device, above 0, in any unit.
        exchange: time to exchange gradients, divided by the step of the slowest device alone.
    """
    are_fast = fast_devices(speeds)
    fast_speeds = [speed for speed, is_fast in zip(speeds, are_fast, strict=True) if is_fast]
    # With equal shares, all devices work at the speed of the slowest device.
    speed_of_equal = len(speeds) * min(speeds)
    # Shares -> time of the computation, divided by the time with equal shares.
    compute_ratios = {
        BY_SPEED: speed_of_equal / sum(speeds),
        FAST: speed_of_equal / (len(fast_speeds) * min(fast_speeds)),
    }
    gains = {}
    for name, compute_ratio in compute_ratios.items():
        gains[name] = (1 + exchange) / (compute_ratio + exchange) - 1
    if max(gains.values()) < _LEAST_GAIN:
        return ""
    phrases = " and ".join(f"shares={name} {gain:+.1%}" for name, gain in gains.items())
    return (
        f"at most, {phrases} samples/s are gained compared with equal shares (an estimate; "
        "jobs/uneven_gpus.yaml measures it)"
    )


def slow_rank(row: ScaledRow, ranks_noun: str) -> str:
    """Return a sentence on the slow rank and the gain by other shares; "" for a gain below 2 %.

    Args:
        row: a point with equal shares and a slow rank.
        ranks_noun: `GPUs` or `workers`.
    """
    local_ms = row.local_step_ms_by_rank or ()
    slowest_ms = max(local_ms)
    exchange_ms = max(0.0, (step_of_parts(row) or 0.0) - slowest_ms)
    gains = estimated_gains([1 / ms for ms in local_ms], exchange_ms / slowest_ms)
    if not gains:
        return ""
    of_ranks = formatting.ranks_words(row.world_size, ranks_noun)
    return f"Rank {local_ms.index(slowest_ms)} of {of_ranks} is slow; {gains}"
