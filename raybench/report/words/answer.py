"""What a run answers, in words: one function for each kind of answer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from raybench.analysis.answer import (
    BestShares,
    Gains,
    LargestBatch,
    LargestBatches,
    MainLoss,
    MoreRounds,
    Next,
    NextCommand,
    RunAnswer,
    SpeedUps,
    Uncompared,
    reasons_of_unknown_losses,
)
from raybench.analysis.doubts import busy_group
from raybench.analysis.ranking import (
    Candidate,
    RankedCase,
    Ranking,
    RankingVerdict,
    Values,
    follows_step_time,
    is_speed,
    rounds_to_decide,
    share_of_datasheet,
)
from raybench.analysis.rows import ScaledRow, distinguishing_settings, is_column
from raybench.records.doubts import NotMeasured
from raybench.records.metrics import Metric
from raybench.report import formatting
from raybench.report.documents import WIDTH
from raybench.report.formatting import cases_words, counted, share_words, span
from raybench.report.point_settings import settings_words, short_name
from raybench.report.words import shares
from raybench.report.words.causes import LOST_TO
from raybench.report.words.reasons import losses_unknown_words, not_compared_words
from raybench.results.metrics import WIDEST_INTERVAL

_NOUNS = {
    "step_ms_p50": "step time",
    "step_ms_p99": "99th percentile of the step time",
    "batch_size": "batch",
    "peak_mem_allocated_bytes": "memory",
    "energy_j": "energy",
    "busbw_gb_s": "bus bandwidth",
    "memory_gb_s": "memory bandwidth",
    "wall_unsynced_share": "what time.time() shows without synchronizing, in % of the step time",
}
# Metrics of resources that a point uses up: less is better.
_NEEDED = ("peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "energy_j")
# Sentences name at most so many cases.
_MOST_NAMED = 4
# Precedes the first sentence about lost time.
_LOST_TIME_MEANING = "Lost time is the part of a step beyond ideal scaling."
_OPTION = re.compile(r"--?[a-z]")
# Format of a metric -> unit of its values; other metrics name their unit.
_UNITS = {"gib": "GiB", "share": "", "percent": "", "ratio": "x"}


def point_and_round(rows: Iterable[ScaledRow]) -> str:
    """Return what a point and a round are; `rows` is empty for a comparison of runs."""
    new_processes = [row.new_processes for row in rows]
    if not new_processes:
        processes = ", in new processes"
    elif all(new_processes):
        processes = ", each in new processes"
    else:
        processes = ". Each round starts new processes. All points of a round use them"
    return f"Point: one combination of settings. Round: all points once{processes}."


def question_of_run(answer: RunAnswer) -> str:
    """Return the question of the job; if there is none or it does not fit, a made-up question.

    A question on scaling does not fit if the numbers of devices are not those of the job.
    """
    data = answer.data
    is_misfit = data.has_other_world_sizes and isinstance(answer.leading, SpeedUps)
    if answer.asked.question and not is_misfit:
        return answer.asked.question
    workloads = dict.fromkeys(row.workload for row in data.rows)
    names = ["the script" if workload == "script" else workload for workload in workloads]
    what = ", ".join(names) or "the workload"
    match answer.leading:
        case LargestBatches():
            return f"What is the largest batch of {what} that fits?"
        case SpeedUps() as leading:
            devices = formatting.ranks_words(leading.world_size, data.ranks)
            others = [name for name in data.settings if name != "world_size"]
            # More than two settings would make the question too long.
            by_others = ""
            if 0 < len(others) <= 2:
                by_others = f", by {' and '.join(map(formatting.heading, others))}"
            fewest = _baseline_devices(leading, data.ranks)
            return f"How does {what} scale from {fewest} to {devices}{by_others}?"
        case Gains() as leading:
            return f"How much faster is {what} than with {_baseline_words(leading, data.ranks)}?"
        case BestShares():
            return f"How should {what} divide its work between fast and slow devices?"
        case Ranking() as leading:
            compared = ", ".join(map(formatting.heading, answer.compared_settings))
            noun = metric_noun(leading.metric, answer.asked.items)
            best = "highest" if leading.highest_is_best else "lowest"
            return f"Which {compared} of {what} has the {best} {noun}?"
    return f"How long does a step of {what} take?"


def lead(answer: RunAnswer) -> str:
    """Return the answer in sentences, without its certainty; "" if nothing was measured."""
    return " ".join(filter(None, (headline(answer), *findings(answer))))


def headline(answer: RunAnswer) -> str:
    """Return the values of the answer in one sentence; "" if the run has no rows."""
    ranks_noun = answer.data.ranks
    if answer.data.rows and not answer.data.ok_rows:
        return "No point ended ok."
    match answer.leading:
        case LargestBatches() as leading:
            first = leading.batches[0]
            settings = batch_settings(first, leading, ranks_noun)
            at = f" with {settings}" if settings else ""
            return f"The largest batch per device that fits is {first.batch_size:,}{at}."
        case SpeedUps() as leading:
            return _scaling_sentence(leading, answer)
        case Gains() as leading:
            return _gain_sentence(leading, ranks_noun)
        case Ranking() | Values() as leading:
            return _values_sentence(leading, answer)
    # `findings` has the whole answer on shares of work.
    return ""


def findings(answer: RunAnswer) -> list[str]:
    """Return sentences on what follows from the values: winners, ties and causes."""
    sentences: list[str] = []
    # A busy machine hides the cause of lost time.
    is_busy = busy_group(answer.data.doubts, len(answer.data.ok_rows)) is not None
    match answer.leading:
        case BestShares() as leading:
            sentences += shares.best_shares_words(leading, answer.data.fleets, answer.data.ranks)
        case SpeedUps() as leading:
            if leading.has_several_models and leading.efficiencies:
                efficiencies = share_words(*leading.efficiencies)
                sentences.append(f"That is {efficiencies} of what the devices reach alone.")
            if leading.main_loss and not is_busy:
                devices = formatting.ranks_words(leading.world_size, answer.data.ranks)
                sentences += main_loss(leading.main_loss, devices)
        case Gains() as leading:
            sentences += _undecided_gains(leading, answer.data.ranks)
        case Ranking() as leading:
            sentences += _winner(leading, answer)
            _, best = leading.figures[0]
            sentences.append(datasheet_sentence(leading.metric, best.row))
            sentences.append(_memory_sentence(leading, answer))
        case Values() as leading:
            sentences += _findings_of_values(leading, answer)
    if answer.uncompared:
        sentences.append(_uncompared_sentence(answer.uncompared))
    if (count := answer.impossible) and not is_busy:
        have = "has" if count == 1 else "have"
        sentences.append(f"{counted(count, 'point')} {have} numbers that cannot be true.")
    return [sentence for sentence in sentences if sentence]


def certainty(answer: RunAnswer, half_widths: Sequence[tuple[float | None, ScaledRow]]) -> str:
    """Return a sentence on the certainty of the values; "" if nothing was measured.

    Args:
        answer: the answer of the run.
        half_widths: half of the 95 % interval of each value over the rounds, and its point.
    """
    rows = answer.data.ok_rows
    if isinstance(answer.leading, LargestBatches):
        # `ran_out` is the smallest batch that ran out of memory. A search for large batches ends
        # when both differ by at most 1 %.
        is_exact = all(batch.ran_out == batch.batch_size + 1 for batch in answer.leading.batches)
        more = "1" if is_exact else "1 %"
        return f"A batch larger by {more} runs out of memory."
    if not rows:
        return ""
    if answer.is_of_memory:
        return _certainty_of_memory(answer)
    known = [(half_width, row) for half_width, row in half_widths if half_width is not None]
    if known and len(known) == len(half_widths):
        return _widest_interval(answer, known)
    single_round_count = sum(row.rounds == 1 for row in rows)
    if single_round_count == len(rows):
        return "Not known, because one round gives no 95 % interval over the rounds."
    if single_round_count:
        have = "has" if single_round_count == 1 else "have"
        which = f"{single_round_count} of {counted(len(rows), 'point')}"
        return f"{which} {have} one round, and so no 95 % interval."
    return "The 95 % intervals over the rounds are unknown."


def _certainty_of_memory(answer: RunAnswer) -> str:
    """Return how much the memory of a point differs over the rounds."""
    differences = []  # of each point, as a share of its least memory
    for row in answer.data.ok_rows:
        attempt_of_round = answer.data.trials.rounds(row)
        peaks = [attempt.peak_mem_allocated_bytes for attempt in attempt_of_round.values()]
        known_peaks = [peak for peak in peaks if peak]
        if len(known_peaks) > 1:
            differences.append(max(known_peaks) / min(known_peaks) - 1)
    if not differences:
        return "Not known, because one round does not show how memory differs over the rounds."
    if max(differences) == 0:
        return "The memory of each point was the same in all rounds."
    share = share_words(max(differences), digits=1)
    return f"The memory of a point differs by at most {share} over the rounds."


def _widest_interval(
    answer: RunAnswer,
    half_widths: Sequence[tuple[float, ScaledRow]],  # half of the interval as a share, and point
) -> str:
    """Return a sentence on the widest 95 % interval over the rounds, and its point."""
    half_width, row = max(half_widths, key=lambda half_and_row: half_and_row[0])
    noun = "speed-up"
    if not isinstance(answer.leading, SpeedUps | Gains) and answer.metric is not None:
        name = metric_noun(answer.metric, answer.asked.items)
        # Titles of other metrics, such as `samples/s`, do not read well as the subject.
        noun = name if name in _NOUNS.values() else f"value of {name}"
    interval = f"95 % interval over {counted(row.rounds or 1, 'round')}"
    names = distinguishing_settings(answer.data.rows)
    point = short_name(row, names, answer.data.ranks) if len(half_widths) > 1 else ""
    if half_width >= 1:
        where = f" at {point}" if point else ""
        return f"The {noun} is uncertain by more than ±100 %{where} ({interval})."
    size = formatting.interval_words(half_width)
    if len(half_widths) == 1:
        return f"The {noun} is known to {size} ({interval})."
    widest = f"; widest at {point}" if point else ""
    return f"Each {noun} is known to {size} or better ({interval}{widest})."


def wide_meaning(mark: str, rounds: Iterable[int | None], *, is_ratio: bool) -> str:
    """Return the legend of the mark of wide values in the table of the answer.

    Args:
        mark: letter before a wide value.
        rounds: number of rounds of each point.
        is_ratio: whether values are ratios to a baseline.
    """
    of_step = "of the step time within one round"
    if is_ratio:
        of_step = "of the step time (here or at the baseline) within one round"
    # A point of one round has no interval over the rounds: its steps give the interval.
    counts = {count or 1 for count in rounds}
    if min(counts) > 1:
        of_what = "of the value over the rounds"
    elif max(counts) == 1:
        of_what = of_step
    else:
        of_what = f"{of_step}, or of the value over the rounds,"
    return f"{mark} = wide: the 95 % interval {of_what} exceeds ±{share_words(WIDEST_INTERVAL)}."


def plain_meaning(switches: Sequence[str]) -> str:
    """Return what `plain` means in the table of the answer: all `switches` are off."""
    *others, last = map(formatting.heading, switches)
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"plain: without {listed}."


def table_heading(answer: RunAnswer) -> str:
    """Return the title of the table of the answer."""
    ranks_noun = answer.data.ranks
    match answer.leading:
        case LargestBatches():
            return "Largest batch per device that fits"
        case SpeedUps() as leading:
            devices = formatting.ranks_words(leading.world_size, ranks_noun)
            text = f"Speed-up from {_baseline_devices(leading, ranks_noun)} to {devices}"
            return text if leading.ideal is None else f"{text} (ideal {leading.ideal:.2f})"
        case Gains() as leading:
            return f"Speed-up against {_baseline_words(leading, ranks_noun)}"
    return value_title(answer)


def value_title(answer: RunAnswer) -> str:
    """Return the metric of the answer with its unit: `Bus bandwidth, GB/s`."""
    metric, items_noun = answer.metric, answer.asked.items
    assert metric is not None
    noun = metric_noun(metric, items_noun)
    unit = unit_of_metric(metric, items_noun)
    if metric.unit == "ms":
        unit = formatting.unit_of(answer.data.rows).name
    text = noun if unit in noun else f"{noun}, {unit}"
    if noun == f"{items_noun}/s":
        return f"Throughput, {text}"
    return text[:1].upper() + text[1:]


def value_name(answer: RunAnswer) -> str:
    """Return the heading of the column of values in the table of the answer."""
    match answer.leading:
        case LargestBatches():
            return "batch"
        case SpeedUps() | Gains():
            return "speed-up"
    metric = answer.metric
    assert metric is not None
    if metric.unit == "ms":
        prefix = "step " if metric.name == "step_ms_p50" else f"{metric.title} "
        # The unit is µs if any step is below 0.1 ms, otherwise ms.
        return f"{prefix}{formatting.unit_of(answer.data.rows).name}"
    return unit_of_metric(metric, answer.asked.items) or metric.title


def _uncompared_sentence(uncompared: Uncompared) -> str:
    """Return how many points lack a speed-up, and why."""
    count_of_reason, count = uncompared.reasons, uncompared.count
    most_common = max(count_of_reason, key=lambda reason: count_of_reason[reason])
    main_reason = not_compared_words(most_common)
    if count == uncompared.points:
        return f"No point has a speed-up: {main_reason}."
    why = f": {main_reason}" if len(count_of_reason) == 1 else ""
    have = "has" if count == 1 else "have"
    return f"{count} of {counted(uncompared.points, 'point')} {have} no speed-up{why}."


def batch_settings(batch: LargestBatch, batches: LargestBatches, ranks_noun: str) -> str:
    """Return the settings that distinguish a largest batch; a single batch has all settings."""
    names = batches.differing_settings or tuple(batch.settings)
    return formatting.words_of_settings({name: batch.settings[name] for name in names}, ranks_noun)


def what_fits(batch: LargestBatch) -> str:
    """Return `fit per device (peak of allocated memory 139.12 GiB, …); 1,480 do not`.

    The second number is the smallest batch that ran out of memory.
    """
    peaks = []
    if batch.peak_mem_allocated_bytes is not None:
        allocated = formatting.gib(batch.peak_mem_allocated_bytes)
        peaks.append(f"peak of allocated memory {allocated} GiB")
        if reserved := batch.row.peak_mem_reserved_bytes:
            peaks.append(f"of reserved memory {formatting.gib(reserved)} GiB")
    memory = f" ({', '.join(peaks)})" if peaks else ""
    return f"fit per device{memory}; {batch.ran_out:,} do not"


def _scaling_sentence(speed_ups: SpeedUps, answer: RunAnswer) -> str:
    """Return `4 GPUs reach 2.29 to 3.47 times the samples/s of 1 GPU (ideal 4.00).`."""
    low = min(series.low for series in speed_ups.series)
    high = max(series.high for series in speed_ups.series)
    ideal = ""
    if speed_ups.ideal is not None:
        ideal = f" (ideal {speed_ups.ideal:.2f})"
    elif speed_ups.has_several_models:
        ideal = " (the ideal is unknown, because the devices differ)"
    devices = formatting.ranks_words(speed_ups.world_size, answer.data.ranks)
    reach = "reaches" if speed_ups.world_size == 1 else "reach"
    times = span(formatting.ratio(low), formatting.ratio(high))
    return f"{devices} {reach} {times} times {_rate_of_baseline(speed_ups, answer)}{ideal}."


def _rate_of_baseline(speed_ups: SpeedUps, answer: RunAnswer) -> str:
    baseline = formatting.words_of_settings(speed_ups.baseline, answer.data.ranks)
    return f"the {answer.asked.items}/s of {baseline}"


def _baseline_devices(speed_ups: SpeedUps, ranks_noun: str) -> str:
    return formatting.ranks_words(int(speed_ups.baseline["world_size"]), ranks_noun)


def main_loss(loss: MainLoss, devices: str) -> list[str]:
    """Return sentences on the cause of most of the lost time, or on why it is unknown.

    Args:
        loss: the cause.
        devices: number of devices of the points, as `4 GPUs`.
    """
    if loss.cause is None:
        reasons = {losses_unknown_words(why) for why in reasons_of_unknown_losses(loss.unknown)}
        if len(reasons) == 1:
            return [f"The reason why scaling is not ideal is unknown: {reasons.pop()}."]
        if reasons:
            return ["The reason why scaling is not ideal is unknown."]
        return ["The reason why scaling is not ideal was not measured."]
    cause = LOST_TO[loss.cause]
    # `loss.count` of the `loss.losing` points that lose time have this main cause.
    if loss.count == loss.losing:
        return [_LOST_TIME_MEANING, f"{share_words(*loss.shares)} of the lost time is {cause}."]
    which = f"{loss.count} of {counted(loss.losing, 'point')} with {devices}"
    if loss.losing < loss.points:
        which += " that surely lose time"
    sentences = [_LOST_TIME_MEANING, f"In {which}, the largest part of the lost time is {cause}."]
    if loss.unknown:
        sentences.append(f"The cause is unknown at {counted(len(loss.unknown), 'point')}.")
    return sentences


def unknown_losses(rows: Iterable[ScaledRow]) -> list[str]:
    """Return a sentence for each reason why causes of lost time are unknown."""
    return [
        f"The cause of the lost time is unknown at {counted(count, 'point')}: "
        f"{losses_unknown_words(why)}."
        for why, count in reasons_of_unknown_losses(rows).items()
    ]


def _gain_sentence(gains: Gains, ranks_noun: str) -> str:
    """Return the largest gain: `bf16 is 4.19 to 6.83 times as fast as fp32.`."""
    largest = gains.gains[0]
    settings = formatting.words_of_settings(largest.settings, ranks_noun)
    times = span(formatting.ratio(largest.low), formatting.ratio(largest.high))
    return f"{settings} is {times} times as fast as {_baseline_words(gains, ranks_noun)}."


def _undecided_gains(gains: Gains, ranks_noun: str) -> list[str]:
    """Return sentences on settings that may be as fast as the baseline; [] if all are decided."""
    undecided = [gain for gain in gains.gains if gain.rounds_to_decide is not None]
    if not undecided:
        return []
    names = [formatting.words_of_settings(gain.settings, ranks_noun) for gain in undecided]
    rounds = max(gain.rounds_to_decide or 0 for gain in undecided)
    base = _baseline_words(gains, ranks_noun)
    return [
        f"It is undecided whether {formatting.some(names)} is faster than {base}.",
        _ask_for_rounds(rounds),
    ]


def _baseline_words(gains: Gains, ranks_noun: str) -> str:
    settings = {name: value for name, value in gains.baseline.items() if name != "world_size"}
    return formatting.words_of_settings(settings, ranks_noun) or "the baseline"


def _ask_for_rounds(rounds: int) -> str:
    return f"More rounds may decide: `--set measure.rounds={rounds}`."


def case_name(answer: RunAnswer, case: RankedCase) -> str:
    """Return the settings that make a case, in words; "" if there is a single case."""
    return settings_words(case.best.row, tuple(case.settings), answer.data.ranks)


def candidate_name(answer: RunAnswer, candidate: Candidate) -> str:
    """Return the settings of a point that are compared, in short."""
    return short_name(candidate.row, answer.compared_settings, answer.data.ranks)


def _values_sentence(leading: Ranking | Values, answer: RunAnswer) -> str:
    """Return `The bus bandwidth reaches 352.8 GB/s with 4 GPUs, all_reduce, 1 GiB.`."""
    metric, items_noun = leading.metric, answer.asked.items
    # The best value of the run comes first.
    case, candidate = leading.figures[0]
    value = value_words(metric, candidate.value, items_noun)
    noun = _noun_beside_unit(metric, items_noun)
    if len(answer.data.ok_rows) == 1:
        text = f"The {noun or 'value'} is {value}."
        if not follows_step_time(metric) and candidate.row.step_ms_p50 is not None:
            text += f" The step takes {formatting.duration(candidate.row.step_ms_p50)}."
        return text
    verb = "reaches" if leading.highest_is_best else "goes down to"
    if not noun:
        noun = "highest value" if leading.highest_is_best else "lowest value"
        verb = "is"
    names = filter(None, (candidate_name(answer, candidate), case_name(answer, case)))
    settings = ", ".join(names)
    where = f" with {settings}" if settings else ""
    return f"The {noun} {verb} {value}{where}."


def _noun_beside_unit(metric: Metric, items_noun: str) -> str:
    """Return the noun of a metric; if its unit says the same, `throughput`, `rate` or ""."""
    noun = metric_noun(metric, items_noun)
    if noun != unit_of_metric(metric, items_noun):
        return noun
    if not metric.is_rate:
        return ""
    return "throughput" if metric.name == "throughput" else "rate"


def _winner(ranking: Ranking, answer: RunAnswer) -> list[str]:
    """Return sentences on the best setting and its gain, or that there is no clear winner."""
    # Points are ranked within each case, a combination of the settings that are not compared.
    # `over_cases` tells which settings win most cases; None if only one case has several points.
    over_cases = ranking.over_cases
    case = over_cases.case if over_cases else ranking.described_cases[0]
    if case.verdict is RankingVerdict.UNDECIDED or (over_cases and not over_cases.wins):
        return _no_clear_winner(ranking, case, answer)
    best, second = candidate_name(answer, case.best), candidate_name(answer, case.ranked[1])
    if not over_cases and formatting.ratio(case.gain) == "1.00":
        return [f"{best} and {second} differ by less than 0.5 %."]
    won = _cases_won(ranking, case)
    is_sure = case.verdict is RankingVerdict.BEST
    where = _cases_won_words(answer, won, over_cases.case_count) if over_cases else ""
    where += "" if is_sure else " in this run"
    noun = metric_noun(ranking.metric, answer.asked.items)
    if is_speed(ranking.metric):
        sentences = [f"{best} {'is' if is_sure else 'was'} the fastest{where}."]
    elif _is_needed(ranking):
        sentences = [f"{best} needs the least {noun}{where}."]
    else:
        degree = "highest" if ranking.highest_is_best else "lowest"
        sentences = [f"{best} has the {degree} {noun}{where}."]
    if lead_of_best := _lead_over_second(ranking, won, best, second, noun):
        sentences.append(lead_of_best)
    if over_cases and over_cases.undecided:
        cases = cases_words(over_cases.undecided, over_cases.case_count, answer.case_settings)
        sentences.append(f"The winner is undecided {cases}.")
    return sentences


def _no_clear_winner(ranking: Ranking, case: RankedCase, answer: RunAnswer) -> list[str]:
    """Return that no point is the clear winner, and how many rounds may decide.

    Args:
        case: the case without a clear winner. Its points are named unless several cases have
            several points.
    """
    # More rounds do not change the memory.
    ask = [] if answer.is_of_memory else [_ask_for_rounds(rounds_to_decide(case.best.row))]
    if ranking.over_cases:
        count = ranking.over_cases.case_count
        where = cases_words(count, count, answer.case_settings)
        return [f"There is no clear winner {where}.", *ask]
    best, rivals = candidate_name(answer, case.best), candidate_name(answer, case.rivals[0])
    if len(case.rivals) > 1:
        rivals = f"{len(case.rivals)} other points"
    first = f"There is no clear winner: {best} has the best value, but {rivals} may be equal."
    return [first, *ask]


def _is_needed(ranking: Ranking) -> bool:
    """Return whether points need the metric, as memory, so that the least is the best."""
    return ranking.metric.name in _NEEDED and not ranking.highest_is_best


def _lead_over_second(
    ranking: Ranking, won: Sequence[RankedCase], best: str, second: str, noun: str
) -> str:
    """Return by how much the best setting leads; "" if a second value is 0.

    Args:
        won: the cases that the best setting wins.
        best, second: names of the points, for a ranking of a single case.
        noun: the metric in words.
    """
    if is_speed(ranking.metric):
        gains = [case.gain for case in won]
        if math.inf in gains:
            return ""
        times = span(formatting.ratio(min(gains)), formatting.ratio(max(gains)))
        if ranking.over_cases:
            best, second = "The fastest", "the second fastest"
        return f"{best} is {times} times as fast as {second}."
    differences = []
    for case in won:
        best_value, second_value = case.best.value, case.ranked[1].value
        if second_value == 0:
            return ""
        differences.append(best_value / second_value - 1)
    # If a low value is best, the differences are below 0.
    low, high = sorted((abs(min(differences)), abs(max(differences))))
    shares = share_words(low, high)
    if ranking.over_cases:
        second = "the second best"
    if _is_needed(ranking):
        return f"{best} needs {shares} less {noun} than {second}."
    comparative = "higher" if ranking.highest_is_best else "lower"
    return f"The value of {best} is {shares} {comparative} than that of {second}."


def _cases_won(ranking: Ranking, case: RankedCase) -> list[RankedCase]:
    """Return the cases whose clear winner has the best settings of `case`."""
    cases = []
    for other in ranking.cases:
        is_decided = len(other.ranked) > 1 and not other.rivals
        if is_decided and other.best.settings == case.best.settings:
            cases.append(other)
    return cases


def _cases_won_words(answer: RunAnswer, won: Sequence[RankedCase], compared_count: int) -> str:
    """Return ` with 1 GPU, 2 GPUs and 4 GPUs`, or ` in 3 of 4 combinations of k and m`."""
    names = answer.case_settings
    if len(names) != 1 or len(won) > _MOST_NAMED:
        # Cases with a single point have no winner.
        compared = " that can be compared" if compared_count < len(answer.cases) else ""
        return f" {cases_words(len(won), compared_count, names)}{compared}"
    *others, last = [case_name(answer, case) for case in won]
    return f" with {', '.join(others)} and {last}" if others else f" with {last}"


def _memory_sentence(ranking: Ranking, answer: RunAnswer) -> str:
    """Return the sentence that memory is unknown; "" unless a job with a question ran on CPUs."""
    # Why points have no memory; all columns of memory have the same reason.
    reasons = {(row.not_measured or {}).get("mem_parameters_bytes") for row in answer.data.ok_rows}
    ran_on_cpus = reasons == {NotMeasured.MEMORY_OF_CPU}
    if not answer.asked.question or not ran_on_cpus:
        return ""
    noun = metric_noun(ranking.metric, answer.asked.items)
    return f"The answer covers {noun} only: torch does not count the memory of a CPU."


def _findings_of_values(leading: Values, answer: RunAnswer) -> list[str]:
    """Return sentences on the datasheet's peak, time.time(), and the smallest message."""
    _, best = leading.figures[0]
    sentences = [datasheet_sentence(leading.metric, best.row)]
    if leading.metric.name == "wall_unsynced_share":
        values = [case.best.value for case in leading.cases]
        shown = formatting.share_words(min(values), max(values))
        sentences.append(f"Without synchronizing, time.time() shows {shown} of the true step time.")
    if leading.smallest_step_ms is not None:
        what = "An all_reduce" if leading.is_all_reduce_of_several else "A message"
        devices = formatting.ranks_words(leading.most.best.row.world_size, answer.data.ranks)
        smallest = formatting.size(leading.sizes[0])
        time = formatting.duration(leading.smallest_step_ms)
        sentences.append(f"{what} of {smallest} on {devices} takes {time}.")
    return sentences


