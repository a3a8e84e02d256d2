"""Logs of NCCL 2.28 on two H200s, shortened by lines that repeat: what is read of each."""

from pathlib import Path

import pytest

from raybench.hardware.nccl_log import parse

LOGS = Path(__file__).parent / "nccl_logs"


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("nvlink", {"P2P/CUMEM"}),
        ("shared_memory", {"SHM/direct"}),  # by NCCL_P2P_DISABLE=1
        ("sockets", {"NET/Socket on eth0 (192.0.2.2)"}),  # by another NCCL_HOSTID of each rank
    ],
)
def test_a_real_log_shows_the_transport(name, ways):
    log = parse((LOGS / f"{name}.log").read_text().splitlines())
    assert {route.words for route in log.routes} == ways
    assert {(route.sender, route.receiver) for route in log.routes} >= {(0, 1)}
    assert not any(route.gpu_direct for route in log.routes)
    assert (log.has_nvls, log.adapter_count) == (False, 0)


@pytest.mark.parametrize(
    ("used", "count", "device"),
    [
        ("[0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]", 2, "mlx5_1 (RoCE)"),
        # Several adapters as one device, and rail and plane behind the port.
        ("[0]={[0] a:1/IB, [1] b:1/IB} [1]={[2] c:1/IB, [3] d:1/IB} [RO]", 4, "c+d (IB)"),
        ("[0]={[0] a:1/IB, [1] b:1/IB} [1]c:1/IB [2]d:1/IB", 4, "c (IB)"),
        ("[0]a:1:0:0/IB [1]b:1::3/IB", 2, "b (IB)"),
    ],
)
def test_adapters_are_counted_and_routes_name_theirs(used, count, device):
    lines = [
        f"h:1:2 [0] NCCL INFO NET/IB : Using {used}; OOB eth0:192.0.2.1<0>",
        "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA",
    ]
    log = parse(lines)
    assert log.adapter_count == count
    assert [route.place for route in log.routes] == [device]
