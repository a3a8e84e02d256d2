"""What a quick check decides about its node; pure."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from raybench.hangs.processes import ProcessFacts
from raybench.health.quick.children import Death, Silence
from raybench.health.quick.decision import IMPORT, START, STORE, QuickEvidence, Trouble, decide
from raybench.health.quick.messages import NotStarted
from raybench.health.suite import HealthTest
from raybench.health.suite import test_named as row_named
from raybench.health.verdicts import Judgement
from raybench.records.conditions import Condition
from raybench.records.devices import Action, Subject, Verdict
from raybench.records.judgement import Problem, ProblemKind, Reason, ReasonKind
from raybench.records.node_report import DrainKind, NodeState, UntestedKind, UntestedReason
from raybench.records.node_use import CpuLoad, DeviceUse
from raybench.records.other_program import OtherProgram
from raybench.records.status import Status

GEMM = row_named("gemm bf16 8192", "cuda")
BITS = row_named("same bits bf16 2048", "cuda")
GPUS = [
    Subject(kind="device", name=f"alpha GPU {number}", model="H200", uuids=(f"GPU-{number}",))
    for number in range(2)
]
NAMES = tuple(one.name for one in GPUS)
PYTHON = OtherProgram(
    host="alpha",
    process_id=4242,
    name="python3",
    user="bob",
    since=datetime(2026, 11, 30, 11, 7, tzinfo=UTC),
)
BUSY = {NAMES[1]: DeviceUse(programs=(PYTHON,), utilization_pct=100)}


def healthy(test=GEMM, gpu=1):
    return Judgement(test=test, subject=GPUS[gpu], passes=1, value=700.0, verdict=Verdict.HEALTHY)


def slow(test=GEMM, gpu=1, verdict=Verdict.SUSPECT, ratio=1.3):
    reason = Reason(kind=ReasonKind.SLOWER_THAN_PEERS, value=ratio)
    return replace(healthy(test, gpu), verdict=verdict, ratio=ratio, reason=reason)


def wrong(kind=ProblemKind.CHANGED_BITS, test=BITS, gpu=1, **problem):
    reason = Reason(kind=ReasonKind.PROBLEMS, problems=(Problem(kind=kind, **problem),))
    return replace(healthy(test, gpu), verdict=Verdict.BAD, reason=reason, action=Action.REPLACE)


def fact(name, kind, **problem):
    test = HealthTest(name=name, stage="facts", unit="", floor=0.0, is_compared=False)
    return wrong(kind, test, **problem)


def silence(state, waited_s=6.0):
    return Silence(facts=ProcessFacts(pid=1, state=state), waited_s=waited_s)


def trouble(cause, phase=GEMM.name, others=True, **fields):
    return Trouble(device=NAMES[1], phase=phase, cause=cause, have_others_answered=others, **fields)


def decided(first=(), second=(), kind="cuda", **found):
    good = () if found.get("untested") else (healthy(gpu=0), healthy(BITS, gpu=0))
    evidence = QuickEvidence(
        host="alpha", kind=kind, devices=NAMES, first=(*good, *first), second=second, **found
    )
    return decide(evidence)


def states_and_reasons(decision):
    return (
        decision.state,
        [one.kind for one in decision.drain],
        {one.kind for one in decision.untested},
    )


def test_healthy_devices_make_a_healthy_node():
    assert states_and_reasons(decided([healthy()])) == (NodeState.HEALTHY, [], set())


def test_a_device_slow_twice_drains():
    decision = decided([slow()], [slow()])
    [reason] = decision.drain
    assert decision.state is NodeState.DRAIN
    assert (reason.kind, reason.device, reason.test) == (
        DrainKind.FAILED_TWICE,
        NAMES[1],
        GEMM.name,
    )


def test_a_little_slow_twice_is_suspect():
    decision = decided([slow(ratio=1.2)], [slow(ratio=1.2)])
    assert (decision.state, decision.drain) == (NodeState.SUSPECT, ())


def test_a_device_slow_once_is_healthy():
    assert decided([slow()], [healthy()]).state is NodeState.HEALTHY


def test_a_slow_device_without_second_run_is_suspect():
    decision = decided([slow(verdict=Verdict.BAD)])
    assert states_and_reasons(decision) == (NodeState.SUSPECT, [], set())
    assert not [one for one in decision.findings if one.verdict is Verdict.BAD]


def test_wrong_bits_once_are_suspect():
    decision = decided([wrong()], [healthy(BITS)])
    assert states_and_reasons(decision) == (NodeState.SUSPECT, [], set())


def test_a_slow_device_beside_a_program_is_untested():
    decision = decided([slow()], [slow()], uses=BUSY)
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {UntestedKind.BUSY})
    [finding] = [one for one in decision.findings if one.ratio is not None]
    assert finding.verdict is Verdict.UNTESTED
    assert "process 4242 of bob" in finding.evidence


@pytest.mark.parametrize("repeats", [0, 1])
def test_lack_of_memory_is_no_fault_of_the_device(repeats):
    full = replace(
        wrong(ProblemKind.FAILED, GEMM, status=Status.OOM, detail="CUDA out of memory"),
        value=None,
        action=Action.RESET,
    )
    decision = decided([full], [full] * repeats)
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {UntestedKind.BUSY})


@pytest.mark.parametrize(
    ("uses", "kind"),
    [({}, UntestedKind.LIMITED_CLOCKS), (BUSY, UntestedKind.BUSY)],
)
def test_limited_clocks_are_no_broken_installation(uses, kind):
    fault = Reason(kind=ReasonKind.CONDITION, condition=Condition.THROTTLED, names=("power_brake",))
    test = HealthTest(
        name="throttling", stage="environment", unit="reasons", floor=0.0, is_compared=False
    )
    limited = replace(healthy(test), verdict=Verdict.BAD, value=1.0, reason=fault)
    decision = decided([healthy()], environment=(limited,), uses=uses)
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {kind})


def test_a_program_that_runs_nothing_is_noted():
    idle = {NAMES[1]: DeviceUse(programs=(PYTHON,), utilization_pct=0)}
    decision = decided([healthy()], uses=idle)
    assert decision.state is NodeState.HEALTHY
    [note] = [one for one in decision.findings if one.verdict is Verdict.NOTE]
    assert "python3" in note.reason


def test_a_slow_device_of_a_node_nobody_looked_at_never_drains():
    decision = decided([slow()], [slow()], is_observed=False)
    assert states_and_reasons(decision) == (NodeState.SUSPECT, [], {UntestedKind.OUT_OF_TIME})


def test_a_node_nobody_looked_at_is_untested():
    decision = decided([healthy()], is_observed=False)
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {UntestedKind.OUT_OF_TIME})


def test_wrong_bits_beside_a_program_still_drain():
    decision = decided([wrong()], [wrong()], uses=BUSY)
    assert decision.state is NodeState.DRAIN


def test_a_power_limit_never_drains():
    limited = replace(slow(), action=Action.SETTING)
    decision = decided([limited], [limited])
    assert states_and_reasons(decision) == (NodeState.SUSPECT, [], set())


@pytest.mark.parametrize(("ratio", "state"), [(1.4, "suspect"), (1.6, "drain")])
def test_host_links_drain_only_if_very_slow(ratio, state):
    copies = slow(row_named("h2d alone", "cuda"), ratio=ratio)
    assert decided([copies], [copies]).state == state


def test_a_node_that_is_slow_together_never_drains():
    together = replace(
        slow(row_named("all_reduce 1 GiB", "cuda")),
        subject=Subject(kind="node", name="alpha", model="H200", uuids=("GPU-0", "GPU-1")),
    )
    assert decided([together], [together]).state is NodeState.SUSPECT


@pytest.mark.parametrize("state", ["D", "R", "S"])
def test_a_process_stuck_in_the_driver_drains(state):
    decision = decided(troubles=(trouble(silence(state)),))
    assert (decision.state, decision.drain[0].kind) == (NodeState.DRAIN, DrainKind.STUCK)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (trouble(silence("T")), UntestedKind.DISTURBED),
        (trouble(silence("D"), others=False), UntestedKind.OUT_OF_TIME),
        (trouble(silence("D"), IMPORT), UntestedKind.OUT_OF_TIME),
        (trouble(silence("R", waited_s=0.3), START), UntestedKind.OUT_OF_TIME),
        # The imports of the processes end at different times.
        (trouble(silence("R"), START), UntestedKind.OUT_OF_TIME),
        (trouble(Death(exit_code=-9, last_line="")), UntestedKind.DISTURBED),
        (
            trouble(NotStarted(message="out of memory", is_out_of_memory=True), START),
            UntestedKind.BUSY,
        ),
        (
            trouble(NotStarted(message="no CUDA", is_out_of_memory=False), START, others=False),
            UntestedKind.BROKEN_INSTALLATION,
        ),
        (
            trouble(Death(exit_code=1, last_line="no torch"), IMPORT),
            UntestedKind.BROKEN_INSTALLATION,
        ),
    ],
)
def test_troubles_of_other_causes_never_drain(case, why):
    decision = decided(troubles=(case, case))
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {why})


@pytest.mark.parametrize(
    "late",
    [
        trouble(silence("R")),
        # In a collective another device may be the late one.
        replace(trouble(silence("R"), others=False), device=NAMES[0]),
    ],
)
def test_late_answers_beside_a_program_are_no_fault(late):
    decision = decided(troubles=(late,), uses=BUSY)
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {UntestedKind.BUSY})


@pytest.mark.parametrize(
    ("case", "why"),
    [
        # An import uses no GPU, so the program did not delay it.
        (trouble(silence("D"), IMPORT), UntestedKind.OUT_OF_TIME),
        (trouble(silence("T")), UntestedKind.DISTURBED),
        # The program is on the other device.
        (replace(trouble(silence("R", waited_s=0.3)), device=NAMES[0]), UntestedKind.OUT_OF_TIME),
    ],
)
def test_programs_explain_late_answers_alone(case, why):
    idle = {NAMES[1]: DeviceUse(programs=(PYTHON,), utilization_pct=0)}
    decision = decided(troubles=(case,), uses=idle)
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {why})


def test_a_late_store_is_said_in_words():
    late = trouble(silence("S", waited_s=1.0), phase=STORE, others=False)
    [reason] = decided(troubles=(late,)).untested
    assert "gave no answer in time before the first collective" in reason.detail


def test_a_cpu_worker_is_never_stuck():
    decision = decided(kind="cpu", troubles=(trouble(silence("R")),))
    assert not decision.drain


def test_a_process_that_crashes_twice_drains():
    crash = trouble(Death(exit_code=-11, last_line=""))
    assert decided(troubles=(crash,)).state is NodeState.SUSPECT
    decision = decided(troubles=(crash, crash))
    assert [one.kind for one in decision.drain] == [DrainKind.FAILED_TWICE]


def test_a_killed_process_that_was_replaced_is_healthy():
    killed = trouble(Death(exit_code=-9, last_line=""), is_resolved=True)
    decision = decided([healthy()], troubles=(killed,))
    assert states_and_reasons(decision) == (NodeState.HEALTHY, [], set())


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (fact("memory errors", ProblemKind.MEMORY_ERRORS, limit=3), NodeState.DRAIN),
        (fact("failed remaps", ProblemKind.NO_SPARE_ROW), NodeState.DRAIN),
        (fact("Xid errors", ProblemKind.NEW_XIDS, numbers=(79,)), NodeState.DRAIN),
        # An error of a program, and a fact about the slot.
        (fact("Xid errors", ProblemKind.NEW_XIDS, numbers=(13, 31)), NodeState.SUSPECT),
        (fact("PCIe lanes", ProblemKind.FEW_LANES, value=8, limit=16), NodeState.SUSPECT),
        # Such errors stay in the kernel's log after a repair.
        (fact("Xid errors", ProblemKind.OLD_XIDS, numbers=(79,)), NodeState.SUSPECT),
    ],
)
def test_errors_of_the_driver_drain(found, state):
    decision = decided([found])
    assert decision.state is state
    kinds = [DrainKind.DRIVER_ERROR] if state is NodeState.DRAIN else []
    assert [one.kind for one in decision.drain] == kinds


def test_crowded_cores_leave_cpu_workers_untested():
    crowded = CpuLoad(cores=1.5, processors=2, programs=(replace(PYTHON, busy_cores=1.5),))
    decision = decided([slow()], [slow()], kind="cpu", load=crowded)
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {UntestedKind.BUSY})
    assert any("python3" in one.detail for one in decision.untested)


def test_some_load_is_only_noted():
    load = CpuLoad(cores=8.0, processors=32, programs=(replace(PYTHON, busy_cores=8.0),))
    decision = decided([healthy()], load=load)
    assert decision.state is NodeState.HEALTHY
    [note] = [one for one in decision.findings if one.verdict is Verdict.NOTE]
    assert note.value == 8.0
    assert "process 4242" in note.reason


def test_devices_without_comparison_are_untested():
    unknown = replace(healthy(gpu=0), verdict=Verdict.UNKNOWN)
    evidence = QuickEvidence(host="alpha", kind="cuda", devices=NAMES[:1], first=(unknown,))
    assert states_and_reasons(decide(evidence)) == (
        NodeState.UNTESTED,
        [],
        {UntestedKind.NO_COMPARISON},
    )


def test_skipped_tests_leave_the_node_untested():
    decision = decided([healthy()], skipped=("d2h alone",))
    assert states_and_reasons(decision) == (NodeState.UNTESTED, [], {UntestedKind.OUT_OF_TIME})


def test_a_broken_driver_leaves_the_node_untested():
    reason = UntestedReason(kind=UntestedKind.BROKEN_INSTALLATION, detail="NVML fails")
    decision = decide(QuickEvidence(host="alpha", kind="cuda", devices=(), untested=reason))
    assert (decision.state, decision.untested) == (NodeState.UNTESTED, (reason,))


def test_devices_slow_alike_beside_programs_are_untested():
    every = Subject(kind="cluster", name="both H200", model="H200", uuids=("GPU-0", "GPU-1"))
    alike = replace(slow(), subject=every, reason=Reason(kind=ReasonKind.ALL_SLOW, value=1.2))
    assert decided([alike]).state is NodeState.SUSPECT
    assert decided([alike], uses=BUSY).state is NodeState.UNTESTED