def datasheet_sentence(metric: Metric, row: ScaledRow) -> str:
    """Return a sentence on the share of the datasheet's peak; "" if the peak is unknown."""
    reached = share_of_datasheet(metric, row)
    if reached is None:
        return ""
    peak = "the datasheet's peak"
    if reached.memory_peak_gb_s is not None:
        peak = f"the datasheet's {reached.memory_peak_gb_s:,.0f} GB/s"
    return f"The highest value is {formatting.share_words(reached.share)} of {peak}."


def metric_noun(metric: Metric, items: str) -> str:
    """Return the name of a metric in words: `tokens/s`, `step time`.

    Args:
        items: what the job calls its samples, such as `tokens`.
    """
    if metric.name == "throughput":
        return f"{items}/s"
    return _NOUNS.get(metric.name, metric.title)


def unit_of_metric(metric: Metric, items: str) -> str:
    """Return the unit of a metric, or the title of a metric without a unit.

    Args:
        items: what the job calls its samples, such as `tokens`.
    """
    if metric.name == "throughput":
        return f"{items}/s"
    if metric.format in _UNITS:
        return _UNITS[metric.format]
    # A workload writes the unit of its metric into the title.
    return (metric.unit if is_column(metric) else "") or metric.title


def value_words(metric: Metric, value: float, items: str) -> str:
    """Return a value with its unit or title: `1.50 GiB`, `3.000 loss`.

    Args:
        items: what the job calls its samples, such as `tokens`.
    """
    if metric.unit == "ms":
        return formatting.duration(value)
    return f"{formatting.metric(metric, value)} {unit_of_metric(metric, items)}".rstrip()


