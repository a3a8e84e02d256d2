"""Advice follows the cause: records with a known fault, read and judged as in a real check."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from builders import (
    make_device,
    make_finding,
    make_measurement,
    make_readings,
    make_record,
    make_subject,
    make_test,
)

from raybench.health.readings import Reading, read_record
from raybench.health.suite import Fleet, Probe, probes
from raybench.health.suite import test_named as row_named
from raybench.health.verdicts import OTHER_PROGRAMS_TEST, Judgement, judge
from raybench.records.devices import Action, Stage, Verdict
from raybench.records.judgement import CommandKind, ReasonKind
from raybench.records.measurement import Measurement
from raybench.records.other_program import OtherProgram

STARTED = datetime(2026, 11, 30, 11, 2, tzinfo=UTC)
# What a product of bf16 8192 does in 1.1 TFLOP, and how long a healthy H200 takes.
FLOPS, STEP_NS = 1.0995e12, 1_600_000
# In a step two H200s send each other so much.
MESSAGE_BYTES = 576_000_000
TRAINING = OtherProgram(
    host="alpha", process_id=42, name="train.py", user="bob", since=STARTED, device_uuid="GPU-1"
)


def fleet_of(count: int, **of_device_1: Any) -> Fleet:
    devices = [make_device(rank, topology="NVLink x18") for rank in range(count)]
    devices[1] = replace(devices[1], **of_device_1)
    return Fleet(devices=tuple(devices))


def probe_of(fleet: Fleet, name: str, stage: Stage) -> list[Probe]:
    return [probe for probe in probes(fleet, [stage]) if probe.test.name == name]


def products(
    fleet: Fleet, slow: dict[int, float], of_rank: dict[int, dict[str, Any]], **changes: Any
) -> list[Reading]:
    """Three passes of a product; slow: rank -> how many times as long it takes."""
    [probe] = probe_of(fleet, "gemm bf16 8192", "alone")
    readings: list[Reading] = []
    for number in (1, 2, 3):
        measurements = tuple(
            replace(
                make_measurement(rank, [[round(STEP_NS * slow.get(rank, 1.0))] * 5]),
                flops_per_step=FLOPS,
                **(of_rank.get(rank, {}) if number > 1 else {}),
            )
            for rank in range(len(fleet.devices))
        )
        readings += read_record(record(probe, fleet, number, measurements, **changes), probe, fleet)
    return readings


def record(probe, fleet, number, measurements: tuple[Measurement, ...], **changes):
    return make_record(
        probe.point, devices=fleet.devices, measurements=measurements, round=number, **changes
    )


def case_of(found: tuple[Judgement, ...], name: str) -> Judgement:
    [one] = [one for one in found if one.subject.name == name and one.verdict.is_suspect_or_bad]
    return one


def evidence_of(one: Judgement) -> dict[ReasonKind, Any]:
    return {reason.kind: reason for reason in one.evidence}


def test_program_on_slow_gpu_is_named():
    fleet = fleet_of(4)
    beside = {"neighbours": ("process 42 (train.py) on cuda:1",), "other_programs": (TRAINING,)}
    found = judge(products(fleet, {1: 1.8}, {}, **beside), fleet.devices)
    slow = case_of(found, "alpha GPU 1")
    assert slow.action is Action.WAIT
    assert evidence_of(slow)[ReasonKind.PROGRAMS].programs == (TRAINING,)
    assert [(one.kind, one.numbers) for one in slow.commands] == [
        (CommandKind.SHOW_PROGRAMS, (42,))
    ]
    text = "alpha: train.py (process 42 of bob, since 2026-11-30 11:02 UTC)"
    assert text in slow.finding.evidence
    assert slow.finding.command == "ps -o pid,user,lstart,pcpu,comm -p 42  # on alpha"
    [busy] = [one for one in found if one.test.name == OTHER_PROGRAMS_TEST]
    assert busy.action is Action.WAIT


def test_program_on_another_gpu_is_no_cause():
    fleet = fleet_of(4)
    beside = {"other_programs": (replace(TRAINING, device_uuid="GPU-3"),)}
    slow = case_of(judge(products(fleet, {1: 1.8}, {}, **beside), fleet.devices), "alpha GPU 1")
    assert ReasonKind.PROGRAMS not in evidence_of(slow)
    assert slow.action is Action.RESET


def test_busiest_program_of_cpu_workers_is_named():
    fleet = Fleet(devices=tuple(make_device(rank, kind="cpu", name="Xeon") for rank in range(2)))
    probe = probe_of(fleet, "gemm fp32 512", "alone")[0]
    hog = replace(TRAINING, device_uuid="", busy_cores=0.98)
    beside = {"neighbours": ("other processes on alpha",), "other_programs": (hog,)}
    measured = tuple(
        replace(make_measurement(rank, [[STEP_NS] * 5]), flops_per_step=FLOPS) for rank in (0, 1)
    )
    readings = read_record(record(probe, fleet, 1, measured, **beside), probe, fleet)
    [busy] = [one for one in judge(readings, fleet.devices) if one.verdict is Verdict.SUSPECT]
    assert busy.action is Action.WAIT
    assert busy.finding.evidence.endswith("11:02 UTC) keeps 1 core busy")


HEAT = {"throttle_reasons": ("thermal_hw",), "temperature_c": 91.0}
LOW_CAP = {"power_cap_w": 450.0, "power_cap_default_w": 700.0}


@pytest.mark.parametrize(
    ("measured", "device", "action", "command", "texts"),
    [
        (
            HEAT,
            {},
            Action.COOL,
            CommandKind.SHOW_TEMPERATURE,
            ("heat (hardware limit), since pass 2", "91 °C"),
        ),
        (
            HEAT,
            {"throttle_reasons": ("thermal_hw",)},
            Action.COOL,
            CommandKind.SHOW_TEMPERATURE,
            ("already before any work",),
        ),
        (
            {"throttle_reasons": ("power_brake",)},
            {},
            Action.SUPPLY,
            CommandKind.SHOW_POWER,
            ("power brake of the host, since pass 2",),
        ),
        (
            {"throttle_reasons": ("power_cap",)},
            LOW_CAP,
            Action.SETTING,
            CommandKind.SET_POWER_LIMIT,
            ("the power limit, since pass 2", "the power limit is 450 W, and 700 W by default"),
        ),
        # A GPU at its default limit is limited by it in large products.
        ({"throttle_reasons": ("power_cap",)}, {}, Action.RESET, CommandKind.RESET_GPU, ()),
    ],
)
def test_throttled_gpu_has_reason_and_start(measured, device, action, command, texts):
    fleet = fleet_of(4, **device)
    found = judge(products(fleet, {1: 1.8}, {1: measured}), fleet.devices)
    slow = case_of(found, "alpha GPU 1")
    assert slow.action is action
    assert [one.kind for one in slow.commands] == [command]
    for text in texts:
        assert text in slow.finding.evidence


def test_slow_launches_are_of_the_host():
    # A process that a debugger stops 200 times a second launches kernels so slowly.
    launch = row_named("launch and wait", "cuda")
    found = judge(make_readings([143.0, 16.3], launch), fleet_of(2).devices)
    slow = case_of(found, "alpha GPU 0")
    assert (slow.verdict, slow.action) == (Verdict.BAD, Action.WATCH)
    assert [one.kind for one in slow.commands] == [CommandKind.SHOW_CPU_LOAD]
    assert "look at the CPU" in slow.finding.evidence


def test_slow_launches_of_a_cpu_worker_are_its_own():
    workers = [make_device(rank, kind="cpu", name="Xeon") for rank in range(2)]
    slow, quick = (f"alpha/{number}" for number in (0, 1))
    readings = [
        replace(
            reading,
            subject=replace(reading.subject, uuids=(slow if reading.value > 50 else quick,)),
        )
        for reading in make_readings([143.0, 16.3], row_named("launch", "cpu"))
    ]
    [found] = [one for one in judge(readings, workers) if one.verdict is Verdict.BAD]
    assert ReasonKind.PACED_BY_HOST not in evidence_of(found)


def test_power_limits_do_not_explain_slow_launches():
    fleet = Fleet(devices=tuple(make_device(rank, **LOW_CAP) for rank in range(4)))
    found = judge(make_readings([900.0] * 4, row_named("launch", "cuda")), fleet.devices)
    [alike] = [one for one in found if one.verdict is Verdict.SUSPECT]
    assert alike.subject.kind == "cluster"
    assert ReasonKind.POWER_LIMIT not in evidence_of(alike)


def test_latency_between_nodes_does_not_blame_the_host():
    row = row_named("send latency 8 B between nodes", "cuda")
    assert row.is_paced_by_host
    assert not row.blames_host


def pair_readings(fleet: Fleet, name: str, **of_rank: Any) -> list[Reading]:
    """Three passes of messages between all pairs."""
    readings: list[Reading] = []
    for number in (1, 2, 3):
        for probe in probe_of(fleet, name, "pairs"):
            measurements = tuple(
                replace(
                    make_measurement(rank, [[STEP_NS] * 5]), message_bytes=MESSAGE_BYTES, **of_rank
                )
                for rank in range(len(fleet.devices))
            )
            readings += read_record(record(probe, fleet, number, measurements), probe, fleet)
    return readings


def two_nodes(**changes: Any) -> Fleet:
    return Fleet(
        devices=tuple(
            make_device(
                0,
                uuid=f"GPU-{node}",
                node_id=f"n{node}",
                host=f"node{node}",
                interface=f"eth{node}",
                **changes,
            )
            for node in range(2)
        )
    )


def slow_pairs(fleet: Fleet, name: str, **of_rank: Any) -> list[Judgement]:
    """Findings of a pair that is slow in one direction."""
    slow = []
    for one in pair_readings(fleet, name, **of_rank):
        is_forward = one.subject.uuids == ("GPU-0", "GPU-1")
        value = (one.value or 0.0) * (0.4 if is_forward else 1.0)
        slow.append(replace(one, value=value))
    return [one for one in judge(slow, fleet.devices) if one.verdict.is_suspect_or_bad]


def test_slow_pair_of_a_node_names_its_link():
    nvlink = fleet_of(2)
    [slow] = slow_pairs(nvlink, "send 256 MiB")
    assert slow.subject.name == "alpha GPU 0 to alpha GPU 1"
    assert "NVLink x18 carries the data" in slow.finding.evidence
    devices = tuple(
        replace(one, topology=f"NVLink x0, {1 - rank}:SYS", pcie_link_max="gen4 x16")
        for rank, one in enumerate(nvlink.devices)
    )
    [slow] = slow_pairs(Fleet(devices=devices), "send 256 MiB")
    text = "PCIe gen4 x16 carries the data, across the link between CPU sockets"
    assert text in slow.finding.evidence


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        ((), "eth0 of node0 and eth1 of node1"),
        (("NET/IB on mlx5_0 (IB)",), "NET/IB on mlx5_0 (IB) of node0"),
    ],
)
def test_slow_link_between_nodes_names_interfaces(routes, text):
    [slow] = slow_pairs(two_nodes(), "send 256 MiB", transports=routes)
    assert slow.subject.name == "node0 GPU 0 to node1 GPU 0"
    assert text in slow.finding.evidence
    if not routes:
        assert slow.finding.command.splitlines() == [
            "ip -s link show eth0; tc qdisc show dev eth0  # on node0",
            "ip -s link show eth1; tc qdisc show dev eth1  # on node1",
        ]


def test_slow_node_names_its_interface():
    devices = tuple(
        make_device(rank, node_id=f"n{rank}", host=f"node{rank}", index=0, interface=f"eth{rank}")
        for rank in range(4)
    )
    readings = []
    for one in pair_readings(Fleet(devices=devices), "send 256 MiB"):
        is_slow = "GPU-1" in one.subject.uuids
        readings.append(replace(one, value=(one.value or 0.0) * (0.4 if is_slow else 1.0)))
    slow = case_of(judge(readings, devices), "node1")
    assert "the data goes through eth1 of node1" in slow.finding.evidence
    assert slow.finding.command == "ip -s link show eth1; tc qdisc show dev eth1  # on node1"


ALL_SLOW = dict.fromkeys(range(4), 1.8)


@pytest.mark.parametrize(
    ("device", "measured", "action", "texts"),
    [
        (LOW_CAP, {}, Action.SETTING, ("the power limit is 450 W, and 700 W by default",)),
        ({}, HEAT, Action.COOL, ("heat (hardware limit)",)),
        (
            {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
            {},
            Action.SETTING,
            ("CUDA_LAUNCH_BLOCKING is set",),
        ),
        ({"driver_version": "550.1"}, {}, Action.WATCH, ("the driver is 550.1", "580.159.04")),
        ({"driver_version": "580.159.04"}, {}, Action.WATCH, ("the cause cannot be told",)),
    ],
)
def test_all_slow_names_what_they_share(device, measured, action, texts):
    settings = {"driver_version": "580.159.04", **device}
    fleet = Fleet(devices=tuple(make_device(rank, **settings) for rank in range(4)))
    of_rank = dict.fromkeys(range(4), measured)
    found = judge(products(fleet, ALL_SLOW, of_rank), fleet.devices)
    slow = case_of(found, "all 4 NVIDIA H200")
    assert slow.reason is not None
    assert slow.reason.kind is ReasonKind.ALL_SLOW
    assert slow.action is action
    for text in texts:
        assert text in slow.finding.evidence
    is_unknown = ReasonKind.CANNOT_TELL in evidence_of(slow)
    assert is_unknown == any("cannot be told" in text for text in texts)


@pytest.mark.parametrize(("earlier", "text"), [(0, "3 more checks"), (2, "one more check")])
def test_unknown_model_says_how_to_compare(earlier, text):
    test = make_test(name="gemm bf16 8191")
    devices = [make_device(rank) for rank in range(2)]
    past = [
        (f"run-{check}", make_finding(make_subject(), test=test.name)) for check in range(earlier)
    ]
    found = judge(make_readings([700.0] * 2, test), devices, past)
    [unknown] = [one for one in found if one.verdict is Verdict.UNKNOWN]
    assert text in unknown.finding.reason
    kinds = [CommandKind.CHECK_AGAIN, CommandKind.EXPORT_REFERENCES]
    assert [one.kind for one in unknown.commands] == kinds
