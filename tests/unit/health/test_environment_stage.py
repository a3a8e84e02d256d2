"""The stage `environment`: each fault is found and named, and nothing is guessed."""

from dataclasses import replace
from typing import Any

import pytest
from builders import make_device

from raybench.health.environment import judge_environment
from raybench.health.environment_facts import EnvironmentFacts
from raybench.records.device import Device
from raybench.records.devices import DeviceFacts, Finding, HostFacts, Verdict

VERSIONS = {
    **{"raybench": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "ray": "2.60.0"},
    **{"cuda": "13.0", "nccl": "2.28.9"},
}
HEALTHY: dict[str, Any] = {
    "versions": VERSIONS,
    "environment": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    "libraries": {"libnccl.so.2": "/opt/nccl/libnccl.so.2"},
    **{"sm_clock_mhz": 345, "sm_clock_max_mhz": 1980, "power_cap_default_w": 700.0},
    "topology": "NVLink x18, 1:SYS",
    "temperature_c": 31.0,
    "throttle_reasons": ("idle",),
    **{"persistence_mode": True, "mig_mode": False, "ecc_mode": True, "other_processes": 0},
    "omp_num_threads": 1,
    **{"disk_free_bytes": 50 * 2**30, "shm_free_bytes": 60 * 2**30},
}
HOST = HostFacts(load=0.4, cores=16, memlock_bytes=float("inf"), interfaces={"eth0": 100.0})


def healthy(rank: int = 0, **changes: Any) -> Device:
    return make_device(rank, **{**HEALTHY, **changes})


def facts(*devices: Device, **of_host: Any) -> EnvironmentFacts:
    host = replace(HOST, **of_host)
    states = tuple(DeviceFacts(device=one, read_s=0.0, host=host) for one in devices)
    return EnvironmentFacts(devices=devices, states=states)


def found(facts: EnvironmentFacts) -> list[Finding]:
    return [judgement.finding for judgement in judge_environment(facts)]


def wrong(facts: EnvironmentFacts) -> list[Finding]:
    fine = (Verdict.HEALTHY, Verdict.UNKNOWN)
    return [finding for finding in found(facts) if finding.verdict not in fine]


def test_healthy_gpus_have_no_faults():
    findings = found(facts(*map(healthy, range(4))))
    assert {finding.verdict for finding in findings} == {Verdict.HEALTHY}
    assert not [finding.test for finding in findings if finding.command]
    on_cpus = {finding.test for finding in found(facts(healthy(kind="cpu")))}
    assert {"devices per node", "threads", "disk", "load", "versions"} <= on_cpus
    assert not {"clocks", "ECC", "NVLink", "memlock"} & on_cpus


@pytest.mark.parametrize(
    ("test", "change", "verdict", "reason"),
    [
        ("models", {"name": "NVIDIA H100"}, "note", "2 models"),
        ("versions", {"versions": {**VERSIONS, "nccl": "2.27.3"}}, "bad", "versions of nccl"),
        ("versions", {"driver_version": "570.9"}, "bad", "versions of driver"),
        ("libraries", {"libraries": {"libnccl.so.2": "/usr/lib/libnccl.so.2"}}, "note", "nccl.so"),
        ("niceness", {"niceness": 15}, "note", "niceness 15"),
        ("threads", {"omp_num_threads": 16}, "note", "19 threads of workers share 16 cores"),
        ("clocks", {"sm_clock_max_mhz": 1200}, "note", "at most 1,200 MHz"),
        ("throttling", {"throttle_reasons": ("power_cap",)}, "note", "power_cap"),
        ("throttling", {"throttle_reasons": ("thermal_hw",)}, "bad", "thermal_hw"),
        ("power cap", {"power_cap_w": 500.0}, "note", "500 W, default 700 W"),
        ("temperature", {"temperature_c": 83.0}, "note", "83 °C before any work"),
        ("MIG", {"mig_mode": True}, "note", "MIG is on"),
        ("persistence", {"persistence_mode": False}, "note", "off"),
        ("ECC", {"ecc_mode": False}, "note", "off"),
        ("NVLink", {"topology": "NVLink x17, 1:SYS"}, "note", "17 active links; others"),
        ("other processes", {"other_processes": 1}, "note", "1 other program on the GPU"),
    ],
)
def test_faulty_device_is_named_with_advice(test, change, verdict, reason):
    def judged(**changes):
        devices = [healthy(0), healthy(1), healthy(2, **changes), healthy(3)]
        return [one for one in wrong(facts(*devices)) if one.test == test]

    [finding] = judged(**change)
    assert (finding.verdict, finding.stage) == (verdict, "environment")
    assert reason in finding.reason
    is_of_device = finding.subject.kind == "device"
    assert finding.subject.name == "alpha GPU 2" or not is_of_device
    assert bool(finding.command) == (test != "models")
    # Clocks and links of another model are not compared.
    of_other_model = judged(**{"name": "Other GPU", **change})
    assert bool(of_other_model) == ("sm_clock_max_mhz" not in change and test != "NVLink")


