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
def test_a_real_log_tells_the_way_of_its_bytes(name, ways):
    log = parse((LOGS / f"{name}.log").read_text().splitlines())
    assert {route.words for route in log.routes} == ways
    assert {(route.sender, route.receiver) for route in log.routes} >= {(0, 1)}
    assert not any(route.gpu_direct for route in log.routes)
    assert (log.has_nvls, log.adapter_count) == (False, 0)
