"""Which way the bytes went, by what NCCL wrote.

The lines for InfiniBand, RoCE and EFA are made after the formats in NCCL's source (transport/
net.cc, net_ib/init.cc, graph/topo.cc of 2.30); no machine of ours has written them.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from builders import make_device, make_measurement

from raybench.doctor.checks import Check, Facts, Verdict
from raybench.doctor.diagnosis import judge_transports
from raybench.records.measurement import Failure
from raybench.records.status import Cause

HOST = "raybench: adapters {adapters}\nraybench: memlock {memlock}\n"
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


def judge(
    text: str, *, nodes: int, adapters: str = "", memlock: str = "unlimited", **changes: Any
) -> list[Check]:
    """Let two ranks, on one node or on two, print the same."""
    output = HOST.format(adapters=adapters, memlock=memlock) + text
    changes = {"topology": "NVLink x18", **changes}
    devices = [make_device(r, node_id=f"node-{r % nodes}", **changes) for r in range(2)]
    answers = [make_measurement(rank, [[1]], output=f"[stdout]\n{output}") for rank in range(2)]
    return judge_transports(Facts(devices=tuple(devices)), answers)


def one(checks: Sequence[Check]) -> Check:
    (check,) = checks
    return check


def test_peers_over_nvlink_are_told_with_what_the_switch_does_and_shared_memory_is_a_warning():
    check = one(judge(PEERS.format(nvls="", channels=16, way="P2P/CUMEM/read"), nodes=1))
    assert (check.name, check.verdict) == ("transport, node", Verdict.OK)
    assert check.found == "P2P/CUMEM, NVLink; NVLS on"
    for nvls in ("not ", ""):
        text = PEERS.format(nvls=nvls, channels=0, way="P2P/IPC")
        assert one(judge(text, nodes=1)).found == "P2P/IPC, NVLink; NVLS off"
    # Nodes of Ray may be on one host.
    check = one(judge(PEERS.format(nvls="", channels=0, way="P2P/CUMEM"), nodes=2))
    assert check.advice == "nodes of Ray are on one host here: this is no network between hosts"
    check = one(judge(PEERS.format(nvls="not ", channels=0, way="SHM/direct/direct"), nodes=1))
    assert check.verdict is Verdict.WARN
    assert check.found == "SHM/direct; NVLS off"
    assert "NCCL_P2P_DISABLE" in check.advice


IB = {"kind": "IB", "direct": "Disabled", "end": ""}


@pytest.mark.parametrize(
    ("text", "host", "advice"),
    [
        (SOCKET.format(name="eth0"), {"adapters": "mlx5_0"}, "TCP although mlx5_0 is there: look"),
        (SOCKET.format(name="docker0"), {}, "docker0 leads to no other host"),
        (SOCKET.format(name="lo"), {}, "to the interface of the cluster's network"),
        (ADAPTERS.format(**IB), {"adapters": "mlx5_0"}, "load nvidia-peermem"),
        (ADAPTERS.format(**IB), {"memlock": "65536"}, "limited to 65536 bytes"),
    ],
)
def test_a_slow_way_between_nodes_is_warned_of_with_what_to_do(text, host, advice):
    check = one(judge(text, nodes=2, **host))
    assert check.verdict is Verdict.WARN
    assert advice in check.advice


@pytest.mark.parametrize("kind", ["IB", "RoCE"])
def test_sockets_and_adapters_are_told_with_their_names_and_what_matters_of_them(kind):
    check = one(judge(SOCKET.format(name="eth0"), nodes=2))
    assert (check.name, check.verdict) == ("transport, network", Verdict.OK)
    assert check.found == "NET/Socket on eth0 (10.0.0.1)"
    assert check.details["ranks_by_way"] == {"NET/Socket on eth0 (10.0.0.1)": [0, 1]}
    text = ADAPTERS.format(kind=kind, direct="Enabled", end="/GDRDMA")
    check = one(judge(text, nodes=2, adapters="mlx5_0,mlx5_1"))
    assert check.verdict is Verdict.OK
    assert f"NET/IB on mlx5_0 ({kind}), GPUDirect of 2 ranks" in check.found
    assert check.found.endswith("; adapters a rank: 2")
    efa = one(judge(EFA, nodes=2, adapters="rdmap0s0"))
    assert (efa.verdict, efa.found) == (Verdict.OK, "NET/AWS Libfabric on device 2, GPUDirect")


def test_a_probe_that_fails_or_is_silent_leaves_the_transport_unknown():
    devices = (make_device(0), make_device(1))
    failed = Failure.of(Cause.TIMEOUT, rank=1, message="no answer")
    check = one(judge_transports(Facts(devices=devices), [failed]))
    assert (check.verdict, check.found) == (Verdict.WARN, "unknown: rank 1: no answer")
    assert one(judge("", nodes=1)).found == "unknown: the ranks printed no route"


def test_cpu_workers_tell_over_which_interface_gloo_is_connected():
    text = "raybench: gloo net0 10.99.0.10 10.99.0.11\n"
    check = one(judge(text, nodes=2, kind="cpu"))
    assert (check.verdict, check.found) == (Verdict.OK, "gloo over TCP on net0 (10.99.0.10)")
