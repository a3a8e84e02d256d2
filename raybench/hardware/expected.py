"""What devices of a model reach in a test of a health check: as runs have seen it, and datasheets.

The figures and where each is from are in expected.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

from ruamel.yaml import YAML

from raybench.hardware.peaks import dense_peak_tflops, memory_peak_gb_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The range of one test in runs of devices of a model. Fields as in expected.yaml."""

    model: str
    where: str
    test: str
    unit: str
    low: float
    high: float
    source: str
    links: str = ""


def find_expected(model: str, test: str, where: str, topology: str = "") -> Expected | None:
    """Find the range of a test; None where no run has seen it.

    where: how many devices work together and how, as in expected.yaml. topology: of one of them.
    """
    known = _table().get((model, test, where), ())
    return next((one for one in known if topology.startswith(one.links)), None)


def datasheet(model: str, test: str) -> float | None:
    """Find the peak of a test in the unit of the test; None where no datasheet has one."""
    kind, *words = test.split()
    if kind == "gemm":
        return dense_peak_tflops(model, words[0])
    return memory_peak_gb_s(model) if kind == "memory" else None


@cache
def _table() -> dict[tuple[str, str, str], list[Expected]]:
    text = resources.files("raybench.hardware").joinpath("expected.yaml").read_text("utf-8")
    found: dict[tuple[str, str, str], list[Expected]] = {}
    for row in YAML(typ="safe", pure=True).load(text):
        one = Expected(**row)
        found.setdefault((one.model, one.test, one.where), []).append(one)
    return found
