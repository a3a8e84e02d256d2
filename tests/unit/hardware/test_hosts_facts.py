"""The state of a host, as /proc, /sys and psutil report it."""

import math
import os
import resource

from raybench.hardware.hosts import read_host


def test_host_reports_load_limits_and_interfaces():
    host = read_host()
    assert host.cores == os.cpu_count()
    assert host.load >= 0
    assert "lo" not in host.interfaces
    assert all(speed >= 0 and math.isfinite(speed) for speed in host.interfaces.values())
    assert read_host(load=7.5).load == 7.5


def test_memlock_and_adapters_are_read(tmp_path):
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        host = read_host(adapters=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert host.memlock_bytes == 65536
    assert host.rdma_adapters == ("mlx5_0", "mlx5_1")
