"""How far two starts of the same point lie apart though nothing was changed: the A/A noise. Pure.

An interval from the samples of a run speaks of one start of its processes. What another start would
have changed (which clocks and links it met, how memory was laid out) is seen only where the same
job was run again, so it is estimated from such runs, or from the repeats in a run. Few of them
tell little: their variance is drawn towards a documented one that counts as PRIOR_DEGREES degrees
of freedom (G. K. Smyth, "Linear models and empirical Bayes methods for assessing differential
expression in microarray experiments", Stat. Appl. Genet. Mol. Biol. 3(1), 2004).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raybench.measure.stats import student_t

# What two runs of the same job differ by in 19 of 20 points. From an A/A pair on 4 H200s, see
# docs/benchmarks/same-twice-4xh200.json: points in fp32, tf32 and bf16 differ by 0.3 % in the
# median and one of 27 by more than 0.8 %; those in fp16, whose steps wait for the host, by 1 % in
# the median and by up to 2.7 %.
TYPICAL = 0.01
LOOSE = 0.03
# Tails as heavy as those of the A/A pair.
PRIOR_DEGREES = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNoise:
    """sd: of the logarithm of one run's step time. degrees: of freedom of that estimate.

    source: where it was got: "A/A runs", "repeats" or "documented".
    """

    sd: float
    degrees: float
    source: str

    @property
    def sd_of_change(self) -> float:
        """Of the logarithm of the ratio of two runs."""
        return math.sqrt(2) * self.sd

    @property
    def floor(self) -> float:
        """The relative change that 19 of 20 pairs of runs of the same thing stay below."""
        return math.expm1(self.sd_of_change * student_t(self.degrees))


def documented(rows: Sequence[Mapping[str, Any]]) -> StartNoise:
    """The noise without A/A runs. rows: of `points`, the attempts that are compared."""
    is_loose = any(row["precision"] == "fp16" or row["host_bound"] is True for row in rows)
    floor = math.log1p(LOOSE if is_loose else TYPICAL)
    sd = floor / student_t(PRIOR_DEGREES) / math.sqrt(2)
    return StartNoise(sd=sd, degrees=PRIOR_DEGREES, source="documented")


def updated(
    prior: StartNoise, groups: Sequence[Sequence[float]], within: float, source: str
) -> StartNoise:
    """The noise after what was seen of it; the prior where nothing was.

    groups: step times in any unit; within a group they differ by starts, and by how unsure each
    is. within: variance of the latter, of the logarithm of one step time; it is no noise of starts.
    """
    told = [np.log(group) for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in told)
    if not degrees:
        return prior
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in told)
    squares = max(0.0, squares - degrees * within)
    whole = prior.degrees + degrees
    variance = (prior.degrees * prior.sd**2 + squares) / whole
    return StartNoise(sd=math.sqrt(variance), degrees=whole, source=source)
