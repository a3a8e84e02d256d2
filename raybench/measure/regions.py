"""Regions of a step, as `Context.region` names them: times on the device."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from raybench.measure.marks import Mark, marker, milliseconds
from raybench.records import RegionTime

# Name -> how long each of its blocks took in a step, in ms.
Spans = Mapping[str, Sequence[float]]


@dataclass(slots=True, kw_only=True)
class _Span:
    name: str
    start: Mark
    end: Mark | None = None


class RegionMarks:
    """Notes when each region begins and ends, step by step; nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._mark = marker(device)
        self._steps: list[list[_Span]] = [[]]

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Time the `with` block."""
        span = _Span(name=name, start=self._mark())
        self._steps[-1].append(span)
        yield
        span.end = self._mark()

    def end_step(self) -> None:
        """Begin the next step."""
        self._steps.append([])

    def take(self) -> list[Spans]:
        """Return the regions of each ended step, whose work must be done."""
        return [_by_name(spans) for spans in self._steps[:-1]]


def _by_name(spans: Sequence[_Span]) -> Spans:
    found: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        assert span.end is not None, "a step returned inside of a region"
        found[span.name].append(milliseconds(span.start, span.end))
    return found


def region_times(steps: Sequence[Spans], step_ms: float) -> tuple[RegionTime, ...]:
    """Compute the median of each region over the steps; 0 ms counts where it was not entered.

    step_ms: what such a step takes.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    return tuple(
        RegionTime(
            name=name,
            calls=max(len(step.get(name, ())) for step in steps),
            ms=(ms := statistics.median(sum(step.get(name, ())) for step in steps)),
            share=ms / step_ms if step_ms else 0.0,
        )
        for name in names
    )
