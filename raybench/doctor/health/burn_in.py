"""The stage burn-in: products and collectives by turns, for as long as is asked. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from raybench.doctor.health.suite import Fleet, Probe, burn_in_probes
from raybench.job.model import Measure, Span
from raybench.records.health import HealthTest, Reading, Subject

# Of each point: long enough that the device gets hot, short enough that a hang is soon noticed.
_POINT_S = 10.0
_TIMEOUT_S = 60.0
_SHARE = 10


def measure_of_burn_in() -> Measure:
    """Return how long each point of the stage is measured."""
    return Measure(
        warmup=Span(min=10, max=10),
        iterations=Span(min=10, max=1_000_000),
        min_seconds=_POINT_S,
        # Its time is what is asked for, not how well the median is known.
        target_ci=0.9,
        max_seconds=1.5 * _POINT_S,
        timeout_s=_TIMEOUT_S,
        breakdown=False,
    )


def probes_of_burn_in(fleet: Fleet) -> tuple[Probe, ...]:
    """List the probes that are run by turns."""
    return tuple(burn_in_probes(fleet))


def drift(readings: Sequence[Reading], floor: float) -> Iterator[Reading]:
    """Yield how much longer each subject took in the last tenth of the burn-in than in the first.

    Heat and wear show there; the others of its model tell whether that is usual. Nothing of a
    burn-in of one turn.
    """
    series: dict[tuple[HealthTest, Subject], list[float]] = {}
    for reading in readings:
        if reading.test.stage == "burn-in" and reading.value:
            value = reading.value if reading.test.is_time else 1 / reading.value
            series.setdefault((reading.test, reading.subject), []).append(value)
    for (test, subject), times in series.items():
        if len(times) < 2:
            continue
        tenth = max(1, len(times) // _SHARE)
        yield Reading(
            test=HealthTest(
                name=f"{test.name} drift",
                stage="burn-in",
                kind=test.kind,
                unit="x",
                is_time=True,
                floor=floor,
                meaning="Time of the last tenth of the burn-in to that of the first.",
            ),
            subject=subject,
            pass_number=1,
            value=median(times[-tenth:]) / median(times[:tenth]),
        )
