"""Which way the bytes went, by what NCCL wrote, and whether the devices can communicate.

The lines for InfiniBand, RoCE and EFA are made after the formats in NCCL's source (transport/
net.cc, net_ib/init.cc, graph/topo.cc of 2.30); no machine of ours has written them.
"""

from dataclasses import replace
from typing import Any

import pytest
from builders import make_device, make_measurement, make_record

from raybench.health.environment_facts import EnvironmentFacts
from raybench.health.transports import judge_first_collective, judge_transports
from raybench.records.devices import DeviceFacts, Finding, HostFacts, Verdict
from raybench.records.record import Record
from raybench.records.status import Status

SOCKET = """\
NCCL INFO NET/Socket : Using [0]{name}:10.0.0.1<0> [1]eth9:10.9.0.1<0>
NCCL INFO Using network Socket
NCCL INFO 0[0] -> 1[1] [send] via NET/Socket/0
NCCL INFO 1[1] -> 0[0] [receive] via NET/Socket/0
"""
ADAPTERS = """\
NCCL INFO NET/IB : Using [0]mlx5_0:1/{kind} [1]mlx5_1:1/{kind} [RO]; OOB eth0:10.0.0.1<0>
NCCL INFO NET/IB : GPU Direct RDMA {direct} for HCA 0 'mlx5_0'
NCCL INFO Using network IB
NCCL INFO 0[0] -> 1[1] [send] via NET/IB/0{end}
NCCL INFO 1[1] -> 0[0] [receive] via NET/IB/1(0){end}/Shared
"""
EFA = """\
NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 4 nics)
NCCL INFO Using network AWS Libfabric
NCCL INFO 0[0] -> 1[1] [send] via NET/AWS Libfabric/2/GDRDMA
NCCL INFO 1[1] -> 0[0] [receive] via NET/AWS Libfabric/2/GDRDMA
"""
PEERS = """\
NCCL INFO NVLS multicast support is {nvls}available on dev 0
NCCL INFO 16 coll channels, 16 collnet channels, {channels} nvls channels, 16 p2p channels
NCCL INFO 0[0] -> 1[1] via {way}
NCCL INFO 1[1] -> 0[0] via {way}
"""


def facts_of(nodes: int, adapters: tuple[str, ...] = (), **changes: Any) -> EnvironmentFacts:
    changes = {"topology": "NVLink x18", **changes}
    devices = tuple(make_device(r, node_id=f"node-{r % nodes}", **changes) for r in range(2))
    host = HostFacts(cores=16, memlock_bytes=float("inf"), rdma_adapters=adapters)
    states = tuple(DeviceFacts(device=device, read_s=0.0, host=host) for device in devices)
    return EnvironmentFacts(devices=devices, states=states)


def record_of(**changes: Any) -> Record:
    measured = tuple(make_measurement(rank, [[1]], **changes) for rank in range(2))
    return replace(make_record(), measurements=measured)


def judge(text: str, *, nodes: int, **changes: Any) -> dict[str, Finding]:
    """Let two ranks, on one node or on two, print the same."""
    record = record_of(output=f"[stdout]\n{text}")
    judged = judge_transports(facts_of(nodes, **changes), record)
    return {one.test.name: one.finding for one in judged}


def test_peer_access_is_reported_with_nvls():
    told = judge(PEERS.format(nvls="", channels=16, way="P2P/CUMEM/read"), nodes=1)
    assert told["transport"].verdict is Verdict.HEALTHY
    assert told["transport"].evidence == "P2P/CUMEM"
    assert told["NVLS"].value == 1
    for nvls in ("not ", ""):
        text = PEERS.format(nvls=nvls, channels=0, way="P2P/IPC")
        assert judge(text, nodes=1)["NVLS"].value == 0


def test_shared_memory_between_gpus_is_noted():
    told = judge(PEERS.format(nvls="not ", channels=0, way="SHM/direct/direct"), nodes=1)
    assert told["transport"].verdict is Verdict.NOTE
    assert told["transport"].reason.startswith("SHM/direct: GPUs exchange")
    assert told["transport"].command.startswith("nvidia-smi topo -p2p r")