@pytest.mark.parametrize(
    ("test", "change", "reason"),
    [
        ("load", {"load": 7.0, "cores": 2}, "load 7 on 2 cores"),
        (
            "memlock",
            {"memlock_bytes": 2.0**26, "rdma_adapters": ("mlx5_0",)},
            "only 0.0625 GiB of memory may be locked",
        ),
    ],
)
def test_busy_or_limited_host_is_noted(test, change, reason):
    [finding] = wrong(facts(healthy(0), healthy(1), **change))
    assert (finding.test, finding.verdict) == (test, Verdict.NOTE)
    assert finding.subject.name == "alpha"
    assert reason in finding.reason


def test_memlock_matters_only_with_rdma_adapter():
    assert not wrong(facts(healthy(), memlock_bytes=2.0**26))


def test_slower_interface_than_other_nodes_is_noted():
    devices = (healthy(0), healthy(0, node_id="b", host="beta", uuid="GPU-9"))
    slow = replace(HOST, interfaces={"eth0": 1.0})
    states = tuple(
        DeviceFacts(device=device, read_s=0.0, host=host)
        for device, host in zip(devices, (HOST, slow), strict=True)
    )
    [finding] = wrong(EnvironmentFacts(devices=devices, states=states))
    assert (finding.test, finding.subject.name) == ("network", "beta")
    assert finding.evidence == "eth0 1 Gbit/s"


def test_node_with_fewer_devices_is_noted():
    other = {"node_id": "b", "host": "beta"}
    [finding] = wrong(facts(healthy(0), healthy(1), healthy(0, uuid="GPU-9", **other)))
    assert (finding.test, finding.subject.name) == ("devices per node", "beta")


def test_missing_devices_are_bad_and_sweeps_noted():
    all_facts = replace(facts(healthy()), missing=2, other_sweeps=("run a-1 of bob",))
    told = {finding.test: finding for finding in wrong(all_facts)}
    assert told.keys() == {"missing devices", "other sweeps"}
    assert told["missing devices"].verdict is Verdict.BAD
    assert "run a-1 of bob" in told["other sweeps"].reason


def test_nice_shell_needs_no_restart_of_ray():
    of_cluster = facts(healthy(niceness=5))
    [finding] = wrong(of_cluster)
    assert finding.command == "ray stop; ray start --address=HEAD:6379  # on alpha"
    [finding] = wrong(replace(of_cluster, is_private=True))
    assert finding.command == "nice  # must print 0 in the shell that starts raybench"


def test_unread_facts_are_unknown_and_no_fault():
    told = {"versions", "environment", "omp_num_threads", "libraries"}
    untold = dict.fromkeys(HEALTHY.keys() - told) | {"power_cap_w": None, "throttle_reasons": ()}
    devices = tuple(healthy(rank, **untold) for rank in range(2))
    findings = found(EnvironmentFacts(devices=devices))
    assert {finding.verdict for finding in findings} == {Verdict.HEALTHY, Verdict.UNKNOWN}
    assert {finding.test for finding in findings if finding.verdict is Verdict.UNKNOWN} == {
        *("disk", "/dev/shm", "clocks", "throttling", "power cap", "temperature", "ECC"),
        *("MIG", "persistence", "NVLink", "other processes", "load", "network", "memlock"),
    }
    assert not wrong(facts(healthy(0), healthy(1, driver_version=None)))