def more_rounds(more: MoreRounds) -> str:
    """Return a sentence on what more rounds give, with a command for `JOB` and `RUN`."""
    time = formatting.long_time(more.seconds)
    added = counted(more.rounds - more.done, "more round")
    return (
        f"{added} ({more.rounds} in all) give 95 % intervals over the rounds, in about {time}: "
        f"sweep JOB --resume RUN --set measure.rounds={more.rounds}"
    )


def next_command(following: NextCommand) -> list[str]:
    """Return the lines of the next command; a long command is folded before options."""
    label = "Next: "
    if following.kind is Next.RETRY:
        label = "Next, after you fix the error: "
    elif following.seconds is not None:
        time = formatting.long_time(following.seconds)
        label = f"Next, to get 95 % intervals (takes about {time}): "
    whole = label + formatting.command(*following.words)
    if len(whole) <= WIDTH:
        return [whole]
    # The command, then each option with its values.
    groups: list[list[str]] = [[]]
    for word in following.words:
        if _OPTION.match(word):
            groups.append([])
        groups[-1].append(word)
    lines = [formatting.command(*groups[0])]
    for group in groups[1:]:
        option = formatting.quoted(*group)
        # A blank before the option, and ` \` after it.
        if len(lines[-1]) + len(option) + 3 <= WIDTH:
            lines[-1] += f" {option}"
        else:
            lines.append(f"    {option}")
    return [label.rstrip(), *(f"{line} \\" for line in lines[:-1]), lines[-1]]
