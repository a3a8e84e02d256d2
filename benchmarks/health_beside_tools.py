"""Are the figures of `raybench health` those of the tools that are known for them?

    python -m benchmarks.health_beside_tools HEALTH_RUN COLLECTIVE_RUN [--results DIR] [-o FILE]

Copies between host and device and between two devices by the method of nvbandwidth: a kernel that
spins holds the stream while 16 copies of 512 MiB are queued between two events, and the median of
three such samples counts. They run here, one at a time, on the devices of this host. all_reduce is
held against the workload `collective` in COLLECTIVE_RUN. Each ratio is health's figure over the
other one, of times the other way round: above 1, health reads more.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import raybench
from benchmarks.machine import commit, machine
from raybench.results.reader import find_run

_BYTES = 512 * 2**20
_COPIES = 16
_SAMPLES = 3
# Some 20 ms, in which 16 copies are queued with ease.
_SPIN_CYCLES = 40_000_000
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("health_run")
    options.add_argument("collective_run")
    options.add_argument("--results", default="results")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    health_run, collective_run = (
        find_run(chosen.results, run)[1] for run in (chosen.health_run, chosen.collective_run)
    )
    links = raybench.load(chosen.results, "links", health_run)
    health = raybench.load(chosen.results, "health", health_run)
    points = raybench.load(chosen.results, "points", collective_run)
    rows = [*copies(links), *sums(health, points)]
    print(pd.DataFrame(rows).round(3).to_string(index=False))
    result = {
        "health_run": health_run,
        "collective_run": collective_run,
        "commit": commit(),
        "torch": torch.__version__,
        "machine": machine(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "rows": rows,
        "largest_difference": max(abs(row["ratio"] - 1) for row in rows),
    }
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=2) + "\n")


def copies(links: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Each link of the check that a copy engine serves, copied again."""
    indices = {
        f"GPU-{torch.cuda.get_device_properties(index).uuid}": index
        for index in range(torch.cuda.device_count())
    }
    methods = {"h2d": host_to_device, "d2h": device_to_host, "copy": between_devices}
    for link in links[links["kind"].isin(methods)].to_dict("records"):
        ends = [indices[link[end]] for end in ("from_uuid", "to_uuid") if link[end] in indices]
        gb_s = methods[link["kind"]](*ends)
        yield {
            "test": link["kind"],
            "from": str(link["from_name"]),
            "to": str(link["to_name"]),
            "unit": "GB/s",
            "health": link["gb_per_s"],
            "other": gb_s,
            "ratio": link["gb_per_s"] / gb_s,
        }


def host_to_device(index: int) -> float:
    source, target = pinned(), on_device(index)
    return bandwidth_gb_s(index, lambda: target.copy_(source, non_blocking=True))


def device_to_host(index: int) -> float:
    source, target = on_device(index), pinned()
    return bandwidth_gb_s(index, lambda: target.copy_(source, non_blocking=True))


def between_devices(start: int, end: int) -> float:
    """Copy as the check does: the device of the lower index issues it."""
    from cuda.bindings import runtime

    source, target = on_device(start), on_device(end)
    issuer, peer = sorted((start, end))
    torch.cuda.set_device(issuer)
    (error,) = runtime.cudaDeviceEnablePeerAccess(peer, 0)
    assert error.name in ("cudaSuccess", "cudaErrorPeerAccessAlreadyEnabled"), error

    def copy() -> None:
        stream = torch.cuda.current_stream(issuer).cuda_stream
        (error,) = runtime.cudaMemcpyPeerAsync(
            target.data_ptr(), end, source.data_ptr(), start, _BYTES, stream
        )
        assert not error, error

    return bandwidth_gb_s(issuer, copy)


def pinned() -> torch.Tensor:
    return torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=True)


def on_device(index: int) -> torch.Tensor:
    return torch.zeros(_BYTES, dtype=torch.uint8, device=f"cuda:{index}")


def bandwidth_gb_s(index: int, issue: Callable[[], object]) -> float:
    torch.cuda.set_device(index)
    issue()
    for other in range(torch.cuda.device_count()):
        torch.cuda.synchronize(other)
    found = []
    for _ in range(_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # torch has no public kernel that spins.
        torch.cuda._sleep(_SPIN_CYCLES)
        start.record()
        for _ in range(_COPIES):
            issue()
        end.record()
        torch.cuda.synchronize(index)
        found.append(_BYTES * _COPIES / start.elapsed_time(end) / 1e6)
    return statistics.median(found)


def sums(health: pd.DataFrame, points: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Each all_reduce of the check that the other run has too, over as many devices."""
    mine = health[health["test"].str.startswith("all_reduce") & health["value"].notna()]
    sizes = points["params"].map(lambda params: int(params["size_bytes"]))
    is_sum = points["params"].map(lambda params: params["operation"] == "all_reduce")
    ok = points[(points["status"] == "ok") & is_sum].assign(size_bytes=sizes)
    for row in mine.to_dict("records"):
        _, count, unit = row["test"].split()
        size_bytes = int(count) * _UNITS[unit]
        same = ok[(ok["size_bytes"] == size_bytes) & (ok["world_size"] == len(row["uuids"]))]
        if same.empty:
            continue
        is_time = row["unit"] == "µs"
        other = same["step_ms_p50"].item() * 1e3 if is_time else same["busbw_gb_s"].item()
        yield {
            "test": row["test"],
            "from": row["subject"],
            "to": "",
            "unit": row["unit"],
            "health": row["value"],
            "other": other,
            "ratio": other / row["value"] if is_time else row["value"] / other,
        }


if __name__ == "__main__":
    main()
