"""Conditions of the environment that may spoil a measurement, as data.

`report/words/environment.py` has the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """What is wrong with the environment. Comments name the fields of `Reason` that are set."""

    # value: niceness of the worker.
    NICENESS = "niceness"
    # value, limit: GiB.
    LITTLE_DISK = "little_disk"
    LITTLE_SHM = "little_shm"
    # value: GiB that a process may lock. limit: GiB that RDMA needs.
    LITTLE_MEMLOCK = "little_memlock"
    # value: threads of all workers of the node. limit: cores.
    MANY_THREADS = "many_threads"
    # value: load average. limit: cores.
    LOAD = "load"
    # value: MHz. limit: MHz of other devices of the model.
    LOW_CLOCKS = "low_clocks"
    # names: of the reasons, as NVML reports them.
    THROTTLED = "throttled"
    # value, limit: watts.
    POWER_CAP = "power_cap"
    # value, limit: degrees Celsius.
    WARM = "warm"
    MIG_ON = "mig_on"
    PERSISTENCE_OFF = "persistence_off"
    ECC_OFF = "ecc_off"
    # value: active NVLinks. limit: NVLinks of other devices of the model.
    FEW_NVLINKS = "few_nvlinks"
    # value: other processes on the device.
    OTHER_PROCESSES = "other_processes"
    # value: Gbit/s of the fastest interface. limit: Gbit/s on other nodes.
    SLOW_INTERFACE = "slow_interface"
    # value: devices of the node. limit: devices of another node.
    FEW_DEVICES = "few_devices"
    # value: devices of the cluster without a worker.
    MISSING_DEVICES = "missing_devices"
    # value: number of models.
    SEVERAL_MODELS = "several_models"
    # names: of the packages, libraries or variables whose values differ.
    VERSIONS_DIFFER = "versions_differ"
    LIBRARIES_DIFFER = "libraries_differ"
    VARIABLES_DIFFER = "variables_differ"
    # names: of the variable, then its values. limit: 1 if the devices use the variable, else 0.
    COSTLY_VARIABLE = "costly_variable"
    # names: other sweeps.
    OTHER_SWEEPS = "other_sweeps"
    # value: seconds. limit: seconds that are usual at most.
    SLOW_CONNECTION = "slow_connection"
    # names: of the transports that NCCL uses in the node.
    NO_PEER_ACCESS = "no_peer_access"
    # names: of the RDMA adapters.
    UNUSED_ADAPTERS = "unused_adapters"
    # names: of network interfaces that lead to no other host.
    INNER_INTERFACE = "inner_interface"
    NO_GPU_DIRECT = "no_gpu_direct"
    # Nodes of Ray that share a host.
    ONE_HOST = "one_host"
    # names: error messages.
    NO_ROUTES = "no_routes"


@dataclass(frozen=True, slots=True, kw_only=True)
class FactValue:
    """A fact of the environment in text, such as a version."""

    # Such as "torch"; or the fact itself, if it needs no value.
    name: str
    # "" is an empty variable; None is a variable that is not set.
    value: str | None = ""
    # Names of the devices that have this value; empty if all have it.
    subjects: tuple[str, ...] = ()
