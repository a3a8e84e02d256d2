"""A health check with a fault in it: `python -m tests.integration.health_runs OUTPUT STAGE...`.

Beside other sweeps, on CPU workers of a private Ray or of the cluster at RAY_ADDRESS. It prints
what was found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from raybench.cli.output import ConsoleListener, make_console
from raybench.doctor.health.check import examine
from raybench.doctor.health.suite import Fleet, Probe, probes, title
from raybench.sweep.run_state import RunTarget
from tests.integration.health_faults import FLIPPED_BITS


def with_flipped_bits(probe: Probe) -> Probe:
    if probe.shape != "bits":
        return probe
    return replace(probe, point=replace(probe.point, workload=FLIPPED_BITS))


def main(output: Path, stages: list[str]) -> None:
    is_faulty = os.environ.get("FLIP_BITS") == "1"

    def make_probes(fleet: Fleet) -> tuple[Probe, ...]:
        made = probes(fleet, stages)
        return tuple(map(with_flipped_bits, made)) if is_faulty else made

    where = RunTarget(
        address=os.environ.get("HEALTH_ADDRESS", "local"),
        device="cpu",
        output=output,
        profiled=frozenset(),
        shared=True,
    )
    listener = ConsoleListener(make_console(), title)
    found = examine(where, listener, stages, ("test",), make_probes=make_probes)
    told = {
        "devices": [asdict(one) for one in found.devices],
        "findings": [asdict(one) for one in found.findings],
        "links": [asdict(one) for one in found.links],
        "healthy": [one.index for one in found.healthy_devices],
    }
    print(json.dumps(told, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
