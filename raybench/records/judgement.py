"""Reasons for the verdicts of a health check, as data; `report/words/health.py` has the words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from raybench.records.conditions import Condition, FactValue
from raybench.records.devices import SubjectKind
from raybench.records.other_program import OtherProgram
from raybench.records.status import Status

# Meaning of a problem for its subject:
# fault: the subject is broken.
# disputed: subjects differ, and it is unknown which subject is broken.
# failed: the test has no result; the subject may be healthy.
# not read: the test has no result because of another subject or program.
Effect = Literal["fault", "disputed", "failed", "not read"]


class ProblemKind(StrEnum):
    """What is wrong with a subject in one pass. Comments name the fields that are set."""

    effect: Effect

    CHANGED_BITS = "changed_bits", "fault"
    # value: devices of the model that agree on another product.
    OTHER_BITS = "other_bits", "fault"
    MISPLACED_BITS = "misplaced_bits", "fault"
    # names: of the devices that differ.
    DISPUTED_BITS = "disputed_bits", "disputed"
    # status, detail: of the record.
    WRONG_RESULT = "wrong_result", "fault"
    DISPUTED_RESULT = "disputed_result", "disputed"
    FAILED = "failed", "failed"
    NOT_STARTED = "not_started", "not read"
    # names: of the device that failed; status.
    OTHER_FAILED = "other_failed", "not read"
    # names: of the device that failed, if known. status, detail: of the record.
    NO_COLLECTIVE = "no_collective", "failed"
    # value: free bytes. limit: bytes that the test needs.
    NO_ROOM = "no_room", "not read"
    WORKER_LOST = "worker_lost", "fault"
    # detail: why the GPU cannot be read any more.
    DEVICE_UNREAD = "device_unread", "fault"
    # value: during the check. limit: since the driver was loaded.
    MEMORY_ERRORS = "memory_errors", "fault"
    ROW_PENDING = "row_pending", "fault"
    # value: rows that went bad during the check.
    BAD_ROWS = "bad_rows", "fault"
    PAGE_PENDING = "page_pending", "fault"
    # value: pages that went bad during the check.
    BAD_PAGES = "bad_pages", "fault"
    NO_SPARE_ROW = "no_spare_row", "fault"
    # numbers: of the Xids, during the check or earlier.
    NEW_XIDS = "new_xids", "fault"
    OLD_XIDS = "old_xids", "fault"
    # value: packets.
    PCIE_REPLAYS = "pcie_replays", "fault"
    # value: lanes in use. limit: lanes of the device.
    FEW_LANES = "few_lanes", "fault"
    # numbers: of the links.
    LINKS_DOWN = "links_down", "fault"
    LINK_ERRORS = "link_errors", "fault"
    # names: faults that the fabric manager reports.
    FABRIC = "fabric", "fault"

    def __new__(cls, value: str, effect: Effect = "fault") -> Self:
        """Make a member; the tables hold its value."""
        member = str.__new__(cls, value)
        member._value_, member.effect = value, effect
        return member


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkErrors:
    """How many errors of a kind a link had during a check."""

    link: int
    kind: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with a subject in one pass; `ProblemKind` says which fields a kind has."""

    kind: ProblemKind
    value: int = 0
    limit: int = 0
    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    status: Status | None = None
    # Text of an error, or of the driver.
    detail: str = ""
    link_errors: tuple[LinkErrors, ...] = ()

    @property
    def effect(self) -> Effect:
        """What the problem means for the subject."""
        return self.kind.effect


class ReasonKind(StrEnum):
    """What supports a verdict. Comments name the fields that are set."""

    # The driver does not report the fact.
    NOT_REPORTED = "not_reported"
    NOT_READ = "not_read"
    # problems; and if some passes had a result, value: failed passes, limit: all passes.
    PROBLEMS = "problems"
    # value: time over the time of similar subjects, or over the usual time.
    SLOWER_THAN_PEERS = "slower_than_peers"
    SLOWER_THAN_USUAL = "slower_than_usual"
    ALL_SLOW = "all_slow"
    # model, placement, unit. value: of the datasheet; None if unknown.
    NOTHING_KNOWN = "nothing_known"
    # model. value: earlier checks that a comparison needs. limit: existing earlier checks.
    NO_FIGURES = "no_figures"
    # value: points that other programs disturbed. limit: all points.
    OTHER_PROGRAMS = "other_programs"
    # value: slow partners. subject.
    SLOW_WITH_PARTNERS = "slow_with_partners"
    # value: slow pairs. limit: all pairs of the path.
    SLOW_PATH = "slow_path"
    # value: ms that other ranks wait for this rank. limit: ms of the step.
    LATE = "late"
    # condition; see `Condition` for the other fields.
    CONDITION = "condition"
    # The kinds below are evidence, not reasons. value: passes.
    IN_EACH_PASS = "in_each_pass"
    # value: relative standard deviation of the peers.
    SPREAD = "spread"
    # value: slow subjects. limit: other subjects.
    ONE_OF_SLOW = "one_of_slow"
    NONE_STANDS_OUT = "none_stands_out"
    # programs. names: the same programs in words, if nothing else is known of them.
    PROGRAMS = "programs"
    # names: why NVML says that clocks were limited. value: first pass; 0: before any work.
    THROTTLED = "throttled"
    # value: degrees Celsius.
    TEMPERATURE = "temperature"
    # value: watts. limit: watts as delivered.
    POWER_LIMIT = "power_limit"
    # What carries the data. value: NVLinks.
    ON_NVLINK = "on_nvlink"
    # names: PCIe link, and level of the connection as the driver names it; may be empty.
    ON_PCIE = "on_pcie"
    # names: of each end, such as its network interface.
    ON_NETWORK = "on_network"
    # names: of variables that are set and slow such tests down.
    VARIABLES = "variables"
    # names: driver versions of the devices. others: of the references.
    DRIVER = "driver"
    # The host sets the pace of the test.
    PACED_BY_HOST = "paced_by_host"
    # Nothing that the devices share explains it.
    CANNOT_TELL = "cannot_tell"
    FAST_WITH_OTHERS = "fast_with_others"
    ONE_ILL_ALONE = "one_ill_alone"
    # names: of the partners.
    PARTNERS = "partners"
    # value: ms that the rank waits for the last rank.
    WAITS = "waits"
    SLOW_ALONE = "slow_alone"
    SLOW_LINK = "slow_link"
    CPU_OR_DATA = "cpu_or_data"
    # facts: that the test has read.
    FACTS = "facts"


