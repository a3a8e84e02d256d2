"""What doctor says of facts: each fault is found, named, and nothing is guessed."""

from typing import Any

import pytest
from builders import make_device

from raybench.doctor.checks import Check, Facts, Verdict, check_facts
from raybench.records.device import Device
from raybench.records.devices import DeviceFacts

VERSIONS = {
    **{"raybench": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "ray": "2.60.0"},
    **{"cuda": "13.0", "nccl": "2.28.9"},
}
HEALTHY: dict[str, Any] = {
    "versions": VERSIONS,
    "environment": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    **{"sm_clock_mhz": 345, "sm_clock_max_mhz": 1980, "power_cap_default_w": 700.0},
    "topology": "NVLink x18, 1:SYS",
    "temperature_c": 31.0,
    "throttle_reasons": ("idle",),
    **{"persistence_mode": True, "mig_mode": False, "other_processes": 0},
    "omp_num_threads": 1,
    **{"disk_free_bytes": 50 * 2**30, "shm_free_bytes": 60 * 2**30},
}


def healthy(rank: int = 0, **changes: Any) -> Device:
    return make_device(rank, **{**HEALTHY, **changes})


def facts(*devices: Device) -> Facts:
    return Facts(devices=devices, versions={"torch": "2.11.0"})


def check_named(name: str, facts: Facts) -> Check:
    return next(check for check in check_facts(facts) if check.name == name)


def test_nothing_is_wrong_with_healthy_gpus():
    checks = check_facts(facts(*map(healthy, range(4))))
    assert {check.verdict for check in checks} == {Verdict.OK}
    assert not [check.name for check in checks if check.advice or not check.found]
    on_cpus = {check.name for check in check_facts(facts(healthy(kind="cpu")))}
    assert {"devices", "threads", "disk"} <= on_cpus
    assert not {"clocks", "errors", "NVLink"} & on_cpus
    uneven = facts(healthy(0), healthy(1), healthy(0, node_id="node-b", host="beta", uuid="GPU-9"))
    assert check_named("devices", uneven).found.endswith("on 2 nodes (alpha 2, beta 1)")


@pytest.mark.parametrize(
    ("name", "change", "verdict", "found"),
    [
        ("devices", {"name": "NVIDIA H100"}, "warn", "1 x NVIDIA H100"),
        (
            "versions",
            {"versions": {**VERSIONS, "nccl": "2.27.3"}},
            "fail",
            "2.27.3 on alpha cuda:2",
        ),
        ("versions", {"driver_version": "570.9"}, "fail", "570.9 on alpha cuda:2"),
        ("niceness", {"niceness": 15}, "warn", "15 on alpha cuda:2"),
        ("threads", {"omp_num_threads": 16}, "warn", "19 threads in 4 workers for 16"),
        ("clocks", {"sm_clock_max_mhz": 1200}, "warn", "1200 MHz on alpha cuda:2"),
        ("throttling", {"throttle_reasons": ("power_cap",)}, "warn", "power_cap on alpha"),
        ("throttling", {"throttle_reasons": ("thermal_hw",)}, "fail", "thermal_hw on"),
        ("power cap", {"power_cap_w": 500.0}, "warn", "500 W, default 700 W on alpha cuda:2"),
        ("temperature", {"temperature_c": 83.0}, "warn", "75 °C on 3 devices; 83 °C on alpha"),
        ("MIG", {"mig_mode": True}, "warn", "on on alpha cuda:2"),
        ("persistence", {"persistence_mode": False}, "warn", "off on alpha cuda:2"),
        ("NVLink", {"topology": "NVLink x0, 1:SYS"}, "warn", "0 active links on alpha"),
        ("NVLink", {"topology": "NVLink x17, 1:SYS"}, "warn", "17 active links on alpha"),
        ("other use", {"other_processes": 1}, "warn", "other processes: 1 on alpha"),
    ],
)
def test_a_device_with_a_fault_is_named_and_something_is_advised(name, change, verdict, found):
    def check_of(**changed):
        changed_one = healthy(2, **changed)
        return check_named(name, facts(healthy(0), healthy(1), changed_one, healthy(3)))

    check = check_of(**change)
    assert check.verdict == verdict
    assert found in check.found
    assert check.advice
    # Clocks and links of another model are not compared.
    other = check_of(**{"name": "Other GPU", **change})
    assert (other.verdict == verdict) == ("sm_clock_max_mhz" not in change and name != "NVLink")


def test_facts_that_nobody_told_are_unknown_and_no_fault():
    told = {"versions", "environment", "omp_num_threads"}
    untold = dict.fromkeys(HEALTHY.keys() - told) | {"power_cap_w": None, "throttle_reasons": ()}
    checks = check_facts(facts(*(healthy(rank, **untold) for rank in range(2))))
    assert {check.verdict for check in checks} == {Verdict.OK}
    partly = facts(healthy(0), healthy(1, driver_version=None))
    assert check_named("versions", partly).verdict == "ok"
    assert {check.name for check in checks if check.found == "unknown"} == {
        *("disk", "/dev/shm", "clocks", "throttling", "power cap", "temperature", "errors"),
        *("MIG", "persistence", "NVLink", "other use"),
    }


