"""Random job files and filters, given to `raybench plan`.

    python -m benchmarks.fuzz [--cases 50000] [--seconds 600] [--seed N] [--jobs 2] [-o FILE.json]
    python -m benchmarks.fuzz --seed N --only 4711        # one case again, with what it prints

The commands run in processes of the fuzzer. A finding is a traceback, an exit code that is none of
a mistake, more than 5 s of processor time, 500 MB more memory than before, or a dead process. Each
case follows from the seed and its number alone. Exit code 1 where there was a finding.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from benchmarks.common import REPOSITORY, options, write_result
from raybench import cli

MOST_S, MOST_BYTES = 5.0, 500e6
# A case that hangs is ended after so long.
HANG_S = 60
CHUNK = 100
NASTY = (
    *("", " ", "0", "-1", "1e400", "nan", "inf", "-0.0", "1_000", "0x" + "f" * 5000, "9" * 5000),
    *("true", "null", "~", "no", "[]", "{}", "[[]]", "{a: {b: {c: 1}}}", "&a [*a, *a]", "*a"),
    *("!!python/object:os.system x", "!!binary aGk=", "2026-11-22", "|", ">", "'", '"', "%", "@"),
    *("\x00", "\x1b[31m", "\u202e", "\ud7ff", "\U0001f600", "a" * 10_000, "../../etc", "/dev/null"),
    *("torch:nn", "x:y", ":", "mlp", "collective", "no_such_module:Class", "bf16", "fp8", "cuda"),
    *("=1+1", "-o", "--", "latest", "%s%n", "${HOME}", "$(id)", "`id`", "<b>", "|x|", "1:2:3"),
)
NAMES = ("world_size", "batch_size", "precision", "hidden", "layers", "workload", "x", "params")
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "<", "<=", "==", "!=")
WORDS = (" and ", " or ", " in ", " not in ", " is ", " is not ", " if 1 else ")
JOB = """\
version: 1
name: small
workload: {kind: mlp, hidden: 8, layers: 1}
matrix: {world_size: [1, 2], precision: [fp32, bf16], batch_size: [4, 8]}
baseline: {world_size: 1}
"""


class Outcome(NamedTuple):
    """What became of a case. wrong: why it is a finding; empty where it is none."""

    number: int
    args: tuple[str, ...]
    code: int
    wrong: str
    said: str


class HungError(BaseException):
    """Raised in a case that takes too long: no `except Exception` of it catches this."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case alone")
    chosen = parser.parse_args()
    if chosen.only is not None:
        [outcome] = run_cases(chosen.seed, range(chosen.only, chosen.only + 1), float("inf"))
        print(f"raybench {outcome.args}\n{outcome.said}\n{outcome.code} {outcome.wrong}")
        return
    print(f"seed {chosen.seed}", flush=True)
    begun_s = time.time()
    codes: Counter[str] = Counter()
    findings: list[Any] = []
    chunks = [range(n, min(n + CHUNK, chosen.cases)) for n in range(0, chosen.cases, CHUNK)]
    until_s = begun_s + chosen.seconds
    with ProcessPoolExecutor(chosen.jobs) as pool:
        running = {pool.submit(run_cases, chosen.seed, each, until_s): each for each in chunks}
        for future in as_completed(running):
            try:
                outcomes = future.result()
            except BrokenProcessPool:
                findings.append({"wrong": f"a process died; unfinished: {running[future]}"})
                continue
            codes.update(f"exit {outcome.code}" for outcome in outcomes)
            for outcome in outcomes:
                if outcome.wrong:
                    findings.append(outcome._asdict())
                    print(f"case {outcome.number}: {outcome.wrong}: {outcome.args}", flush=True)
    result = {"seed": chosen.seed, "cases": codes.total(), "exit_codes": dict(codes)}
    took_s = round(time.time() - begun_s)
    write_result({**result, "took_s": took_s, "findings": findings}, chosen.output)
    sys.exit(bool(findings))


