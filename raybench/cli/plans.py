"""`plan`: the points of a job, what they need and how long they may take; needs no cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raybench.cli.options import DeviceCount, Size, overrides_option
from raybench.cli.output import json_text, scalar_text, table_text, text_width, write_result
from raybench.job.memory import USABLE, explain_oom, gib
from raybench.job.point import Point
from raybench.report.plain_text import counted, printable

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.plan import Plan
    from raybench.job.point import Point
    from raybench.job.sections import BatchSearch, Isolation


SCHEMA_VERSION = 1  # of the JSON object that `plan` prints
# Of a point of ddp_scaling on H200s, beside its iterations.
_SET_UP_S = 0.55
# Each is an object of the imagined cluster: ten times as many take half a minute.
_MOST_DEVICES = 100_000


def load_plan(
    path: Path, overrides: Sequence[str] = (), expression: str | None = None
) -> tuple[Job, Plan]:
    """Load the job at `path`, with those of its points that `expression` keeps.

    Raises JobError and UsageError.
    """
    from raybench.job.model import load_job
    from raybench.job.plan import make_plan

    job = load_job(path, overrides)
    return job, select(make_plan(job), expression)


def select(plan: Plan, expression: str | None, option: str = "--filter") -> Plan:
    """Keep the points for which `expression` is true, or all. Raises UsageError."""
    if expression is None:
        return plan
    from raybench.job.filter import select_points

    return replace(plan, points=select_points(plan.points, expression, option))


def select_ids(plan: Plan, expression: str | None, option: str = "--filter") -> frozenset[str]:
    """Select the points for which `expression` is true, by their ids. Raises UsageError."""
    return frozenset(point.point_id for point in select(plan, expression, option).points)


def print_plan(
    job: Job,
    plan: Plan,
    as_json: bool,
    devices: int | None = None,
    nodes: int = 1,
    device_bytes: int | None = None,
) -> None:
    """Print the plan on stdout and its warnings on stderr.

    devices, nodes: for the estimate of the time. device_bytes: memory of a device.
    """
    missing = job.missing_module
    for warning in (*([job.explain(missing)] if missing else []), *plan.warnings):
        click.echo(printable(f"{warning} (warning)"), err=True)
    makespans = _makespans(job, plan, devices, nodes)
    if as_json:
        write_result(json_text(plan_as_json(job, plan, makespans)))
    else:
        write_result(plan_as_text(job, plan, makespans, device_bytes))


@click.command("plan")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@overrides_option
@click.option(
    "--filter", "expression", metavar="EXPR", help="Keep only the points for which EXPR is true."
)
@click.option(
    "--devices",
    type=DeviceCount(most=_MOST_DEVICES),
    help="Estimate the time on N devices, or on those that FILE names as for sweep; by default on "
    "as many as the largest point needs.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Nodes over which these devices are spread evenly.",
)
@click.option(
    "--device-memory",
    "device_bytes",
    type=Size(),
    help="Tell which points are estimated not to fit into so much memory of a device.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    job_file: Path,
    overrides: tuple[str, ...],
    expression: str | None,
    devices: int | None,
    nodes: int,
    device_bytes: int | None,
    as_json: bool,
) -> None:
    """Check JOB and print its points, the devices they need and the time they may take.

    \b
    raybench plan jobs/ddp_scaling.yaml --set matrix.world_size=1,2
    raybench plan jobs/ddp_scaling.yaml --filter "precision == 'bf16'"
    """
    job, plan = load_plan(job_file, overrides, expression)
    print_plan(job, plan, as_json, devices, nodes, device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Makespans:
    """The longest that the iterations of a plan take on some devices, by placement.isolation."""

    devices: int
    nodes: int
    at_most_s: Mapping[Isolation, float]


def _makespans(job: Job, plan: Plan, devices: int | None, nodes: int) -> _Makespans | None:
    """None where batch sizes are searched, or nothing is left of a run.

    Raises UsageError for nodes that cannot be equal.
    """
    from raybench.errors import UsageError
    from raybench.sweep.scheduler import imagine_devices, makespan_s

    devices = devices or _devices_needed(plan)
    if devices % nodes:
        raise UsageError(
            f"--nodes {nodes}: {counted(devices, 'device')} cannot be shared evenly; "
            "give --devices a multiple of --nodes"
        )
    if plan.batch_search or not plan.points:
        return None
    point_s = _point_at_most_s(job)
    there = imagine_devices(devices, nodes)
    isolations: tuple[Isolation, ...] = ("cluster", "node", "device")
    return _Makespans(
        devices=devices,
        nodes=nodes,
        at_most_s={
            isolation: job.measure.rounds * makespan_s(plan, lambda _: point_s, there, isolation)
            for isolation in isolations
        },
    )


def plan_as_json(job: Job, plan: Plan, makespans: _Makespans | None) -> dict[str, Any]:
    """Give the plan as `raybench plan --json` prints it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "job": job.name,
        "workload": job.workload.kind,
        "points": [_point_as_json(point) for point in plan.points],
        "batch_search": plan.batch_search and plan.batch_search.model_dump(),
        "devices_needed": _devices_needed(plan),
        "time_at_least_s": time_at_least_s(job, plan),
        "time_at_most_s": time_at_most_s(job, plan),
        "makespan_at_most_s": makespans
        and {"devices": makespans.devices, "nodes": makespans.nodes, **makespans.at_most_s},
        "warnings": list(plan.warnings),
    }