@pytest.mark.parametrize("fact", ["disk_free_bytes", "shm_free_bytes"])
def test_a_full_disk_is_a_warning(fact):
    name = "disk" if fact.startswith("disk") else "/dev/shm"
    check = check_named(name, facts(healthy(0, **{fact: 64 * 2**20})))
    assert (check.verdict, check.found) == (Verdict.WARN, "0.1 GiB free")


def costly(name: str, value: str = "1", **changes: Any) -> Check | None:
    """The check of a variable that two devices have, if there is one."""
    chosen = (healthy(rank, environment={name: value}, **changes) for rank in range(2))
    checks = check_facts(facts(*chosen))
    return next((check for check in checks if check.name == name), None)


@pytest.mark.parametrize(
    ("verdict", "settings"),
    [
        (
            "fail",
            "NCCL_P2P_DISABLE=1 NCCL_P2P_LEVEL=LOC CUDA_LAUNCH_BLOCKING=1 "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ),
        (
            "warn",
            "NCCL_SHM_DISABLE=1 NCCL_DEBUG=info NCCL_DEBUG=TRACE NCCL_ALGO=Ring NCCL_PROTO=LL "
            "CUDA_VISIBLE_DEVICES=1,0 CUDA_VISIBLE_DEVICES=0,0 TORCH_NCCL_BLOCKING_WAIT=1 "
            "TORCH_NCCL_ENABLE_TIMING=true NVIDIA_TF32_OVERRIDE=0",
        ),
        (
            None,
            "NCCL_P2P_DISABLE=0 NCCL_P2P_LEVEL=NVL NCCL_DEBUG=WARN NCCL_ALGO= "
            "CUDA_LAUNCH_BLOCKING=0 CUDA_VISIBLE_DEVICES=0,2,10 "
            "CUDA_VISIBLE_DEVICES=GPU-b,GPU-a TORCH_DISTRIBUTED_DEBUG=OFF NCCL_IB_DISABLE=1",
        ),
    ],
)
def test_a_variable_that_cripples_is_called_out_and_a_harmless_value_is_not(verdict, settings):
    for setting in settings.split(" "):
        name, _, value = setting.partition("=")
        check = costly(name, value)
        assert (check and check.verdict) == verdict, setting
        if check:
            assert check.found.startswith(f"{value}: ")
            assert check.advice.startswith(f"unset {name}")


def test_how_bad_a_variable_is_depends_on_the_devices():
    off = {"NCCL_IB_DISABLE": "1"}
    between = facts(*(healthy(r, environment=off, node_id=f"n{r}") for r in range(2)))
    assert check_named("NCCL_IB_DISABLE", between).verdict == "fail"
    # Two nodes that call themselves alike.
    alike = facts(healthy(0, environment={"CUDA_LAUNCH_BLOCKING": "1"}), healthy(0, node_id="n1"))
    assert check_named("CUDA_LAUNCH_BLOCKING", alike).found.startswith("1 on ")
    for changes in ({"topology": "NVLink x0, 1:SYS"}, {"kind": "cpu", "topology": None}):
        check = costly("NCCL_P2P_DISABLE", **changes)
        assert check.verdict == "warn"
        assert check.found.endswith("(on GPUs)") == ("kind" in changes)
    assert "GPUs" not in costly("TORCH_DISTRIBUTED_DEBUG", "DETAIL", kind="cpu").found


def test_a_variable_that_one_worker_has_is_told_with_its_owner():
    chosen = facts(healthy(0), healthy(1, environment={"NCCL_P2P_DISABLE": "1"}))
    alike = check_named("variables", chosen)
    assert alike.verdict is Verdict.WARN
    assert "NCCL_P2P_DISABLE=not set on 1 device; 1 on alpha cuda:1" in alike.found
    found = check_named("NCCL_P2P_DISABLE", chosen)
    assert found.found.startswith("1 on alpha cuda:1: ")
    # That which raybench chose for each node is none.
    chosen = facts(*(healthy(r, environment={"GLOO_SOCKET_IFNAME": f"eth{r}"}) for r in range(2)))
    assert check_named("variables", chosen).verdict is Verdict.OK


def with_state(**known: Any) -> Facts:
    """One GPU of which NVML and the kernel tell this."""
    device = healthy()
    state = DeviceFacts(device=device, read_s=0.0, **known)
    return Facts(devices=(device,), states=(state,))


FAULTS = {"is_remap_failed": True, "kernel_xids": (79,), "ecc_errors": 3, "pcie_lanes": 8}
TOLD = "3 uncorrected memory errors since the driver was loaded; alpha GPU 0: no spare row is left"


@pytest.mark.parametrize(
    ("known", "verdict", "found"),
    [
        (FAULTS | {"pcie_lanes_max": 16}, "fail", f"alpha GPU 0: {TOLD}; alpha GPU 0: Xid 79"),
        (FAULTS | {"pcie_lanes_max": 16}, "fail", "alpha GPU 0: 8 of 16 PCIe lanes are in use"),
        ({"is_remap_failed": False}, "ok", "none"),
        ({}, "ok", "unknown"),
    ],
)
def test_faults_that_the_driver_tells_are_errors_and_an_unknown_one_is_none(known, verdict, found):
    check = check_named("errors", with_state(**known))
    assert check.verdict == verdict
    assert found in check.found
