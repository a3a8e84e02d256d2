"""What `raybench health --quick` says of healthy GPUs, and of five faults that are injected.

    python -m benchmarks.quick_faults [--healthy 30] [--times 3] [--faults NAME ...] [--out DIR]

Every check is the command as users type it. Faults: `neighbour`, another program at full load;
`few_sms`, 120 of 132 multiprocessors by a green context; `bandwidth_hog`, another program that
copies memory; `cpu_hog`, programs on all cores near one GPU; `wrong_bits`, a kernel with a flipped
bit. The fault is on the last GPU. A check is as expected if it is over within its limit, gives the
right state and names the GPU or the program.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from benchmarks.common import REPOSITORY, write_result
from raybench.hardware import nvml
from raybench.records.environment import usable_cores

PLUG = REPOSITORY / "tests" / "integration" / "quick_faults"
SMS = 120
# Seconds from the command to the verdict on healthy GPUs, by their number.
LIMITS_S = {1: 15.0, 2: 25.0}
# A fault may take longer.
LONGEST_S = 30.0
HOG = """
import sys, torch
device = torch.device("cuda", int(sys.argv[1]))
if sys.argv[2] == "products":
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = left @ right
    step = lambda: torch.matmul(left, right, out=product)
else:
    source = torch.empty(2**30, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    step = lambda: target.copy_(source)
step()
torch.cuda.synchronize(device)
print("busy", flush=True)
while True:
    for _ in range(20):
        step()
    torch.cuda.synchronize(device)
"""
SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("busy", flush=True)
while True:
    pass
"""

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that is there now."""

    # Variables for the command.
    environment: Mapping[str, str]
    # Words of which the report must contain one.
    named: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, and the states of the node that a check may give."""

    name: str
    inject: Callable[[int], Any]
    states: Sequence[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--healthy", type=int, default=30, metavar="N", help="healthy checks")
    parser.add_argument("--times", type=int, default=3, help="checks of each fault")
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--faults", nargs="*", choices=names, default=names)
    parser.add_argument("--out", type=Path, metavar="DIR", help="for quick_faults.json")
    chosen = parser.parse_args()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(visible.split(",")) if visible else len(nvml.devices())
    if not count:
        raise SystemExit("no GPU here")
    checks: list[dict[str, Any]] = []
    print_row("fault", "seconds", "state", "expected", "verdict")
    for number in range(chosen.healthy):
        found = check("healthy", number, Injected(environment={}, named=()), ("healthy",), count)
        checks.append(found)
        store(checks, chosen.out)
    for fault in FAULTS:
        if fault.name not in chosen.faults:
            continue
        for number in range(chosen.times):
            with fault.inject(count - 1) as injected:
                checks.append(check(fault.name, number, injected, fault.states, count))
            store(checks, chosen.out)
            # The driver frees the memory of an ended program within a second.
            time.sleep(1.0)
    summarize(checks)


def check(
    name: str, number: int, injected: Injected, states: Sequence[str], gpus: int
) -> dict[str, Any]:
    """Run the command and return what came of it."""
    command = [sys.executable, "-m", "raybench", "health", "--quick", "--json"]
    began_s = time.monotonic()
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **injected.environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    took_s = time.monotonic() - began_s
    report: Report = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    state = report.get("state", f"exit code {done.returncode}")
    said = spoken(report)
    is_named = not injected.named or any(word in text for text in said for word in injected.named)
    limit_s = LIMITS_S.get(gpus, LONGEST_S) if name == "healthy" else LONGEST_S
    is_in_time = took_s <= limit_s
    is_expected = state in states and is_named and is_in_time
    verdict = "; ".join(said)[:160] or done.stderr[-160:].strip()
    print_row(name, f"{took_s:.1f}", state, "yes" if is_expected else "NO", verdict)
    return {
        "fault": name,
        "number": number,
        "seconds": round(took_s, 2),
        "state": state,
        "expected_states": list(states),
        "is_named": is_named,
        "is_in_time": is_in_time,
        "is_expected": is_expected,
        "exit_code": done.returncode,
        "report": report,
        "stderr": done.stderr[-4000:],
    }


def spoken(report: Report) -> list[str]:
    """Return what a report says of devices and programs, the gravest first."""
    drain = [f"{one['device']}: {one['kind']}: {one['test']}" for one in report.get("drain", ())]
    untested = [one["detail"] for one in report.get("untested", ())]
    findings = [
        f"{one['subject']['name']}: {one['test']}: {one['reason']} {one['evidence']}"
        for one in report.get("findings", ())
        if one["verdict"] not in ("healthy", "unknown")
    ]
    return [*drain, *untested, *findings]


def print_row(*cells: str) -> None:
    name, seconds, state, expected, verdict = cells
    print(f"{name:14} {seconds:>7}  {state:9} {expected:8}  {verdict}", flush=True)


def store(checks: Sequence[Mapping[str, Any]], folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_result({"checks": checks}, folder / "quick_faults.json")


def summarize(checks: Sequence[Mapping[str, Any]]) -> None:
    print()
    for name in dict.fromkeys(one["fault"] for one in checks):
        own = [one for one in checks if one["fault"] == name]
        good = sum(one["is_expected"] for one in own)
        drained = sum(one["state"] == "drain" for one in own)
        seconds = sorted(one["seconds"] for one in own)
        print(
            f"{name}: {good} of {len(own)} as expected, {drained} drained, "
            f"{seconds[0]:.1f} to {seconds[-1]:.1f} s, median {seconds[len(seconds) // 2]:.1f} s"
        )


@contextmanager
def programs(commands: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """Run programs that say when they are busy; yield their process ids."""
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in commands]
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "busy\n"
        # NVML's utilization is of the last second.
        time.sleep(1.5)
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def neighbour(index: int) -> Iterator[Injected]:
    with programs([[sys.executable, "-c", HOG, str(index), "products"]]):
        yield Injected(environment={}, named=[f"GPU {index}"])


@contextmanager
def bandwidth_hog(index: int) -> Iterator[Injected]:
    with programs([[sys.executable, "-c", HOG, str(index), "copies"]]):
        yield Injected(environment={}, named=[f"GPU {index}"])


@contextmanager
def cpu_hog(index: int) -> Iterator[Injected]:
    cores = cores_near(index)
    with programs([[sys.executable, "-c", SPIN, str(core)] for core in cores]) as ids:
        yield Injected(environment={}, named=[f"process {one} " for one in ids])


@contextmanager
def few_sms(index: int) -> Iterator[Injected]:
    yield plugged("few_sms", index)


@contextmanager
def wrong_bits(index: int) -> Iterator[Injected]:
    yield plugged("wrong_bits", index)


def plugged(fault: str, index: int) -> Injected:
    """Return a fault in the device's process of the check."""
    path = os.pathsep.join(filter(None, (str(PLUG), os.environ.get("PYTHONPATH"))))
    environment = {
        "PYTHONPATH": path,
        "QUICK_FAULT": fault,
        "QUICK_FAULT_DEVICE": str(index),
        "QUICK_FAULT_SMS": str(SMS),
    }
    return Injected(environment=environment, named=[f"GPU {index}: "])


def cores_near(index: int) -> list[int]:
    """Return the cores near a GPU that this process may use; all if unknown."""
    allowed = os.sched_getaffinity(0)
    handle = nvml.devices()[index]
    words = nvml.ask(pynvml.nvmlDeviceGetCpuAffinity, handle, (os.cpu_count() or 1) // 64 + 1) or ()
    near = set()
    for position, word in enumerate(words):
        near |= {64 * position + bit for bit in range(64) if word >> bit & 1}
    # A quota of a container would stop all programs, also the check.
    return sorted(near & allowed or allowed)[: usable_cores()]


FAULTS = (
    Fault(name="neighbour", inject=neighbour, states=("untested",)),
    Fault(name="few_sms", inject=few_sms, states=("drain", "suspect")),
    Fault(name="bandwidth_hog", inject=bandwidth_hog, states=("untested",)),
    Fault(name="cpu_hog", inject=cpu_hog, states=("healthy", "untested")),
    Fault(name="wrong_bits", inject=wrong_bits, states=("drain",)),
)


if __name__ == "__main__":
    main()