def _point_as_json(point: Point) -> dict[str, Any]:
    from raybench.job.memory import estimate

    found = estimate(point)
    needed = {"mem_estimate_bytes": found} if found else {}
    return {"point_id": point.point_id, **point.settings, **needed}


def time_at_most_s(job: Job, plan: Plan) -> float | None:
    """Compute the budget of all iterations in seconds; building workloads and groups is not in it.

    None where batch sizes are searched: nobody knows how many points that takes.
    """
    if plan.batch_search:
        return None
    return job.measure.rounds * len(plan.points) * _point_at_most_s(job)


def time_at_least_s(job: Job, plan: Plan) -> float | None:
    """Compute what the iterations take where the first look finds steps steady and known."""
    measure = job.measure
    if plan.batch_search:
        return None
    return measure.rounds * len(plan.points) * measure.repeats * measure.least_s


def _more_rounds_s(job: Job, plan: Plan) -> float:
    """Compute what WORTHWHILE would take beside what the job takes; 0 where it has as many."""
    from raybench.sweep.rounds import BETWEEN_ROUNDS_S, WORTHWHILE

    measure = job.measure
    iterations_s = len(plan.points) * measure.repeats * measure.least_s
    each_s = iterations_s + len(plan.points) * _SET_UP_S + BETWEEN_ROUNDS_S
    return max(0, WORTHWHILE - measure.rounds) * each_s


def _devices_needed(plan: Plan) -> int:
    return max((point.devices_needed for point in plan.points), default=0)


def _point_at_most_s(job: Job) -> float:
    return min(job.measure.repeats * job.measure.max_seconds, job.measure.timeout_s)


def plan_as_text(
    job: Job, plan: Plan, makespans: _Makespans | None, device_bytes: int | None = None
) -> str:
    """Show the plan as a table of what varies, below what does not, above what it needs."""
    from raybench.job.memory import estimate
    from raybench.job.plan import varying_settings
    from raybench.job.point import RUN_SETTINGS, UNEVEN

    varying = varying_settings(plan.points)
    told = plan.points[0].settings_as_given
    searched = {"batch_size"} if plan.batch_search else set()
    usual = {name for name in UNEVEN if told.get(name) == RUN_SETTINGS[name].default}
    left_out = {*varying, *searched, *usual}
    same = " ".join(f"{n}={scalar_text(value)}" for n, value in told.items() if n not in left_out)
    estimates = [estimate(point) for point in plan.points]
    paragraphs = [
        f"{job.name}: workload {job.workload.kind}",
        _wrap(f"in all points: {same}"),
        *([_search_text(plan.batch_search)] if plan.batch_search else []),
        "",
        _point_table(plan, varying, memory_column(estimates) if any(estimates) else []),
        _needs(job, plan),
        *map(_wrap, memory_lines(plan.points, estimates, device_bytes)),
        *([_makespans_as_text(plan, makespans)] if makespans else []),
    ]
    return "\n".join(paragraphs) + "\n"


def _point_table(plan: Plan, varying: Sequence[str], needs: Sequence[str]) -> str:
    """Lay out the points, with the estimates of their memory where there is room."""
    rows = [
        [
            str(number),
            point.point_id,
            *(scalar_text(point.settings[name]) for name in varying),
            *needs[number - 1 : number],
        ]
        for number, point in enumerate(plan.points, start=1)
    ]
    table = table_text(["#", "point_id", *varying, *(["est. GiB"] if needs else [])], rows)
    is_too_wide = needs and max(map(len, table.splitlines())) > text_width()
    return _point_table(plan, varying, []) if is_too_wide else table


