"""A health check with a fault in it: `python -m tests.integration.health_runs OUTPUT STAGE...`.

Beside other sweeps; it prints what was found as JSON. Variables: HEALTH_ADDRESS and HEALTH_DEVICE
as the options of the command, HEALTH_TESTS the names of the tests, with commas, FLIP_BITS=1
and FEW_SMS, a number of multiprocessors, put a faulty workload in the place of a good one.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from raybench.api.progress import ConsoleListener
from raybench.cli.shared import make_console
from raybench.health.check import CheckSettings, examine
from raybench.health.suite import Fleet, Probe, probes, title
from raybench.health.verdicts import OTHER_PROGRAMS_TEST
from raybench.sweep.run_state import RunTarget
from raybench.workloads.base import Context
from raybench.workloads.kernels import Gemm, SameBits
from tests.integration.confined_stream import make_confined_stream

CHECK = [sys.executable, "-m", "tests.integration.health_runs"]
# Faults that are injected by a workload in the place of a built-in one.
FLIPPED_BITS = "tests.integration.health_runs:FlippedBits"
FEW_SMS = "tests.integration.health_runs:FewSms"
# As the suite names what may be between nodes or within one.
BETWEEN = "send 4 MiB"


def ill(found: Mapping[str, Any], *verdicts: str) -> dict[str, list[Mapping[str, Any]]]:
    """What is bad or suspect, or of more verdicts, by the name of the subject.

    Without other programs: this machine may be busy.
    """
    named: dict[str, list[Mapping[str, Any]]] = {}
    for finding in found["findings"]:
        is_asked = finding["test"] != OTHER_PROGRAMS_TEST
        if is_asked and finding["verdict"] in ("bad", "suspect", *verdicts):
            named.setdefault(finding["subject"]["name"], []).append(finding)
    return named


def with_fault(probe: Probe) -> Probe:
    if probe.test.reads == "bits" and os.environ.get("FLIP_BITS"):
        return replace(probe, point=replace(probe.point, workload=FLIPPED_BITS))
    if probe.point.workload == "gemm" and (sms := os.environ.get("FEW_SMS")):
        params = {**probe.point.params, "sms": int(sms)}
        return replace(probe, point=replace(probe.point, workload=FEW_SMS, params=params))
    return probe


def is_asked(probe: Probe) -> bool:
    names = os.environ.get("HEALTH_TESTS", "")
    return not names or probe.test.name in names.split(",")


def main(output: Path, stages: list[str]) -> None:
    def make_probes(fleet: Fleet) -> tuple[Probe, ...]:
        return tuple(with_fault(probe) for probe in probes(fleet, stages) if is_asked(probe))

    where = RunTarget(
        address=os.environ.get("HEALTH_ADDRESS", "local"),
        device="cuda" if os.environ.get("HEALTH_DEVICE") == "cuda" else "cpu",
        output=output,
        profiled=frozenset(),
        shared=True,
    )
    listener = ConsoleListener(make_console(), title)
    settings = CheckSettings(stages=stages, make_probes=make_probes)
    found = examine(where, listener, settings, ("test",))
    told = {
        "devices": [asdict(one) for one in found.devices],
        "findings": [asdict(one) for one in found.findings],
        "healthy": [one.index for one in found.healthy_devices],
        "nodes": [asdict(one) for one in found.node_reports],
    }
    print(json.dumps(told, default=str))


_streams: dict[tuple[int, int], Any] = {}


class FlippedBits(SameBits):
    """The last rank flips one bit of every product."""

    def __init__(self, context: Context, *, size: int = 256) -> None:
        super().__init__(context, size=size)
        self._is_faulty = context.rank == context.world_size - 1

    def step(self) -> None:
        import torch

        super().step()
        if self._is_faulty:
            self.product.view(torch.int32)[3, 4] ^= 1


class FewSms(Gemm):
    """The last rank multiplies on `sms` of the multiprocessors of its device."""

    def __init__(
        self, context: Context, *, m: int = 8192, n: int = 8192, k: int = 8192, sms: int = 99
    ) -> None:
        super().__init__(context, m=m, n=n, k=k)
        self._confined = None
        if context.rank == context.world_size - 1:
            # One for the life of the process, as a context takes memory.
            key = (context.device.index, sms)
            if key not in _streams:
                _streams[key] = make_confined_stream(*key)
            self._confined = _streams[key]

    def step(self) -> None:
        import torch

        if self._confined is None:
            super().step()
            return
        current = torch.cuda.current_stream()
        self._confined.wait_stream(current)
        with torch.cuda.stream(self._confined):
            super().step()
        current.wait_stream(self._confined)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
