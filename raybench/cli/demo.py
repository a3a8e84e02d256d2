"""`raybench sweep --demo`: a tour of the jobs that come with raybench, cut to this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raybench.cli.output import color, make_console, say, width, write_file, write_result
from raybench.errors import NothingFitsError
from raybench.job.catalog import Template, template
from raybench.results.run import Run, RunStatus
from raybench.sweep.messages import command

if TYPE_CHECKING:
    from rich.console import Console

    from raybench.report.tour import Answer
    from raybench.sweep.run_state import RunTarget

PAGE = "demo.html"
# Of each point; what makes a figure doubtful is marked as in any run.
_SHORT = ("measure.max_seconds=2",)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A job of the tour, with what is left out of it: on all machines, and on GPUs."""

    name: str
    shorter: tuple[str, ...] = ()
    on_gpus: tuple[str, ...] = ()

    def overrides(self, job: Template, *, is_on_cpus: bool) -> tuple[str, ...]:
        """List what is set of the job."""
        cut = job.cut if is_on_cpus else self.on_gpus
        return (*cut, *_SHORT, *self.shorter)


STOPS = (
    Stop(name="gemm", on_gpus=("matrix.precision=fp32,bf16",)),
    Stop(name="memory_bandwidth", shorter=("matrix.operation=triad",)),
    Stop(
        name="ddp_scaling",
        shorter=("matrix.precision=fp32", "matrix.batch_size=64,256"),
    ),
    Stop(name="ddp_linear", shorter=("matrix.world_size=1",)),
    Stop(
        name="grad_accumulation",
        shorter=("matrix.grad_accumulation=1,8",),
        on_gpus=("matrix.world_size=1,2,4",),
    ),
    Stop(name="collectives", shorter=("matrix.operation=all_reduce", "exclude=[]")),
)


def run_tour(where: RunTarget, stops: Sequence[Stop] = STOPS) -> int:
    """Run the jobs one after the other, print what they found, and write the page; the exit code.

    A job none of whose points fits the cluster is left out. Raises ClusterError where there is no
    cluster, where others use it, and where no job fits.
    """
    console = make_console()
    answers: list[Answer] = []
    runs: list[Run] = []
    for number, stop in enumerate(stops, start=1):
        job = template(stop.name)
        say(console, f"{number} of {len(stops)}: {job.question}")
        try:
            run = _run(job, stop.overrides(job, is_on_cpus=where.is_on_cpus), where, console)
        except NothingFitsError as error:
            if number == len(stops) and not runs:
                raise
            # One device has nobody to exchange data with.
            say(console, f"left out: {error}")
            continue
        if run.status is RunStatus.INTERRUPTED:
            return 130
        runs.append(run)
        answers.append(_answer(job, run, where))
    _show(answers, where)
    return int(any(run.status is not RunStatus.OK for run in runs))


def _run(job: Template, overrides: tuple[str, ...], where: RunTarget, console: Console) -> Run:
    from raybench.cli.output import ConsoleListener
    from raybench.job.plan import make_plan
    from raybench.sweep.run_state import start_run
    from raybench.sweep.runner import run_sweep

    loaded = job.load(overrides)
    start = start_run(
        loaded,
        make_plan(loaded),
        argv=("raybench", *sys.argv[1:], *(word for one in overrides for word in ("--set", one))),
        tags={},
        # A tour is short, and begun anew.
        resume_command=lambda _: command("sweep", "--demo"),
    )
    return run_sweep(loaded, start, where, ConsoleListener(console))


def _answer(job: Template, run: Run, where: RunTarget) -> Answer:
    from raybench.cli.results import load_summary
    from raybench.report.tour import Answer
    from raybench.results import reader

    return Answer(
        question=job.question,
        template=job.name,
        results=where.output,
        summary=load_summary(where.output, run.run_id),
        devices=reader.load(where.output, "devices", run.run_id),
    )


def _show(answers: Sequence[Answer], where: RunTarget) -> None:
    from raybench.report.html.tour import format_page
    from raybench.report.text.terminal import render
    from raybench.report.tour import tour_blocks

    path = where.output / PAGE
    write_file(path, format_page(answers).encode())
    text = render(tour_blocks(answers), width=width(), color=color())
    write_result(f"{text.lstrip()}\nwith pictures and tables, for a browser: {path}\n")
