"""`raybench health --quick`: the check of one node, from the start of its processes to the report.

Everything that may never return, such as a call of the driver, runs in child processes; this
process only waits for their messages, each with a deadline.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from raybench.errors import ClusterError, brief
from raybench.health.quick.children import (
    Answers,
    Child,
    Death,
    Silence,
    ask,
    collect,
    end_all,
    start_device_process,
    start_node_process,
)
from raybench.health.quick.device_slot import DeviceSlot
from raybench.health.quick.messages import (
    CountGpus,
    Imported,
    LookAround,
    NoGpus,
    NotStarted,
    RunTask,
    ServeStore,
    Started,
    Surroundings,
)
from raybench.health.quick.node_use import cpu_load, device_use
from raybench.records.detection import DetectionLimit
from raybench.records.device import DeviceKind
from raybench.records.devices import DevicePlace
from raybench.records.environment import usable_cores
from raybench.records.measurement import Failure, Measurement
from raybench.records.node_report import NodeReport, UntestedKind, UntestedReason
from raybench.records.node_use import DeviceUse
from raybench.records.task import GroupSpec, RankInfo, Task
from raybench.report.words import quick as words
from raybench.version import __version__

if TYPE_CHECKING:
    from raybench.analysis.references import References
    from raybench.health.quick.decision import NodeDecision, QuickEvidence, Trouble
    from raybench.health.quick.selection import QuickTest
    from raybench.health.readings import Reading
    from raybench.health.verdicts import Judgement

# Deadlines in seconds from the start of the check. A node that needs longer is not tested.
_TESTS_END_S, _LAST_LOOK_END_S = 24.0, 26.0
_STARTED_S: Mapping[DeviceKind, float] = {"cpu": 19.0, "cuda": 16.0}
# Latest start of a second run, and of a new process.
_SECOND_RUN_S, _RESTART_S = 21.0, 14.0
# Limits of single requests to the node's process and to the devices' processes.
_COUNT_S, _FIRST_LOOK_S, _LOOK_S, _STORE_S = 8.0, 5.0, 3.0, 3.0
# The limit of a collective is longer: connecting all devices takes seconds.
_TEST_S, _TOGETHER_S = 6.0, 9.0
# With less time a test is skipped.
_LEAST_TEST_S = 2.0
# With more CPU workers their imports take too long.
_MOST_CPU_WORKERS = 4
# Reasons for limited clocks that heat or a fault causes; other reasons are usual under load.
_LIMITS = frozenset({"hw_slowdown", "thermal_sw", "thermal_hw", "power_brake"})

# Modules that take a second to import, and that only the end of the check needs.
_NEEDED_LATER = (
    "raybench.health.environment",
    "raybench.health.quick.decision",
    "raybench.health.quick.readings",
    "raybench.health.quick.selection",
    "raybench.cluster.point_end",
    "raybench.report.quick_report",
)

Tell = Callable[[str], None]


def quick_check(
    device: Literal["auto", "cuda", "cpu"] = "auto",
    *,
    references: References | None = None,
    tell: Tell = lambda _: None,
    began_s: float | None = None,
) -> NodeReport:
    """Check the devices of this node and return the report, within 30 s.

    Args:
        device: "auto" tests GPUs if the node has GPUs, else CPU workers.
        references: default: the references that raybench ships.
        tell: receives lines of progress.
        began_s: when the command began, by `time.monotonic`; default: now.

    Raises:
        ClusterError: device is "cuda", and the node has no GPU.
    """
    began_s = time.monotonic() if began_s is None else began_s
    check = _Check(began_s=began_s, began=datetime.now(UTC).astimezone(), tell=tell)
    try:
        return check.run(device, references)
    except OSError as error:
        # The node may have no process or file descriptor left; no device is at fault.
        reason = UntestedReason(kind=UntestedKind.BROKEN_INSTALLATION, detail=brief(error))
        return check.fail(reason)
    finally:
        check.close()


@dataclass(slots=True, kw_only=True)
class _Check:
    """A running check."""

    began_s: float
    began: datetime
    tell: Tell
    host: str = field(default_factory=socket.gethostname)
    kind: DeviceKind = "cpu"
    node: Child | None = None
    slots: list[DeviceSlot] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    throttled: dict[str, set[str]] = field(default_factory=dict)
    # Address and port of the rendezvous store of process groups.
    store: tuple[str, int] | None = None
    # Number of process groups so far.
    groups: int = 0

    def run(
        self, device: Literal["auto", "cuda", "cpu"], references: References | None
    ) -> NodeReport:
        """Start the processes, run the tests, and decide."""
        self.tell(words.progress())
        self.node = start_node_process()
        self.children.append(self.node)
        count = self._count_devices(device)
        if isinstance(count, UntestedReason):
            return self._report(self._decide(untested=count))
        self._start(count)
        # No process of this check uses a GPU yet, so all processes on GPUs are other programs.
        before_start = self._look(_FIRST_LOOK_S)
        # Import while the processes of the devices import torch, which takes longer.
        for module in _NEEDED_LATER:
            importlib.import_module(module)
        from raybench.analysis.references import SHIPPED

        self._wait_for_start([slot.child for slot in self.slots], _STARTED_S[self.kind])
        if not self._alive():
            # Programs that keep all cores busy may be the cause.
            load = cpu_load(before_start, self._look(_LOOK_S))
            return self._report(self._decide(uses=self._uses(before_start), load=load))
        before = self._look(_LOOK_S)
        tests = self._select()
        first, skipped = self._run_tests(tests, 1, before)
        judged = self._judge(first, references or SHIPPED)
        again = self._doubtful(judged, tests)
        judged_again: tuple[Judgement, ...] = ()
        if again and self._left_s(_SECOND_RUN_S) > 0:
            second, _ = self._run_tests(again, 2, before)
            judged_again = self._judge(second, references or SHIPPED)
        after = self._look(_LOOK_S)
        decision = self._decide(
            environment=self._judge_environment(before),
            first=(*self._judge_facts(before, after), *judged),
            second=judged_again,
            uses=self._uses(before_start, before, after),
            load=cpu_load(before, after),
            skipped=tuple(dict.fromkeys(skipped)),
        )
        has_references = any((references or SHIPPED).entries(name) for name in self._models())
        return self._report(decision, has_references=has_references)

    def fail(self, reason: UntestedReason) -> NodeReport:
        """Return the report of a check that could not go on."""
        return self._report(self._decide(untested=reason))

    def close(self) -> None:
        """End all processes."""
        end_all(self.children)

    def _left_s(self, end_s: float) -> float:
        """Return how much time is left until `end_s` after the start of the check."""
        return self.began_s + end_s - time.monotonic()

    def _deadline_s(self, limit_s: float, end_s: float = _TESTS_END_S) -> float:
        """Return the deadline of a request, by `time.monotonic`."""
        return min(time.monotonic() + limit_s, self.began_s + end_s)

    def _alive(self) -> list[DeviceSlot]:
        return [slot for slot in self.slots if slot.is_fit]

    def _count_devices(self, device: str) -> int | UntestedReason:
        """Return how many devices to test, or why none can be tested; sets `kind`."""
        cpu_workers = min(usable_cores(), _MOST_CPU_WORKERS)
        if device == "cpu":
            return cpu_workers
        assert self.node is not None
        answers = ask({self.node: CountGpus()}, self._deadline_s(_COUNT_S))
        for cause in answers.lost.values():
            self.node = None
            self.kind = "cuda"
            if isinstance(cause, Death):
                detail = cause.last_line or words.exit_status(cause.exit_code)
                return UntestedReason(kind=UntestedKind.BROKEN_INSTALLATION, detail=detail)
            return UntestedReason(kind=UntestedKind.OUT_OF_TIME, detail=words.no_nvml())
        (count,) = answers.received.values()
        if isinstance(count, NoGpus):
            self.kind = "cuda"
            return UntestedReason(kind=UntestedKind.BROKEN_INSTALLATION, detail=count.message)
        if count:
            self.kind = "cuda"
            return int(count)
        if device == "cuda":
            raise ClusterError("--device cuda: this machine has no GPU; use --device cpu")
        return cpu_workers

    def _start(self, count: int) -> None:
        """Start the processes of all devices."""
        self.tell(words.progress(devices=count))
        children = [self._start_process(index) for index in range(count)]
        # Import after the start: this takes most of a second.
        from raybench.report.words.health import device_name

        for index, child in enumerate(children):
            place = DevicePlace(host=self.host, kind=self.kind, number=index)
            self.slots.append(DeviceSlot(index=index, name=device_name(place), child=child))

    def _start_process(self, index: int) -> Child:
        child = start_device_process(self.kind, index)
        self.children.append(child)
        return child

    def _wait_for_start(self, children: Sequence[Child], end_s: float) -> None:
        """Wait until the processes own their devices, or end them."""
        from raybench.health.quick.decision import IMPORT, START

        deadline_s = self.began_s + end_s
        imported = self._note_lost(collect(children, deadline_s), IMPORT)
        messages = {
            child: message
            for child, message in imported.items()
            if not isinstance(message, Imported)
        }
        waiting = [child for child in imported if child not in messages]
        messages |= self._note_lost(collect(waiting, deadline_s), START)
        started = {
            child: message.device
            for child, message in messages.items()
            if isinstance(message, Started)
        }
        for slot in self.slots:
            if slot.child in started:
                slot.device = started[slot.child]
                slot.is_fit = True
            elif isinstance(failed := messages.get(slot.child), NotStarted):
                self._note_trouble(slot, START, failed, bool(started or self._alive()))

    def _note_lost(
        self, answers: Answers, phase: str, *, is_together: bool = False
    ) -> Mapping[Child, Any]:
        """Note which processes gave no answer, and return the answers.

        Args:
            is_together: whether the processes ran a collective. Then a lost process also stops the
                others, so that no device is blamed.
        """
        lost = [slot for slot in self.slots if slot.child in answers.lost]
        for slot in lost:
            slot.is_fit = False
        # If a single process was asked, compare it with the processes that answered earlier.
        have_answered = bool(answers.received or (len(lost) == 1 and self._alive()))
        for slot in lost:
            cause = answers.lost[slot.child]
            self._note_trouble(slot, phase, cause, have_answered and not is_together)
        return answers.received

    def _note_trouble(
        self,
        slot: DeviceSlot,
        phase: str,
        cause: Death | Silence | NotStarted,
        have_others_answered: bool,
    ) -> None:
        from raybench.health.quick.decision import Trouble

        slot.is_fit = False
        trouble = Trouble(
            device=slot.name, phase=phase, cause=cause, have_others_answered=have_others_answered
        )
        self.troubles.append(trouble)

    def _look(self, limit_s: float) -> Surroundings | None:
        """Ask the node's process who uses the node; None if it does not answer in time."""
        if self.node is None:
            return None
        # Include devices whose process has ended, because the driver may report why.
        devices = tuple(slot.device for slot in self.slots if slot.device is not None)
        deadline_s = self._deadline_s(limit_s + 0.1 * len(devices), _LAST_LOOK_END_S)
        answers = ask({self.node: LookAround(devices=devices)}, deadline_s)
        if answers.lost:
            self.node = None
        return next(iter(answers.received.values()), None)

    def _select(self) -> tuple[QuickTest, ...]:
        from raybench.health.quick.selection import select_tests

        alive = [slot.device for slot in self._alive() if slot.device is not None]
        # A device without a process may have a new one in the second run, in which all devices
        # run the collective. All devices of a node count as alike here.
        return select_tests([*alive, *alive[:1] * (len(self.slots) - len(alive))])

    def _run_tests(
        self, tests: Iterable[QuickTest], pass_number: int, before: Surroundings | None
    ) -> tuple[list[Reading], list[str]]:
        """Return the readings of the tests, and the names of tests for which no time was left."""
        from raybench.health.quick.readings import split_by_room

        readings: list[Reading] = []
        skipped = []
        if pass_number > 1:
            self._restart()
        free = {
            facts.device.uuid: facts.memory_free_bytes
            for facts in (before.facts if before else ())
            if facts.memory_free_bytes is not None
        }
        for test in tests:
            if self._left_s(_TESTS_END_S) < _LEAST_TEST_S:
                skipped.append(test.test.name)
                continue
            self.tell(words.progress(test=test.test.name, again=pass_number > 1))
            slots, left_out = split_by_room(test, self._alive(), free)
            readings += left_out
            if test.is_together:
                readings += self._run_together(test, slots, pass_number)
            elif test.is_by_turns:
                for slot in slots:
                    if self._left_s(_TESTS_END_S) >= _LEAST_TEST_S:
                        readings += self._run_alone(test, [slot], pass_number)
                    else:
                        skipped.append(test.test.name)
            elif slots:
                readings += self._run_alone(test, slots, pass_number)
        return readings, skipped

    def _run_alone(
        self, test: QuickTest, slots: Sequence[DeviceSlot], pass_number: int
    ) -> list[Reading]:
        """Run a test on devices at the same time, each by itself."""
        from raybench.health.quick.readings import read_failure, read_measurements

        rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)
        request = RunTask(task=self._task(test), rank=rank)
        requests = {slot.child: request for slot in slots}
        answers = ask(requests, self._deadline_s(_TEST_S))
        received = self._note_lost(answers, test.test.name)
        measured = [slot for slot in slots if isinstance(received.get(slot.child), Measurement)]
        for slot in slots:
            self._note_answer(slot, received.get(slot.child))
        readings: list[Reading] = []
        # `read_record` compares the bits of all devices; `judge` compares other values later.
        groups = [measured] if test.test.reads == "bits" else [[slot] for slot in measured]
        for group in groups:
            measurements = [received[slot.child] for slot in group]
            if group:
                readings += read_measurements(test, group, pass_number, measurements)
        for slot in slots:
            failure = received.get(slot.child)
            if isinstance(failure, Failure):
                readings += read_failure(test, [slot], pass_number, replace(failure, rank=0))
        return readings

    def _run_together(
        self, test: QuickTest, slots: Sequence[DeviceSlot], pass_number: int
    ) -> list[Reading]:
        """Run a collective of all devices; nothing if one of them cannot take part."""
        from raybench.cluster.point_end import cause_of
        from raybench.health.quick.readings import read_failure, read_measurements

        count = len(slots)
        group = self._make_group(slots[0]) if count == len(self.slots) else None
        if group is None:
            return []
        task = self._task(test)
        requests = {
            slot.child: RunTask(
                task=task,
                rank=RankInfo(
                    rank=rank,
                    world_size=count,
                    local_rank=rank,
                    local_world_size=count,
                    node_rank=0,
                ),
                group=group,
            )
            for rank, slot in enumerate(slots)
        }
        answers = ask(requests, self._deadline_s(_TOGETHER_S))
        received = self._note_lost(answers, test.test.name, is_together=True)
        for slot in slots:
            self._note_answer(slot, received.get(slot.child))
        if answers.lost:
            return []
        ranks = [received[slot.child] for slot in slots]
        failure = cause_of(ranks)
        if failure is not None:
            return read_failure(test, slots, pass_number, failure)
        return read_measurements(test, slots, pass_number, ranks)

    def _make_group(self, first: DeviceSlot) -> GroupSpec | None:
        """Return a new process group; None if its store does not start."""
        from raybench.health.quick.decision import STORE

        if self.store is None:
            answers = ask({first.child: ServeStore()}, self._deadline_s(_STORE_S))
            stores = self._note_lost(answers, STORE, is_together=True)
            self.store = next(iter(stores.values()), None)
        if self.store is None:
            return None
        self.groups += 1
        address, port = self.store
        return GroupSpec(name=f"quick-{self.groups}", store_address=address, store_port=port)

    def _task(self, test: QuickTest) -> Task:
        from raybench.health.quick.selection import measure_of

        settings = measure_of(test.test, self.kind)
        return Task(point=test.point, settings=settings, precisions=None)

    def _note_answer(self, slot: DeviceSlot, answer: Any) -> None:
        """Note whether a process is fit for further tests, and why its clocks were limited."""
        if isinstance(answer, Failure):
            slot.is_fit = answer.worker_reusable
        elif isinstance(answer, Measurement):
            limits = _LIMITS.intersection(answer.throttle_reasons)
            self.throttled.setdefault(slot.name, set()).update(limits)

    def _restartable(self) -> list[DeviceSlot]:
        """Return the devices whose process is not fit, if there is time for a new one."""
        # A new process would find the memory of the device full again.
        full = set()
        for trouble in self.troubles:
            if isinstance(trouble.cause, NotStarted) and trouble.cause.is_out_of_memory:
                full.add(trouble.device)
        slots = [slot for slot in self.slots if not slot.is_fit and slot.name not in full]
        return slots if self._left_s(_RESTART_S) > 0 else []

    def _restart(self) -> None:
        """Start new processes for devices whose process has ended or is not fit any more."""
        from raybench.hangs.processes import read_facts

        starting = []
        for slot in self._restartable():
            slot.child.kill()
            # A process in an uninterruptible call keeps its device.
            if read_facts(slot.child.process_id).state == "D":
                continue
            slot.has_restarted = True
            slot.child = self._start_process(slot.index)
            starting.append(slot.child)
        if starting:
            # The process that served the store may have ended.
            self.store = None
            self._wait_for_start(starting, _TESTS_END_S)

    def _judge(self, readings: Sequence[Reading], references: References) -> tuple[Judgement, ...]:
        from raybench.health.verdicts import judge

        devices = [slot.device for slot in self.slots if slot.device is not None]
        return judge(readings, devices, (), references) if readings else ()

    def _judge_environment(self, before: Surroundings | None) -> tuple[Judgement, ...]:
        """Return the judgements of settings, software and host."""
        from raybench.health.environment import judge_environment
        from raybench.health.environment_facts import EnvironmentFacts

        devices = tuple(slot.device for slot in self.slots if slot.device is not None)
        states = before.facts if before else ()
        facts = EnvironmentFacts(devices=devices, is_private=True, states=states)
        return tuple(judge_environment(facts))

    def _judge_facts(
        self, before: Surroundings | None, after: Surroundings | None
    ) -> tuple[Judgement, ...]:
        """Return the judgements of facts of the driver; empty if they were not read twice."""
        from raybench.analysis.references import SHIPPED
        from raybench.health.readings import facts_readings

        if before is None or after is None:
            return ()
        return self._judge(facts_readings(before.facts, after.facts), SHIPPED)

    def _doubtful(
        self, judged: Sequence[Judgement], tests: Sequence[QuickTest]
    ) -> tuple[QuickTest, ...]:
        """Return the tests to run again: doubtful tests, and tests that a device has missed."""
        from raybench.health.quick.decision import is_doubtful

        doubtful = {judgement.test.name for judgement in judged if is_doubtful(judgement)}
        counts = Counter(judgement.test.name for judgement in judged)
        may_restart = bool(self._restartable())
        again = []
        for test in tests:
            expected = 1 if test.is_together else len(self.slots)
            is_missed = counts[test.test.name] < expected
            if test.test.name in doubtful or (may_restart and is_missed):
                again.append(test)
        return tuple(again)

    def _uses(self, *looks: Surroundings | None) -> Mapping[str, DeviceUse]:
        """Return the use of each GPU by other programs, by its name in findings.

        Args:
            looks: the first is from a time when no process of the check used a GPU.
        """
        uses = {}
        for slot in self.slots:
            seen = [look.gpus[slot.index] for look in looks if look and slot.index < len(look.gpus)]
            if seen:
                uses[slot.name] = device_use(seen, slot.child.process_id)
        return uses

    def _decide(self, **results: Any) -> NodeDecision:
        """Decide from the troubles and these fields of `QuickEvidence`."""
        from raybench.health.quick.decision import QuickEvidence, decide

        resolved = {slot.name for slot in self._alive() if slot.has_restarted}
        troubles = []
        for trouble in self.troubles:
            troubles.append(replace(trouble, is_resolved=trouble.device in resolved))
        evidence: QuickEvidence = QuickEvidence(
            host=self.host,
            kind=self.kind,
            devices=tuple(slot.name for slot in self.slots),
            troubles=tuple(troubles),
            throttled={name: tuple(sorted(limits)) for name, limits in self.throttled.items()},
            is_observed=self.node is not None,
            **results,
        )
        return decide(evidence)

    def _models(self) -> list[str]:
        return [slot.device.name for slot in self.slots if slot.device is not None]

    def _detection(self, *, has_references: bool) -> DetectionLimit | None:
        """Return what a check of the most devices of one model finds."""
        from raybench.health.detection import detection_limit

        count = max(Counter(self._models()).values())
        return detection_limit("quick", self.kind, count, has_references)

    def _report(self, decision: NodeDecision, *, has_references: bool = False) -> NodeReport:
        detection = None
        if self._models() and not decision.untested:
            detection = self._detection(has_references=has_references)
        return NodeReport(
            detection=detection,
            host=self.host,
            state=decision.state,
            began=self.began.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self.began_s, 1),
            raybench_version=__version__,
            devices=tuple(slot.name for slot in self.slots),
            device_kind=self.kind if self.slots else None,
            drain=decision.drain,
            untested=decision.untested,
            findings=decision.findings,
        )
