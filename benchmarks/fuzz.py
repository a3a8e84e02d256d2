"""Random job files, filters, options and result parts, given to the command line.

    python -m benchmarks.fuzz [--cases 50000] [--seconds 600] [--seed N] [--jobs 2] [-o FILE.json]
    python -m benchmarks.fuzz --seed N --only 4711        # one case again, with what it prints

The commands run in this process. A finding is a traceback, exit code 4, more than 5 s of processor
time, or 500 MB more memory than before. Each is written with all that makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.fuzz_cases import Case, make_case
from benchmarks.machine import commit, machine, without_paths

_MOST_S = 5.0
_MOST_BYTES = 500e6
# A case that hangs is ended after so long.
_HANG_S = 60
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case. wrong: why it is a finding; empty where it is none."""

    number: int
    kind: str
    args: tuple[str, ...]
    code: int
    took_s: float
    grown_bytes: int
    wrong: str
    said: str


class _HungError(BaseException):
    """Raised in a case that takes too long: no `except Exception` of it catches this."""


def run_case(case: Case, number: int, folder: Path) -> Outcome:
    """Run the command in this process; `folder` is its working directory."""
    case.prepare(folder)
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun_s = time.process_time()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = _called(case.args)
    took_s = time.process_time() - begun_s
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * _KIB
    said = stderr.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
    outcome = Outcome(
        number=number,
        kind=case.kind,
        args=case.args,
        code=code,
        took_s=round(took_s, 3),
        grown_bytes=grown,
        wrong="",
        said=said,
    )
    return replace(outcome, wrong=_wrong(outcome))


def _called(args: tuple[str, ...]) -> int:
    from raybench import cli

    argv, sys.argv = sys.argv, ["raybench", *args]
    signal.signal(signal.SIGALRM, _hung)
    signal.alarm(_HANG_S)
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except _HungError:
        return -1
    except BaseException:
        traceback.print_exc()
        return -2
    finally:
        signal.alarm(0)
        sys.argv = argv
    return 0


def _hung(_: int, __: FrameType | None) -> None:
    raise _HungError


def _wrong(outcome: Outcome) -> str:
    if outcome.code == -1:
        return f"more than {_HANG_S} s"
    if "Traceback (most recent call last)" in outcome.said:
        return "traceback"
    if outcome.code not in (0, 1, 2, 3):
        return f"exit code {outcome.code}"
    if outcome.took_s > _MOST_S:
        return f"more than {_MOST_S:g} s"
    return "more than 500 MB" if outcome.grown_bytes > _MOST_BYTES else ""


def _work(seed: int, numbers: range, until_s: float, kinds: tuple[str, ...], found: Any) -> None:
    """One process: its cases, one after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="fuzz") as name, contextlib.chdir(name):
        os.environ["HOME"] = name
        # Where wheels would be: the tables and charts are imported once, and not by a case.
        _called(("list", "--results", "nothing"))
        for number in numbers:
            if time.time() > until_s:
                return
            found.put((os.getpid(), number))
            found.put(run_case(make_case(seed, number, kinds), number, Path(name)))


@dataclass(slots=True, kw_only=True)
class Tally:
    """What there is to tell so far."""

    cases: Counter[str]
    codes: Counter[str]
    slowest_s: float
    findings: list[Outcome]

    @property
    def count(self) -> int:
        return sum(self.cases.values())

    def add(self, outcome: Outcome) -> None:
        self.cases[outcome.kind] += 1
        self.codes[f"{outcome.kind}: exit {outcome.code}"] += 1
        self.slowest_s = max(self.slowest_s, outcome.took_s)
        if outcome.wrong:
            self.findings.append(outcome)
            print(f"case {outcome.number}: {outcome.wrong}: {outcome.args}", flush=True)


def fuzzed(
    seed: int, cases: int, seconds: float, jobs: int, kinds: tuple[str, ...]
) -> Iterator[Outcome]:
    """All outcomes, in no order. A process that dies is a finding, and another goes on."""
    until_s = time.time() + seconds
    found: Any = multiprocessing.get_context("spawn").Queue()
    running: dict[int, tuple[Any, range]] = {}
    at: dict[int, int] = {}

    def start(numbers: range) -> None:
        process = multiprocessing.get_context("spawn").Process(
            target=_work, args=(seed, numbers, until_s, kinds, found)
        )
        process.start()
        running[process.pid or 0] = process, numbers

    for first in range(jobs):
        start(range(first, cases, jobs))
    while running:
        with contextlib.suppress(multiprocessing.queues.Empty):  # type: ignore[attr-defined]
            while True:
                told = found.get(timeout=1.0)
                if isinstance(told, Outcome):
                    yield told
                else:
                    at[told[0]] = told[1]
        for pid, (process, numbers) in list(running.items()):
            if process.is_alive() or not found.empty():
                continue
            del running[pid]
            if process.exitcode:
                number = at[pid]
                yield died(seed, number, kinds, process.exitcode)
                start(range(number + jobs, numbers.stop, jobs))


def died(seed: int, number: int, kinds: tuple[str, ...], code: int) -> Outcome:
    case = make_case(seed, number, kinds)
    return Outcome(
        number=number,
        kind=case.kind,
        args=case.args,
        code=code,
        took_s=0.0,
        grown_bytes=0,
        wrong=f"the process ended with {code}",
        said="",
    )


def again(seed: int, number: int, kinds: tuple[str, ...]) -> None:
    """One case, with its files left in a folder, and what it printed."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{seed}-{number}-"))
    case = make_case(seed, number, kinds)
    with contextlib.chdir(folder):
        outcome = run_case(case, number, folder)
    print(f"in {folder}: raybench {' '.join(map(repr, case.args))}")
    print(f"exit {outcome.code}, {outcome.took_s} s, {outcome.wrong or 'no finding'}")
    print(outcome.said)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case alone")
    parser.add_argument("--kinds", nargs="+", default=["jobs", "filters", "options", "parts"])
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    kinds = tuple(chosen.kinds)
    if chosen.only is not None:
        again(chosen.seed, chosen.only, kinds)
        return
    print(f"seed {chosen.seed}", flush=True)
    begun_s = time.time()
    tally = Tally(cases=Counter(), codes=Counter(), slowest_s=0.0, findings=[])
    for outcome in fuzzed(chosen.seed, chosen.cases, chosen.seconds, chosen.jobs, kinds):
        tally.add(outcome)
        if tally.count % 1000 == 0:
            print(f"{tally.count} cases, {time.time() - begun_s:.0f} s", flush=True)
            write(tally, chosen, time.time() - begun_s)
    print(f"{tally.count} cases, {len(tally.findings)} findings")
    write(tally, chosen, time.time() - begun_s)
    sys.exit(1 if tally.findings else 0)


def write(tally: Tally, chosen: argparse.Namespace, took_s: float) -> None:
    """Print what there is so far: a run of hours may be ended from outside."""
    result = {
        "commit": commit(),
        "seed": chosen.seed,
        "jobs": chosen.jobs,
        "kinds": chosen.kinds,
        "cases": tally.count,
        "cases_by_kind": dict(tally.cases),
        "exit_codes": dict(sorted(tally.codes.items())),
        "slowest_s": tally.slowest_s,
        "took_s": round(took_s, 1),
        "machine": machine(),
        "findings": [
            asdict(replace(outcome, said=without_paths(outcome.said))) for outcome in tally.findings
        ],
    }
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
