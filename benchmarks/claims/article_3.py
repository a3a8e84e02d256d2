"""DistributedDataParallel with Linear(1024, 1)."""

from __future__ import annotations

from benchmarks.claims import runs
from benchmarks.claims.measured import (
    Row,
    count,
    memory,
    rate,
    ratio,
    row,
    rows,
    scale,
    select,
    speed_up,
    step,
    table,
    versions,
    wall_clock,
)
from benchmarks.claims.model import Article, Case, Claim, Figure, at_least, at_most, near

_ROWS, _EPOCHS = 10_000, 5
_PUBLISHED_S = {1: 28.5, 2: 15.2, 4: 8.7}
_LOADERS = {
    "rows on the GPU": {"data": "device"},
    "loader in the training process": {"data": "dataloader", "num_workers": 0},
    "2 loader processes, pinned": {"data": "dataloader", "num_workers": 2},
}


def _epochs(name: str, gpus: int) -> Figure:
    """Seconds for the epochs, all GPUs together going once through the rows in each."""
    throughput = rate(runs.LINEAR, world_size=gpus, **_LOADERS[name])
    return scale(throughput, lambda samples_s: _ROWS * _EPOCHS / samples_s, "s")


def _seconds() -> list[Case]:
    return [
        Case(
            name=f"{gpus} GPU{'s' * (gpus > 1)}, {name}",
            figure=_epochs(name, gpus),
            rule=near(published),
        )
        for name in _LOADERS
        for gpus, published in _PUBLISHED_S.items()
    ]


def _speed_ups() -> list[Case]:
    return [
        Case(
            name=f"{gpus} GPUs, {name}",
            figure=speed_up(runs.LINEAR, world_size=gpus, **loader),
            rule=near(_PUBLISHED_S[1] / _PUBLISHED_S[gpus]),
        )
        for name, loader in _LOADERS.items()
        for gpus in (2, 4)
    ]


def _largest() -> list[Case]:
    tried = table("points", runs.LARGEST)
    plain = tried[[one["activation_checkpointing"] == "false" for one in tried.params]]
    fits, not_ = (plain[plain.status == status].batch_size for status in ("ok", "oom"))
    return [
        Case(name="largest batch that ran", figure=count(fits.max(), runs.LARGEST)),
        Case(name="smallest that was out of memory", figure=count(not_.min(), runs.LARGEST)),
    ]


def _devices() -> list[Case]:
    found = table("devices", runs.LINEAR)
    return [
        Case(
            name="distinct UUIDs, of 4 ranks",
            figure=count(found.uuid.nunique(), runs.LINEAR),
            rule=at_least(4),
        )
    ]


def _transports() -> list[Case]:
    ways = {way for one in rows(runs.UNEVEN) for way in one["transports"] or ()}
    return [
        Case(
            name="way of the bytes, by NCCL's log",
            figure=count(len(ways), runs.UNEVEN, text=", ".join(sorted(ways))),
        )
    ]


def _blocking() -> list[Case]:
    """Set the step where the host waits for each collective over the step where it does not."""
    settings = [
        {"TORCH_NCCL_BLOCKING_WAIT": waits, "NCCL_P2P_DISABLE": disabled}
        for waits, disabled in ((0, 0), (1, 0), (0, 1))
    ]
    plain, blocking, indirect = (step(runs.ENVIRONMENT, **one) for one in settings)
    issued = wall_clock(runs.ENVIRONMENT, "unsynced", **settings[1])
    return [
        Case(name="step, blocking over not", figure=ratio(blocking, plain), rule=at_most(1)),
        Case(name="until the host has issued it, blocking, over the step", figure=issued),
        Case(name="step by way of the host's memory", figure=ratio(indirect, plain)),
    ]


def _loader_processes() -> list[Case]:
    none = {"world_size": 2, "data": "dataloader", "num_workers": 0, "distributed_sampler": True}
    names = list(_LOADERS)
    older = {
        f"2 pinned over none, {_gpus(gpus)}": [
            rate(runs.LINEAR, world_size=gpus, **_LOADERS[names[place]]) for place in (2, 1)
        ]
        for gpus in (1, 2, 4)
    }
    newer = {
        f"{processes} pinned over none, 2 GPUs": [
            rate(runs.LOADERS, world_size=2, num_workers=processes),
            rate(runs.LOADERS, **none),
        ]
        for processes in (4, 8)
    }
    return [
        *(_data_wait(2, processes) for processes in (0, 4)),
        *(
            Case(name=f"samples/s, {name}", figure=ratio(*rates), rule=at_least(1))
            for name, rates in {**older, **newer}.items()
        ),
    ]


def _data_wait(gpus: int, processes: int) -> Case:
    one = row(
        runs.LOADERS,
        world_size=gpus,
        data="dataloader",
        num_workers=processes,
        distributed_sampler=True,
    )
    share = Figure(value=100 * one["data_ms"] / one["step_ms_p50"], unit="%", runs=(runs.LOADERS,))
    return Case(name=f"waits for data, {processes} processes, {_gpus(gpus)}", figure=share)


