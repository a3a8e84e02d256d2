"""Run `bare_step` by torchrun, in processes of its own, and read what it answers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from raybench.job.point import Scalar

_TIMEOUT_S = 300.0
# torchrun takes its ranks down when it is told to end, and waits 30 s for them.
_END_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BareStep:
    """What is timed, on how many ranks of this host.

    indexes: the device of each rank, as torch counts; one per rank, whatever it is on a CPU.
    """

    device: Literal["cuda", "cpu"]
    indexes: tuple[int, ...]
    workload: str
    params: Mapping[str, Scalar]
    precision: str
    batch_size: int
    warmup: int
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BareAnswer:
    """What one start of torchrun gave.

    step_ms_p50: median over iterations of the slowest rank's step. iterations_s: how long warm-up
    and timed steps took. devices: UUIDs by rank, empty on a CPU.
    """

    step_ms_p50: float
    iterations_s: float
    devices: Sequence[str]
    environment: Mapping[str, str]
    niceness: int


class TorchrunError(Exception):
    """torchrun did not answer; the text says why, in one line."""


def run_bare(step: BareStep, environment: Mapping[str, str]) -> BareAnswer:
    """One start of torchrun with exactly this environment. Raises TorchrunError."""
    with tempfile.TemporaryDirectory(prefix="raybench-bare-") as folder:
        output = Path(folder) / "answer.json"
        spec = json.dumps({**asdict(step), "output": str(output)})
        errors = _execute([*_command(len(step.indexes)), spec], environment)
        try:
            answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TorchrunError(_cause(errors)) from None
    return BareAnswer(**answer)


def _command(processes: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={processes}", "-m", "raybench.doctor.bare_step"]


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run it; what was said on stderr. However this ends, no rank stays behind."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C is for raybench, which ends torchrun below.
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=_TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
        raise TorchrunError(f"torchrun did not end within {_TIMEOUT_S:.0f} s") from None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _cause(errors: str) -> str:
    """Find the exception of a rank: torchrun prints tracebacks of its own below it."""
    lines = [line.split("]:", 1)[-1].strip() for line in errors.splitlines()]
    told = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return next(iter(told), next(reversed([line for line in lines if line]), "no answer"))
