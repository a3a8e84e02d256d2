"""`raybench doctor` without Ray: what it starts, what it prints, how it ends."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from fakes import make_cluster, make_device

from raybench.cli.health import format_json, format_text
from raybench.doctor import diagnosis
from raybench.doctor.checks import Check, Facts, Verdict
from raybench.doctor.diagnosis import Diagnosis
from raybench.errors import ClusterError
from raybench.job.point import Point
from raybench.records.code import raybench_sha256
from raybench.records.device import Device
from raybench.records.measurement import Failure, Measurement, RankAnswer, Repetition, Samples
from raybench.records.status import Status

MS = 1_000_000


def measured(point: Point, rank: int, first_ms: int = 500) -> Measurement:
    warmup = Samples(step_ns=(first_ms * MS, 10 * MS))
    repetition = Repetition(warmup=warmup, timed=Samples(step_ns=(10 * MS,) * 5))
    return Measurement(
        rank=rank,
        repetitions=(repetition,),
        items_per_step=None,
        setup_s=1.0,
        message_bytes=int(point.params.get("size_bytes", 4)),
        busbw_factor=1.5,
        output="raybench: gloo net0 10.0.0.1 10.0.0.2" if is_probe(point) else "",
    )


def is_probe(point: Point) -> bool:
    return point.workload.endswith(":TransportProbe")


def answers(point: Point, rank: int) -> RankAnswer:
    assert is_probe(point) or (point.workload, point.batch_size) == ("collective", None)
    return measured(point, rank)


def four() -> list[Device]:
    return [make_device(index=index) for index in range(4)]


def diagnose(cluster: Any) -> Diagnosis:
    return diagnosis.diagnose(cluster, lambda _: nullcontext())


def found(diagnosis: Diagnosis, name: str) -> Check:
    return next(check for check in diagnosis.checks if check.name == name)


def test_the_first_collective_and_the_bandwidth_are_told():
    cluster, tasks = make_cluster(four(), answers), []
    run = cluster.run
    cluster.run = lambda task, workers: tasks.append(task) or run(task, workers)
    diagnosis = diagnose(cluster)
    # A node with other code fails here, as it does in a sweep.
    assert {task.code.raybench_sha256 for task in tasks} == {raybench_sha256()}
    first, bandwidth = found(diagnosis, "first collective"), found(diagnosis, "all_reduce")
    assert first.details["first_collective_s"] == pytest.approx(1.5)
    assert first.verdict is Verdict.OK
    # 256 MiB in 10 ms, times 1.5.
    assert bandwidth.details["busbw_gb_s"] == pytest.approx(2**28 / 0.01 / 1e9 * 1.5)
    assert "busbw 40.27 GB/s" in bandwidth.found
    slow = make_cluster(four(), lambda point, rank: measured(point, rank, first_ms=12_000))
    first = found(diagnose(slow), "first collective")
    assert first.verdict is Verdict.WARN
    assert "NCCL_SOCKET_IFNAME" in first.advice
    alone = diagnose(make_cluster([make_device()], answers))
    assert found(alone, "collective").verdict is Verdict.OK


def test_a_failed_collective_fails_with_the_message_of_the_rank_that_caused_it():
    def script(point: Point, rank: int) -> RankAnswer:
        if rank == 2:
            return Failure(
                rank=2, status=Status.ERROR, error_type="WrongResultError", message="off by one"
            )
        return Failure(
            rank=rank, status=Status.LOST, error_type="PeerFailed", message="rank 2 failed"
        )

    diagnosis = diagnose(make_cluster(four(), script))
    assert found(diagnosis, "collective").found == "rank 2 on host-a: WrongResultError: off by one"
    assert any(check.verdict is Verdict.FAIL for check in diagnosis.checks)


class Refusing:
    """A cluster whose workers came, and were refused."""

    capacity, description = 3, "two on one device"
    other_sweeps = ("run first-1 of bob (process 7 on alpha)",)

    def __init__(self, devices: Sequence[Device], reason: str) -> None:
        self._reason, self._come = reason, tuple(devices)
        self.devices: tuple[Device, ...] = ()

    def start(self, count: int, strategy: str) -> None:
        self.devices = self._come
        raise ClusterError(self._reason)


def test_workers_that_share_a_device_or_do_not_come_are_told_and_not_run():
    shared = [make_device(index=index, uuid="GPU-a") for index in range(2)]
    diagnosis = diagnose(Refusing(shared, "several workers have GPU-a"))
    assert found(diagnosis, "devices").verdict is Verdict.FAIL
    assert found(diagnosis, "devices").advice.startswith("1 more gave no worker")
    assert found(diagnosis, "other sweeps").verdict is Verdict.WARN
    assert "run first-1 of bob" in found(diagnosis, "other sweeps").found
    assert found(diagnosis, "collective").found == "not run"
    assert "several workers have GPU-a" in found(diagnosis, "collective").advice


def test_workers_that_do_not_come_are_an_error_of_the_cluster():
    with pytest.raises(ClusterError, match="no room"):
        diagnose(Refusing([], "no room"))


def diagnosis_of(*checks: Check) -> Diagnosis:
    facts = Facts(devices=(make_device(),), versions={"torch": "2.11.0"})
    return Diagnosis(cluster="a cluster", facts=facts, checks=checks, environment={"A": "b"})


BAD = Check(name="NCCL_P2P_DISABLE", verdict=Verdict.FAIL, found="1: " + "slow " * 40, advice="no")
GOOD = Check(name="ECC", verdict=Verdict.OK, found="[red]0[/red]\x1b[31m errors")


def test_the_text_is_80_columns_of_plain_lines_with_the_advice_below():
    lines = format_text(diagnosis_of(GOOD, BAD)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1] == "ok    ECC               [red]0[/red]\N{REPLACEMENT CHARACTER}[31m errors"
    assert lines[2].startswith("fail  NCCL_P2P_DISABLE  1: slow")
    assert lines[-2].strip() == "-> no"
    assert lines[-1] == "1 ok, 0 warn, 1 fail"


def test_the_json_object_has_all_of_it():
    content = json.loads(format_json(diagnosis_of(GOOD, BAD)))
    assert content["schema_version"] == 1
    assert [check["verdict"] for check in content["checks"]] == ["ok", "fail"]
    assert content["devices"][0]["uuid"] == "GPU-a0"
    assert content["versions"] == {"torch": "2.11.0"}
    assert content["environment"] == {"A": "b"}