Blame = Literal["path", "path or end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A reason for a verdict, or evidence; `ReasonKind` says which fields a kind has."""

    kind: ReasonKind
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    names: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    programs: tuple[OtherProgram, ...] = ()
    problems: tuple[Problem, ...] = ()
    model: str = ""
    # Name of a `SubjectPlacement` in references; empty for a device.
    placement: str = ""
    subject: SubjectKind = "device"
    # Only for a slow pair.
    blame: Blame | None = None
    condition: Condition | None = None
    facts: tuple[FactValue, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerValue:
    """The value of similar subjects in the same check."""

    value: float
    # Number of subjects with a value.
    count: int
    # Size of the faster group, whose median is `value`, if the subjects fall into two groups; or 0.
    fastest: int = 0
    # Whether this is the best value, because few subjects are similar.
    is_best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """The range of a figure on other days or machines."""

    low: float
    high: float
    source: Literal["start", "own checks", "checks of model", "reference"]
    # Number of earlier checks.
    checks: int = 0
    # Only for a reference.
    provenance: str = ""


Expected = PeerValue | ValueRange


class CommandKind(StrEnum):
    """A command that a health check proposes. Comments name the fields that are set."""

    # uuid, host.
    RESET_GPU = "reset_gpu"
    SHOW_GPU = "show_gpu"
    SHOW_HOST_LINK = "show_host_link"
    SHOW_GPU_PROCESSES = "show_gpu_processes"
    # uuid, host, value: watts.
    SET_POWER_LIMIT = "set_power_limit"
    # host, value: process id.
    SHOW_PROCESS = "show_process"
    # host, numbers: process ids.
    SHOW_PROGRAMS = "show_programs"
    # host, uuid.
    SHOW_TEMPERATURE = "show_temperature"
    SHOW_POWER = "show_power"
    # host, value: watts, for all GPUs.
    SET_POWER_LIMITS = "set_power_limits"
    # names: network interfaces. host.
    SHOW_INTERFACE = "show_interface"
    # host.
    DRAIN_SLURM = "drain_slurm"
    CORDON = "cordon"
    SHOW_CPU_LOAD = "show_cpu_load"
    SHOW_HOST_TOPOLOGY = "show_host_topology"
    SHOW_NVLINKS = "show_nvlinks"
    # hosts.
    SHOW_NETWORK = "show_network"
    SHOW_ALL_CPU_LOAD = "show_all_cpu_load"
    SHOW_ALL_GPU_PROCESSES = "show_all_gpu_processes"
    # names: of variables.
    UNSET = "unset"
    CHECK_ENVIRONMENT = "check_environment"
    # These commands give later checks something to compare with.
    CHECK_AGAIN = "check_again"
    EXPORT_REFERENCES = "export_references"
    BURN_IN = "burn_in"
    # The commands below are about the environment. host.
    RESTART_RAY = "restart_ray"
    SHOW_DISK = "show_disk"
    ENLARGE_SHM = "enlarge_shm"
    RAISE_MEMLOCK = "raise_memlock"
    SHOW_INTERFACES = "show_interfaces"
    SHOW_KERNEL_LOG = "show_kernel_log"
    SHOW_VERSIONS = "show_versions"
    SHOW_PEERS = "show_peers"
    SHOW_RDMA = "show_rdma"
    LOAD_PEERMEM = "load_peermem"
    TURN_PERSISTENCE_ON = "turn_persistence_on"
    # uuid, host.
    RESET_CLOCKS = "reset_clocks"
    SHOW_THROTTLING = "show_throttling"
    TURN_MIG_OFF = "turn_mig_off"
    TURN_ECC_ON = "turn_ecc_on"
    # names: packages, or the variable.
    INSTALL = "install"
    CHOOSE_INTERFACE = "choose_interface"
    LIMIT_THREADS = "limit_threads"
    START_WITHOUT_NICE = "start_without_nice"
    SHOW_RAY = "show_ray"
    WAIT = "wait"
    CHECK_LOUDLY = "check_loudly"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to type; raybench never runs it."""

    kind: CommandKind
    hosts: tuple[str, ...] = ()
    uuid: str = ""
    value: float = 0
    names: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