def _wrap(text: str) -> str:
    return click.wrap_text(text, text_width(), subsequent_indent="  ")


def _search_text(search: BatchSearch) -> str:
    doubled = [search.start, 2 * search.start]
    first = [str(batch) for batch in doubled if search.max is None or batch <= search.max]
    most = "" if search.max is None else f" or {search.max} is reached"
    return _wrap(
        f"batch_size: {', '.join(first)}, ... until memory runs out{most}, then bisected to the "
        "largest that fits; below: the first point of each series"
    )


def _needs(job: Job, plan: Plan) -> str:
    count, seconds = len(plan.points), _duration(_point_at_most_s(job))
    needed = f"the largest needs {counted(_devices_needed(plan), 'device')}"
    measure = job.measure
    least_s = measure.least_s
    least = f"{least_s:.3g} to" if least_s else "at most"
    rounds = f"{measure.rounds} rounds x " if measure.rounds > 1 else ""
    each = f"{counted(measure.repeats, 'repeat')} of {least} {measure.max_seconds:g} s"
    # Warm-up takes half of the budget at most.
    fitting_s = measure.max_seconds / 2 / measure.iterations.min
    more = (
        f"steps above {fitting_s:.3g} s take longer: "
        f"{counted(measure.iterations.min, 'iteration')} are timed in any case; "
        "set-up and the first step of each point take additional time, and a point is stopped "
        f"after {measure.timeout_s:g} s"
    )
    if plan.batch_search:
        return "\n".join(
            [
                f"{count} series; {needed}",
                _wrap(
                    f"iterations: at most {seconds} a point; the number of points is known when "
                    f"the sweep has ended; {more}"
                ),
            ]
        )
    total = _duration(measure.rounds * count * _point_at_most_s(job))
    if at_least_s := time_at_least_s(job, plan):
        total = f"{_duration(at_least_s)} to {total}"
    else:
        total = f"at most {total}"
    return "\n".join(
        [
            f"{counted(count, 'point')}; {needed}",
            _wrap(f"iterations: {total} ({rounds}{counted(count, 'point')} x {each}); {more}"),
            *_rounds_would(job, plan),
        ]
    )


def _rounds_would(job: Job, plan: Plan) -> list[str]:
    """Say in a line what more rounds would cost; they give the report its intervals."""
    from raybench.sweep.rounds import WORTHWHILE

    if not (more_s := _more_rounds_s(job, plan)):
        return []
    cost = f"measure.rounds={WORTHWHILE} would take about {_duration(more_s)} more"
    return [_wrap(f"{cost}, and the report would have intervals")]


def _makespans_as_text(plan: Plan, makespans: _Makespans) -> str:
    where = f"{counted(makespans.devices, 'device')} of {counted(makespans.nodes, 'node')}"
    each = (f"{_duration(seconds)} ({name})" for name, seconds in makespans.at_most_s.items())
    text = f"on {where}, by placement.isolation, at most: {', '.join(each)}"
    if too_big := sum(point.world_size > makespans.devices for point in plan.points):
        text += f"; without {counted(too_big, 'point')} that cannot run there"
    return _wrap(text)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if minutes < 100 else f"{minutes / 60:.3g} h"


_MOST_EXPLAINED = 3

Estimates = Sequence[int | None]


def memory_column(estimates: Estimates) -> list[str]:
    """Write the estimate of each point in GiB; empty where there is none."""
    return [gib(found) if found else "" for found in estimates]


def memory_lines(
    points: Sequence[Point], estimates: Estimates, device_bytes: int | None
) -> Iterator[str]:
    """Say in a sentence how much points need, and of those that do not fit what would."""
    known = [found for found in estimates if found]
    if not known:
        return
    least, most = gib(min(known)), gib(max(known))
    span = most if least == most else f"{least} to {most}"
    text = f"memory: estimated {span} GiB a device"
    if device_bytes is None:
        yield f"{text}; --device-memory SIZE tells which points do not fit"
        return
    room = USABLE * device_bytes
    too_big = [
        (number, point, found)
        for number, (point, found) in enumerate(zip(points, estimates, strict=True), start=1)
        if found and found > room
    ]
    numbers = ", ".join(f"#{number}" for number, *_ in too_big)
    fits = f"do not fit into {gib(device_bytes)} GiB, and run all the same: {numbers}"
    yield f"{text}; {fits if too_big else f'all fit into {gib(device_bytes)} GiB'}"
    for number, point, found in too_big[:_MOST_EXPLAINED]:
        yield f"#{number}: {explain_oom(point, found, device_bytes)}"