def test_ray_nodes_on_one_host_are_noted():
    told = judge(PEERS.format(nvls="", channels=0, way="P2P/CUMEM"), nodes=2)
    assert "nodes of Ray share a host" in told["transport between nodes"].reason


IB = {"kind": "IB", "direct": "Disabled", "end": ""}


@pytest.mark.parametrize(
    ("text", "adapters", "test", "reason"),
    [
        (
            SOCKET.format(name="eth0"),
            ("mlx5_0",),
            "transport between nodes",
            "TCP although they have mlx5_0",
        ),
        (SOCKET.format(name="docker0"), (), "interfaces in use", "docker0 leads to no other host"),
        (SOCKET.format(name="lo"), (), "interfaces in use", "lo leads to no other host"),
        (ADAPTERS.format(**IB), ("mlx5_0",), "GPUDirect RDMA", "through host memory"),
    ],
)
def test_slow_way_between_nodes_is_noted(text, adapters, test, reason):
    told = judge(text, nodes=2, adapters=adapters)
    noted = [one for one in told.values() if one.verdict is Verdict.NOTE]
    assert [one.test for one in noted] == [test]
    assert reason in noted[0].reason
    assert noted[0].command


@pytest.mark.parametrize("kind", ["IB", "RoCE"])
def test_sockets_and_adapters_are_named(kind):
    told = judge(SOCKET.format(name="eth0"), nodes=2)
    assert told["transport between nodes"].evidence == "NET/Socket on eth0 (10.0.0.1)"
    assert {one.verdict for one in told.values()} == {Verdict.HEALTHY}
    text = ADAPTERS.format(kind=kind, direct="Enabled", end="/GDRDMA")
    told = judge(text, nodes=2, adapters=("mlx5_0", "mlx5_1"))
    assert {one.verdict for one in told.values()} == {Verdict.HEALTHY}
    shown = told["transport between nodes"].evidence
    assert f"NET/IB on mlx5_0 ({kind}), GPUDirect (alpha GPU 0, alpha GPU 1)" in shown
    efa = judge(EFA, nodes=2, adapters=("rdmap0s0",))["transport between nodes"]
    assert efa.evidence == "NET/AWS Libfabric on device 2, GPUDirect"


def test_failed_or_silent_probe_leaves_transport_unknown():
    failed = replace(
        make_record(), status=Status.TIMEOUT, measurements=(), error_message="no answer"
    )
    [finding] = [one.finding for one in judge_transports(facts_of(1), failed)]
    assert (finding.verdict, finding.reason) == (Verdict.NOTE, "unknown: no answer")
    assert judge("", nodes=1)["transport"].reason.startswith("unknown: the ranks reported no")


def test_cpu_workers_report_the_interface_of_gloo():
    text = "raybench: gloo net0 10.99.0.10 10.99.0.11\n"
    told = judge(text, nodes=2, kind="cpu")
    assert (told["transport"].verdict, told["transport"].evidence) == (
        Verdict.HEALTHY,
        "gloo net0",
    )


def first_collective(record: Record) -> dict[str, Finding]:
    judged = judge_first_collective(facts_of(1), record)
    return {one.test.name: one.finding for one in judged}


def test_first_collective_reports_time_and_bandwidth():
    usual = {"setup_s": 1.0, "message_bytes": 2**28, "busbw_factor": 1.5}
    told = first_collective(record_of(**usual))
    # The first step of the warm-up takes 50 ms.
    assert told["first collective"].value == pytest.approx(1.05)
    assert told["first collective"].verdict is Verdict.HEALTHY
    # 256 MiB in 1 ns, times 1.5.
    assert told["all_reduce"].value == pytest.approx(2**28 * 1.5)
    slow = first_collective(record_of(**{**usual, "setup_s": 12.0}))["first collective"]
    assert slow.verdict is Verdict.NOTE
    assert "NCCL_SOCKET_IFNAME" in slow.command


def test_failed_collective_is_bad_with_the_message():
    failed = replace(
        make_record(),
        status=Status.ERROR,
        measurements=(),
        error_rank=1,
        error_message="off by one",
    )
    finding = first_collective(failed)["first collective"]
    assert finding.verdict is Verdict.BAD
    assert finding.reason == "alpha GPU 1: off by one"
    # A network that fails must not condemn a device.
    assert finding.subject.kind == "cluster"