@pytest.mark.parametrize("fact", ["disk_free_bytes", "shm_free_bytes"])
def test_full_disk_is_noted(fact):
    [finding] = wrong(facts(healthy(0, **{fact: 64 * 2**20})))
    assert finding.test == ("disk" if fact.startswith("disk") else "/dev/shm")
    assert "only 0.0625 GiB" in finding.reason


def costly(name: str, value: str = "1", **changes: Any) -> Finding | None:
    """The finding about a variable that two devices have, if there is one."""
    devices = (healthy(rank, environment={name: value}, **changes) for rank in range(2))
    return next((one for one in found(facts(*devices)) if one.test == name), None)


@pytest.mark.parametrize(
    ("verdict", "settings"),
    [
        (
            "bad",
            "NCCL_P2P_DISABLE=1 NCCL_P2P_LEVEL=LOC CUDA_LAUNCH_BLOCKING=1 "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL PYTORCH_NO_CUDA_MEMORY_CACHING=1",
        ),
        (
            "note",
            "NCCL_SHM_DISABLE=1 NCCL_DEBUG=info NCCL_DEBUG=TRACE NCCL_ALGO=Ring NCCL_PROTO=LL "
            "CUDA_VISIBLE_DEVICES=1,0 CUDA_VISIBLE_DEVICES=0,0 TORCH_NCCL_BLOCKING_WAIT=1 "
            "TORCH_NCCL_ENABLE_TIMING=true NVIDIA_TF32_OVERRIDE=0 NCCL_MAX_CTAS=1 "
            "NCCL_MAX_NCHANNELS=2 CUDA_DEVICE_MAX_CONNECTIONS=1",
        ),
        (
            None,
            "NCCL_P2P_DISABLE=0 NCCL_P2P_LEVEL=NVL NCCL_DEBUG=WARN NCCL_ALGO= "
            "CUDA_LAUNCH_BLOCKING=0 CUDA_VISIBLE_DEVICES=0,2,10 "
            "CUDA_VISIBLE_DEVICES=GPU-b,GPU-a TORCH_DISTRIBUTED_DEBUG=OFF NCCL_IB_DISABLE=1",
        ),
    ],
)
def test_only_costly_values_of_variables_are_found(verdict, settings):
    for setting in settings.split(" "):
        name, _, value = setting.partition("=")
        finding = costly(name, value)
        assert (finding and finding.verdict) == verdict, setting
        if finding:
            assert finding.reason.startswith(f"set to {value}; ")
            assert finding.command == f"unset {name}"


def test_cost_of_variable_depends_on_devices():
    environment = {"NCCL_IB_DISABLE": "1"}
    two_nodes = facts(*(healthy(r, environment=environment, node_id=f"n{r}") for r in range(2)))
    told = {finding.test: finding.verdict for finding in found(two_nodes)}
    assert told["NCCL_IB_DISABLE"] is Verdict.BAD
    for changes in ({"topology": "NVLink x0, 1:SYS"}, {"kind": "cpu", "topology": None}):
        finding = costly("NCCL_P2P_DISABLE", **changes)
        assert finding.verdict is Verdict.NOTE
        assert finding.reason.endswith("(on GPUs)") == ("kind" in changes)
    assert "GPUs" not in costly("TORCH_DISTRIBUTED_DEBUG", "DETAIL", kind="cpu").reason


def test_variable_of_one_worker_is_found_with_owner():
    findings = wrong(facts(healthy(0), healthy(1, environment={"NCCL_P2P_DISABLE": "1"})))
    told = {finding.test: finding for finding in findings}
    assert told["variables"].verdict is Verdict.NOTE
    assert (
        "NCCL_P2P_DISABLE not set (alpha GPU 0), NCCL_P2P_DISABLE 1 (alpha GPU 1)"
        in told["variables"].evidence
    )
    assert told["NCCL_P2P_DISABLE"].evidence == "NCCL_P2P_DISABLE (alpha GPU 1)"
    # raybench chooses these variables itself.
    own = (
        healthy(r, environment={"GLOO_SOCKET_IFNAME": f"eth{r}", "NCCL_RAS_ADDR": f"127.0.0.1:{r}"})
        for r in range(2)
    )
    assert not wrong(facts(*own))