def run_cases(seed: int, numbers: range, until_s: float) -> list[Outcome]:
    """Run cases in this process, in a folder of their own, until the time is up."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder, contextlib.chdir(folder):
        os.environ["HOME"] = folder
        # What is imported once is no part of a case.
        with contextlib.redirect_stderr(io.StringIO()):
            called(("plan", "nothing.yaml"))
        return [run_case(seed, number) for number in numbers if time.time() < until_s]


def run_case(seed: int, number: int) -> Outcome:
    chance = random.Random(f"{seed}:{number}")
    content, more = chance.choice((mutated_job, filtered_job))(chance)
    Path("job.yaml").write_bytes(content)
    # As a shell can give it: without NUL.
    args = ("plan", "job.yaml", *(each.replace("\x00", "\\0") for each in more))
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun_s = time.process_time()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = called(args)
    took_s = time.process_time() - begun_s
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 2**10
    said = stderr.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
    wrong = {
        f"more than {HANG_S} s": code == -1,
        "traceback": "Traceback (most recent call last)" in said,
        f"exit code {code}": code not in (0, 1, 2, 3),
        f"{took_s:.1f} s": took_s > MOST_S,
        f"{grown / 1e6:.0f} MB": grown > MOST_BYTES,
    }
    return Outcome(
        number, args, code, next((why for why, is_so in wrong.items() if is_so), ""), said
    )


def called(args: tuple[str, ...]) -> int:
    """Run the command in this process; its exit code, -1 where it hung and -2 where it raised."""

    def end(_: int, __: FrameType | None) -> None:
        raise HungError

    argv, sys.argv = sys.argv, ["raybench", *args]
    signal.signal(signal.SIGALRM, end)
    signal.alarm(HANG_S)
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except HungError:
        return -1
    except BaseException:
        traceback.print_exc()
        return -2
    finally:
        signal.alarm(0)
        sys.argv = argv
    return 0


@cache
def jobs() -> tuple[str, ...]:
    paths = [*(REPOSITORY / "jobs").glob("*.yaml"), REPOSITORY / "raybench/job_template.yaml"]
    return tuple(path.read_text(encoding="utf-8") for path in sorted(paths))


def mutated_job(chance: random.Random) -> tuple[bytes, list[str]]:
    """Return a job file with some mistakes, and options of `plan`."""
    text = chance.choice(jobs())
    for _ in range(chance.randint(1, 6)):
        text = mutated(chance, text)
    content = bytearray(text.encode("utf-8", "surrogatepass") or b"\0")
    if chance.random() < 0.1:
        for _ in range(chance.randint(1, 8)):
            content[chance.randrange(len(content))] = chance.randrange(256)
    more = ["--json"] if chance.random() < 0.2 else []
    if chance.random() < 0.2:
        key = chance.choice(("matrix.world_size", "measure", "workload.hidden", "name", "zip", ""))
        more += ["--set", f"{key}={chance.choice(NASTY)}"]
    return bytes(content), more


def mutated(chance: random.Random, text: str) -> str:
    """Change one line, word or place of it, or add something deeply nested."""
    lines = text.splitlines(keepends=True) or [""]
    words = text.split(" ")
    line, word = chance.randrange(len(lines)), chance.randrange(len(words))
    place = chance.randrange(len(text) + 1)
    opening, closing = chance.choice(("[]", "{}"))
    depth, nasty = chance.choice((10, 100, 1000)), chance.choice(NASTY)
    key = lines[line].partition(":")[0]
    indent = chance.choice(("  ", "\t", "- ", "# "))
    choices = (
        "".join(lines[:line] + lines[line + 1 :]),
        "".join([*lines[:line], chance.choice(lines), *lines[line:]]),
        "".join([*lines[:line], indent, *lines[line:]]),
        "".join([*lines[:line], f"{key}: {nasty}\n", *lines[line + 1 :]]),
        " ".join([*words[:word], nasty, *words[word + 1 :]]),
        " ".join([*words[:word], chance.choice(words), *words[word + 1 :]]),
        text[:place],
        text[:place] + nasty + text[place:],
        f"{text}\nx{depth}: {opening * depth}{closing * depth}\n",
    )
    return chance.choice(choices)


def filtered_job(chance: random.Random) -> tuple[bytes, list[str]]:
    """Return a job file that is right, and a filter of its points."""
    text = expression(chance, chance.randint(0, 5))
    if chance.random() < 0.5:
        text = f"{chance.choice(NAMES[:4])} {chance.choice(OPERATORS[-5:])} {text}"
    if chance.random() < 0.15:
        place = chance.randrange(len(text) + 1)
        text = text[:place] + chance.choice(NASTY) + text[place:]
    job = JOB if chance.random() < 0.9 else chance.choice(jobs())
    return job.encode(), ["--filter", text]


def expression(chance: random.Random, depth: int) -> str:
    if depth <= 0:
        return chance.choice(
            (*NAMES, "1", "-2", "0", "1e308", "'bf16'", "'x'", "None", "True", "[]")
        )
    left, right = (expression(chance, depth - chance.randint(1, 2)) for _ in range(2))
    forms = (
        f"{left} {chance.choice(OPERATORS)} {right}",
        f"({left}){chance.choice(WORDS)}({right})",
        f"[{left}, {right}]",
        f"({left},) * {right}",
        f"{left}[{right}]",
        f"{left}[{right}:]",
        f"not {left}",
        f"-{left}",
        f"~({left})",
        f"{left}.{right}",
        f"{left}({right})",
        f"[x for x in {left}]",
        f"lambda: {left}",
        f"{{{left}: {right}}}",
        f"f'{{{left}}}'",
        f"({left} := {right})",
        f"{left} if {right} else {left}",
    )
    return chance.choice(forms)


if __name__ == "__main__":
    main()