def _gpus(count_: int) -> str:
    return f"{count_} GPU{'s' * (count_ > 1)}"


def without_sampler() -> list[Case]:
    """Set an epoch of two GPUs over one of one, with the sampler and without.

    Its time with the sampler is of the run that knows it better.
    """
    name = "loader in the training process"
    figures = {
        "steps of an epoch, 2 GPUs over 1, with the sampler": _steps(True),
        "steps of an epoch, 2 GPUs over 1, without": _steps(False),
        "its time, with the sampler": ratio(_epochs(name, 2), _epochs(name, 1)),
        "its time, without": ratio(_epoch(2, False), _epoch(1, False)),
    }
    rule = near(_PUBLISHED_S[2] / _PUBLISHED_S[1])
    return [Case(name=name, figure=figure, rule=rule) for name, figure in figures.items()]


def _steps(has_sampler: bool) -> Figure:
    """Divide the steps that a rank of two takes for an epoch by those of one alone."""
    counts = [
        _epoch(gpus, has_sampler).value / _loaded(gpus, has_sampler)["step_ms_mean"]
        for gpus in (2, 1)
    ]
    return count(counts[0] / counts[1], runs.LOADERS, unit="x")


def _epoch(gpus: int, has_sampler: bool) -> Figure:
    """Take the seconds of one epoch, rows loaded in the training process."""
    one = _loaded(gpus, has_sampler)
    found = one["workload_metrics"]["epoch_s"]
    return scale(step(runs.LOADERS, point_id=one["point_id"]), lambda _: found, "s")


def _loaded(gpus: int, has_sampler: bool) -> Row:
    return row(
        runs.LOADERS,
        world_size=gpus,
        data="dataloader",
        num_workers=0,
        distributed_sampler=has_sampler,
    )


def _memory() -> list[Case]:
    return [
        Case(name="peak, loader", figure=memory(runs.LINEAR, world_size=4, num_workers=2)),
        Case(name="peak, rows on the GPU", figure=memory(runs.LINEAR, world_size=4, data="device")),
    ]


def _search() -> list[Case]:
    tried = [one for one in table("points", runs.LARGEST).batch_size if one == one]
    return [
        Case(name="first batch", figure=count(min(tried), runs.LARGEST)),
        Case(name="batches tried and ok", figure=count(len(select(runs.LARGEST)), runs.LARGEST)),
    ]


def _environment() -> list[Case]:
    found = versions(runs.LINEAR)
    text = ", ".join(f"{name} {found[name]}" for name in ("torch", "cuda", "nccl", "driver"))
    return [Case(name="versions", figure=count(len(found), runs.LINEAR, text=text))]


ARTICLE = Article(
    number=3,
    title="DDP with Linear(1024, 1)",
    claims=(
        Claim(
            id="3.1",
            text="five epochs of 10,000 rows, batch 64, take 28.5, 15.2, 8.7 s on 1, 2, 4 GPUs",
            published="28.5, 15.2, 8.7 s",
            ask="jobs/ddp_linear.yaml",
            measure=_seconds,
            says="on H200s, the published ones on other machines; starting processes is not in it",
        ),
        Claim(
            id="3.2",
            text="1.87 and 3.28 times as fast on 2 and 4 GPUs",
            published="1.87x, 3.28x",
            ask="jobs/ddp_linear.yaml",
            measure=_speed_ups,
            says="one such step is Python and launches; what loads the data decides",
        ),
        Claim(
            id="3.3",
            text="choose a batch that is not out of memory",
            published="no figure",
            ask="jobs/largest_batch.yaml",
            measure=_largest,
        ),
        Claim(
            id="3.4",
            text="each rank must be on a GPU of its own",
            published="set_device",
            ask="table `devices`; `raybench doctor`",
            measure=_devices,
        ),
        Claim(
            id="3.5",
            text="NCCL must be set up right",
            published="no figure",
            ask="`raybench doctor`; `transports`",
            measure=_transports,
        ),
        Claim(
            id="3.6",
            text="NCCL_BLOCKING_WAIT makes waiting shorter",
            published="shorter",
            ask="jobs/environment.yaml; `env` is an axis of any job",
            measure=_blocking,
            says="DDP on 2 GPUs, whose host does not wait with it either; the last shows that "
            "variables arrive, here NCCL_P2P_DISABLE",
        ),
        Claim(
            id="3.7",
            text="more loader processes and pinned memory fill the GPU",
            published="4 processes",
            ask="jobs/ddp_linear.yaml",
            measure=_loader_processes,
            says="a batch of 64 rows costs about as much to hand over as to make",
        ),
        Claim(
            id="3.8",
            text="watch memory and throughput too",
            published="no figure",
            ask="every row",
            measure=_memory,
        ),
        Claim(
            id="3.9",
            text="start with a small batch and go up until memory runs out",
            published="from 64",
            ask="`batch_size: {start: 64}`",
            measure=_search,
        ),
        Claim(
            id="3.10",
            text="say GPU, CUDA, torch and backend",
            published="no figure",
            ask="head of every report",
            measure=_environment,
        ),
    ),
)
