"""`plan`: the points of a job, what they need and how long they may take; needs no cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raybench.cli.options import Size, json_option, overrides_option
from raybench.cli.output import json_text, scalar_text, table_text, text_width, write_result
from raybench.job.registry import USABLE, estimate, explain_oom, gib
from raybench.report.formatting import counted, printable

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.plan import Plan

SCHEMA_VERSION = 1  # of the JSON object that `plan` prints
# Of a point of ddp_scaling on H200s, beside its iterations.
_SET_UP_S = 0.55
_MOST_EXPLAINED = 3


def select(plan: Plan, expression: str | None, option: str = "--filter") -> Plan:
    """Return the plan with the points for which `expression` is true; all for None.

    Raises UsageError where the expression is wrong or selects no point; `option` names it.
    """
    if expression is None:
        return plan
    from raybench.job.plan import select_points

    return replace(plan, points=select_points(plan.points, expression, option))


def select_ids(plan: Plan, expression: str | None, option: str = "--filter") -> frozenset[str]:
    """Return the ids of the points that `select` keeps; raises UsageError as it does."""
    return frozenset(point.point_id for point in select(plan, expression, option).points)


@click.command("plan")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@overrides_option
@click.option(
    "--filter", "expression", metavar="EXPR", help="Keep only the points for which EXPR is true."
)
@click.option(
    "--device-memory",
    "device_bytes",
    type=Size(),
    help="Tell which points are estimated not to fit into so much memory of a device.",
)
@json_option
def plan_command(
    job_file: Path,
    overrides: tuple[str, ...],
    expression: str | None,
    device_bytes: int | None,
    as_json: bool,
) -> None:
    """Check JOB and print its points, the devices they need and the time they may take.

    \b
    raybench plan jobs/ddp_scaling.yaml --set matrix.world_size=1,2
    raybench plan jobs/ddp_scaling.yaml --filter "precision == 'bf16'"
    """
    from raybench.job.model import load_job
    from raybench.job.plan import make_plan

    job = load_job(job_file, overrides)
    print_plan(job, select(make_plan(job), expression), as_json, device_bytes)


def print_plan(job: Job, plan: Plan, as_json: bool, device_bytes: int | None = None) -> None:
    """Print the plan on stdout and its warnings on stderr.

    device_bytes: memory of a device; None: fits are not told.
    """
    for warning in plan.warnings:
        click.echo(printable(f"{warning} (warning)"), err=True)
    estimates = [estimate(point) for point in plan.points]
    if as_json:
        write_result(json_text(_plan_as_json(job, plan, estimates)))
    else:
        write_result("\n".join(_paragraphs(job, plan, estimates, device_bytes)) + "\n")


def _plan_as_json(job: Job, plan: Plan, estimates: Sequence[int | None]) -> dict[str, Any]:
    """Return the JSON object of a plan. estimates: bytes on a device, for each point."""
    least_s, most_s = _iterations_s(job, plan)
    return {
        "schema_version": SCHEMA_VERSION,
        "job": job.name,
        "workload": job.workload.kind,
        "points": [
            {
                "point_id": point.point_id,
                **point.settings,
                **({"mem_estimate_bytes": needed} if needed else {}),
            }
            for point, needed in zip(plan.points, estimates, strict=True)
        ],
        "batch_search": plan.batch_search and plan.batch_search.model_dump(),
        "devices_needed": max((point.devices_needed for point in plan.points), default=0),
        "time_at_least_s": least_s,
        "time_at_most_s": most_s,
        "warnings": list(plan.warnings),
    }


def _iterations_s(job: Job, plan: Plan) -> tuple[float | None, float | None]:
    """Return the least and the most seconds of all iterations; (None, None) for a batch search.

    The least holds where the first look finds steps steady and known. Building workloads and groups
    comes on top. How many points a search takes is not known before.
    """
    if plan.batch_search:
        return None, None
    measure = job.measure
    trials = measure.rounds * len(plan.points)
    return trials * measure.repeats * measure.least_s, trials * _point_at_most_s(job)


def _point_at_most_s(job: Job) -> float:
    """Return the longest time of the iterations of one point, in seconds."""
    return min(job.measure.repeats * job.measure.max_seconds, job.measure.timeout_s)


def _paragraphs(
    job: Job, plan: Plan, estimates: Sequence[int | None], device_bytes: int | None
) -> Iterator[str]:
    """Yield the settings that all points share, a table of the others, and what they need."""
    from raybench.job.plan import varying_settings
    from raybench.job.point import RUN_SETTINGS, UNEVEN

    varying = varying_settings(plan.points)
    shared = plan.points[0].settings_as_given
    usual = {name for name in UNEVEN if shared.get(name) == RUN_SETTINGS[name].default}
    left_out = {*varying, *usual, *({"batch_size"} if plan.batch_search else ())}
    same = " ".join(f"{n}={scalar_text(value)}" for n, value in shared.items() if n not in left_out)
    yield f"{job.name}: workload {job.workload.kind}"
    yield _wrap(f"in all points: {same}")
    if search := plan.batch_search:
        doubled = [search.start, 2 * search.start]
        first = [str(batch) for batch in doubled if search.max is None or batch <= search.max]
        most = "" if search.max is None else f" or {search.max} is reached"
        yield _wrap(
            f"batch_size: {', '.join(first)}, ... until memory runs out{most}, then bisected to "
            "the largest that fits; below: the first point of each series"
        )
    yield ""
    needs = [gib(found) if found else "" for found in estimates]
    table = _point_table(plan, varying, needs if any(needs) else [])
    if max(map(len, table.splitlines())) > text_width():
        table = _point_table(plan, varying, [])
    yield table
    yield from map(_wrap, _needs(job, plan))
    yield from map(_wrap, _memory_lines(plan, estimates, device_bytes))


def _point_table(plan: Plan, varying: Sequence[str], needs: Sequence[str]) -> str:
    """Return the table of the points. needs: GiB of each; empty: without that column."""
    rows = [
        [
            str(number),
            point.point_id,
            *(scalar_text(point.settings[name]) for name in varying),
            *needs[number - 1 : number],
        ]
        for number, point in enumerate(plan.points, start=1)
    ]
    return table_text(["#", "point_id", *varying, *(["est. GiB"] if needs else [])], rows)


def _needs(job: Job, plan: Plan) -> Iterator[str]:
    """Yield how many points and devices there are, the time, and what more rounds would take."""
    from raybench.sweep.scheduler import BETWEEN_ROUNDS_S, WORTHWHILE

    measure, count = job.measure, len(plan.points)
    devices = max((point.devices_needed for point in plan.points), default=0)
    needed = f"the largest needs {counted(devices, 'device')}"
    # Warm-up takes half of the budget at most.
    fitting_s = measure.max_seconds / 2 / measure.iterations.min
    more = (
        f"steps above {fitting_s:.3g} s take longer: "
        f"{counted(measure.iterations.min, 'iteration')} are timed in any case; "
        "set-up and the first step of each point take additional time, and a point is stopped "
        f"after {measure.timeout_s:g} s"
    )
    least_s, most_s = _iterations_s(job, plan)
    if least_s is None or most_s is None:
        yield f"{count} series; {needed}"
        yield (
            f"iterations: at most {_duration(_point_at_most_s(job))} a point; the number of points "
            f"is known when the sweep has ended; {more}"
        )
        return
    total = f"{_duration(least_s)} to" if least_s else "at most"
    least = f"{measure.least_s:.3g} to" if measure.least_s else "at most"
    rounds = f"{measure.rounds} rounds x " if measure.rounds > 1 else ""
    each = f"{counted(measure.repeats, 'repeat')} of {least} {measure.max_seconds:g} s"
    yield f"{counted(count, 'point')}; {needed}"
    product = f"{rounds}{counted(count, 'point')} x {each}"
    yield f"iterations: {total} {_duration(most_s)} ({product}); {more}"
    if measure.rounds < WORTHWHILE:
        one_round_s = least_s / measure.rounds + count * _SET_UP_S + BETWEEN_ROUNDS_S
        more_s = (WORTHWHILE - measure.rounds) * one_round_s
        yield (
            f"measure.rounds={WORTHWHILE} would take about {_duration(more_s)} more, and the "
            "report would have intervals"
        )


def _wrap(text: str) -> str:
    return click.wrap_text(text, text_width(), subsequent_indent="  ")


def _duration(seconds: float) -> str:
    """Write a time with three digits in s, min or h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if minutes < 100 else f"{minutes / 60:.3g} h"


def _memory_lines(
    plan: Plan, estimates: Sequence[int | None], device_bytes: int | None
) -> Iterator[str]:
    """Yield how much memory points need, and what would fit of the first that do not."""
    known = [found for found in estimates if found]
    if not known:
        return
    least, most = gib(min(known)), gib(max(known))
    text = f"memory: estimated {most if least == most else f'{least} to {most}'} GiB a device"
    if device_bytes is None:
        yield f"{text}; --device-memory SIZE tells which points do not fit"
        return
    too_big = [
        (number, point, found)
        for number, (point, found) in enumerate(zip(plan.points, estimates, strict=True), start=1)
        if found and found > USABLE * device_bytes
    ]
    numbers = ", ".join(f"#{number}" for number, *_ in too_big)
    fits = f"do not fit into {gib(device_bytes)} GiB, and run all the same: {numbers}"
    yield f"{text}; {fits if too_big else f'all fit into {gib(device_bytes)} GiB'}"
    for number, point, found in too_big[:_MOST_EXPLAINED]:
        yield f"#{number}: {explain_oom(point, found, device_bytes)}"
