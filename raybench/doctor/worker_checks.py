"""Checks of nodes and worker processes, on GPUs and on CPUs; each function returns one. Pure."""

from __future__ import annotations

from collections import Counter

from raybench.doctor.facts import (
    UNKNOWN,
    Check,
    Facts,
    Verdict,
    count_noun,
    describe,
    join_names,
    judge,
    label,
)
from raybench.records import Device

_GIB = 2**30
# Room for compiled kernels and logs.
_DISK_BYTES = _GIB
# The default of Docker is 64 MiB, in which NCCL fails with more than a few ranks.
_SHM_BYTES = _GIB // 2
_VERSIONS = ("raybench", "python", "torch", "ray", "cuda", "nccl", "driver")


def devices(facts: Facts) -> Check:
    """Check that all devices are of one model and all nodes have as many."""
    models = Counter(device.name for device in facts.devices)
    per_node = [f"{owned[0].host} {len(owned)}" for owned in facts.nodes.values()]
    kinds = ", ".join(f"{count} x {name}" for name, count in models.most_common())
    found = f"{kinds} on {count_noun(len(per_node), 'node')} ({join_names(per_node)})"
    advice = []
    if len(models) > 1:
        advice.append(
            "different models: every step waits for the slowest; measure each on its own, or read "
            "world sizes that mix them with that in mind"
        )
    if len({len(owned) for owned in facts.nodes.values()}) > 1:
        advice.append(
            "nodes differ in their count: if one should have more, look for a GPU that fell off "
            "the bus (dmesg | grep Xid) and at what Ray was told (ray status)"
        )
    verdict = Verdict.WARN if advice else Verdict.OK
    return Check(name="devices", verdict=verdict, found=found, advice="; ".join(advice))


def identity(facts: Facts) -> Check:
    """Check that each worker has a device of its own."""
    owners = Counter(device.uuid for device in facts.devices)
    shared = [device for device in facts.devices if owners[device.uuid] > 1]
    found = (
        f"{count_noun(len(owners), 'distinct UUID')} for {count_noun(len(facts.devices), 'worker')}"
    )
    if shared:
        found += f"; shared by {join_names([label(device) for device in shared])}"
    advice = (
        "workers on one device measure each other: give Ray one GPU resource for each real GPU "
        "(ray start --num-gpus), and CUDA_VISIBLE_DEVICES without repeats"
    )
    return judge("identity", found, shared, advice, Verdict.FAIL)


def versions(facts: Facts) -> Check:
    """Check that there is the same software on all workers and in this process."""
    found: list[str] = []
    differing: list[str] = []
    for name in _VERSIONS:
        if not facts.is_cuda and name in ("cuda", "nccl", "driver"):
            continue
        owners = {
            label(device): (
                device.driver_version if name == "driver" else device.versions.get(name)
            )
            or UNKNOWN
            for device in facts.devices
        }
        if name in facts.versions:
            owners["this process"] = facts.versions[name]
        seen = dict.fromkeys(owners.values())
        if len(seen) == 1:
            found.append(f"{name} {next(iter(seen))}")
            continue
        differing.append(name)
        informants = (
            f"{version} on {join_names([owner for owner, has in owners.items() if has == version])}"
            for version in seen
        )
        found.append(f"{name}: {', '.join(informants)}")
    if not differing:
        return Check(name="versions", verdict=Verdict.OK, found=", ".join(found))
    return Check(
        name="versions",
        verdict=Verdict.FAIL,
        found="; ".join(found),
        advice=f"install the same {' and '.join(differing)} on every node",
        details={"differing": differing},
    )


def other_sweeps(facts: Facts) -> Check:
    """Check that no other sweep, of any user, has the devices."""
    if not facts.others:
        return Check(name="other sweeps", verdict=Verdict.OK, found="none on these devices")
    return Check(
        name="other sweeps",
        verdict=Verdict.WARN,
        found=join_names(facts.others),
        advice="both share the devices and their time: wait for its end, or measure on others; a "
        "sweep started now is refused without --wait SECONDS or --shared",
    )


def niceness(facts: Facts) -> Check:
    """Check that no worker has a lower priority than torchrun's processes have."""
    return judge(
        "niceness",
        describe(facts.devices, lambda device: str(device.niceness)),
        [device for device in facts.devices if device.niceness > 0],
        "other programs get the CPU before these workers, and steps that wait for Python get "
        "slower: start Ray without `nice`",
    )


def threads(facts: Facts) -> Check:
    """Check that the workers' threads have a core each."""
    crowded: list[Device] = []
    lines = []
    for owned in facts.nodes.values():
        wanted, cores = sum(d.omp_num_threads for d in owned), min(d.cpu_count for d in owned)
        has = f"{count_noun(wanted, 'thread')} in {count_noun(len(owned), 'worker')}"
        lines.append(f"{has} for {count_noun(cores, 'core')} on {owned[0].host}")
        if wanted > cores:
            crowded += owned
    return judge(
        "threads",
        join_names(lines),
        crowded,
        "more threads than cores: they take turns, and times scatter; set OMP_NUM_THREADS lower, "
        "give the workers more cores, or use fewer workers",
    )


def disk(facts: Facts) -> Check:
    """Check that there is room for temporary files."""
    return judge(
        "disk",
        describe(_first_of_nodes(facts), lambda device: _free(device.disk_free_bytes)),
        _below(facts, "disk_free_bytes", _DISK_BYTES),
        "little room for temporary files (compiled kernels, Ray's logs): free some, or set TMPDIR",
    )


def shared_memory(facts: Facts) -> Check:
    """Check the room in /dev/shm, by which NCCL and Ray exchange data within a node."""
    return judge(
        "/dev/shm",
        describe(_first_of_nodes(facts), lambda device: _free(device.shm_free_bytes)),
        _below(facts, "shm_free_bytes", _SHM_BYTES),
        "NCCL and Ray share memory there and fail when it is full: start the container with "
        "--shm-size=8g (or --ipc=host)",
    )


def _first_of_nodes(facts: Facts) -> list[Device]:
    return [owned[0] for owned in facts.nodes.values()]


def _free(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / _GIB:.1f} GiB free"


def _below(facts: Facts, fact: str, least_bytes: int) -> list[Device]:
    sizes = [(device, getattr(device, fact)) for device in _first_of_nodes(facts)]
    return [device for device, size in sizes if size is not None and size < least_bytes]
