"""The agents as the driver sees them: what it asks of all, and which of them are silent."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any

from raybench.cluster.bystanders import lock_name, others_between
from raybench.cluster.device_locks import Claim, Holder
from raybench.cluster.processes.agent import HostFacts, WorkerEnd
from raybench.cluster.processes.channel import GONE, Channel
from raybench.records import Answer, Device, DeviceSample, Measurement, SpanNs
from raybench.records.device_facts import DeviceFacts

_ANSWER_TIMEOUT_S = 0.5
_KILL_TIMEOUT_S = 3.0
# It waits for whoever else takes a device of its host at the same time.
_CLAIM_TIMEOUT_S = 10.0
_LOOK_TIMEOUT_S = 2.0
# Some hundred questions to NVML for each of its devices, the first time with the library to load.
_FACTS_TIMEOUT_S = 20.0
# Without a word for so long, a host is frozen or cut off.
_SILENCE_S = 8.0
# Between two looks no more than this counts: the driver may have been stopped itself.
_LONGEST_LOOK_S = 1.5
_POLL_S = 0.1
# Less than any CUDA context has, more than the driver keeps for itself.
_FREE_WITHIN_BYTES = 256 * 1024**2


class Host:
    """One agent, and what it was asked. address: of its host, as others reach it."""

    def __init__(self, connection: Connection, facts: HostFacts, address: str) -> None:
        self.facts, self.address = facts, address
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_gone = self._has_spoken = False
        self._silence_s, self._looked_s = 0.0, time.monotonic()
        self._channel = Channel(connection, self._take)

    def ask(self, method: str, *arguments: object) -> Future[Any]:
        """Ask for a method of its Agent; one that is gone leaves the future cancelled."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._is_gone:
                answer.cancel()
                return answer
            number = next(self._numbers)
            self._asked[number] = answer
        self._channel.send((number, method, arguments))
        return answer

    def is_silent(self) -> bool:
        """Whether it is gone, or has said nothing for long. Ask about once a second."""
        now_s = time.monotonic()
        with self._lock:
            self._silence_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
            self._looked_s = now_s
            if self._has_spoken:
                self._silence_s, self._has_spoken = 0.0, False
            return self._is_gone or self._silence_s > _SILENCE_S

    def close(self) -> None:
        """Let it go, with all its workers."""
        self._channel.close()

    def _take(self, message: Any) -> None:
        with self._lock:
            if message is GONE:
                self._is_gone = True
                ended, self._asked = list(self._asked.values()), {}
            else:
                self._has_spoken = True
                ended = [self._asked.pop(message[0])] if message[0] in self._asked else []
        for future in ended:
            if message is GONE:
                future.cancel()
            elif isinstance(message[1], Exception):
                future.set_exception(message[1])
            else:
                future.set_result(message[1])


class Hosts:
    """All agents. What goes wrong with one costs its help, no more."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = sorted(hosts, key=lambda host: host.facts.rank)
        self._holder: Holder | None = None
        self._of_device: dict[str, Host] = {}
        self._read_to: dict[tuple[str, int], Mapping[str, int]] = {}

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def silent(self) -> frozenset[Host]:
        """Return those that do not answer any more."""
        return frozenset(host for host in self._hosts if host.is_silent())

    def adopt(self, devices: Mapping[str, Host]) -> None:
        """Note which host has which device, by UUID."""
        self._of_device |= devices

    def watch(self, devices: Sequence[Device]) -> None:
        """Sample these devices from now on."""
        for host, here in self._by_host(devices):
            host.ask("sample", tuple(here))

    def claim(
        self, devices: Sequence[Device], holder: Holder, *, shared: bool
    ) -> list[tuple[Device, Claim]]:
        """As claims.Nodes."""
        self._holder = holder
        asked = [
            (here[0], host.ask("claim", list(map(lock_name, here)), holder, shared))
            for host, here in self._by_host(devices)
        ]
        answers = _results([ref for _, ref in asked], _CLAIM_TIMEOUT_S)
        silent = Claim(problem="its agent does not answer")
        return [(first, said or silent) for (first, _), said in zip(asked, answers, strict=True)]

    def release(self, devices: Sequence[Device]) -> None:
        """As claims.Nodes."""
        _results([host.ask("release") for host, _ in self._by_host(devices)], _CLAIM_TIMEOUT_S)

    def bystanders(self, devices: Sequence[Device]) -> Callable[[], tuple[str, ...]]:
        """As Cluster.bystanders."""
        holder = self._holder
        if holder is None:
            return tuple
        before = [(here, host.ask("look", here, holder)) for host, here in self._by_host(devices)]

        def seen() -> tuple[str, ...]:
            after = [host.ask("look", here, holder) for host, here in self._by_host(devices)]
            looks = _results([*(ref for _, ref in before), *after], _LOOK_TIMEOUT_S)
            pairs = zip(looks[: len(before)], looks[len(before) :], strict=True)
            told = [
                line
                for (here, _), (one, two) in zip(before, pairs, strict=True)
                if one is not None and two is not None
                for line in others_between(one, two, here)
            ]
            return tuple(dict.fromkeys(told))

        return seen

    def kill(self, devices: Sequence[Device]) -> None:
        """End the processes that have these devices."""
        asked = [
            host.ask("kill", [device.process_id for device in here])
            for host, here in self._by_host(devices)
        ]
        _results(asked, _KILL_TIMEOUT_S)

    def end_of(self, device: Device) -> WorkerEnd | None:
        """Say how the process that had this device has ended; None where nobody knows."""
        asked = self._of_device[device.uuid].ask("end_of", device.process_id)
        end: WorkerEnd | None = _results([asked], _KILL_TIMEOUT_S)[0]
        return end

    def log_tails(self, devices: Mapping[int, Device]) -> dict[int, str]:
        """Return the last lines that the worker of each wrote; "" where they cannot be had now."""
        asked = [
            self._of_device[device.uuid].ask("log_tail", device.process_id)
            for device in devices.values()
        ]
        tails = zip(devices, _results(asked), strict=True)
        return {key: tail or "" for key, tail in tails}

    def new_outputs(self, devices: Sequence[Device]) -> list[str]:
        """Return what the worker of each wrote since the last call; "" where that cannot be had."""
        keys = {device.uuid: (device.uuid, device.process_id) for device in devices}
        asked = [
            host.ask(
                "new_outputs",
                {device.process_id: self._read_to.get(keys[device.uuid], {}) for device in here},
            )
            for host, here in self._by_host(devices)
        ]
        found = dict.fromkeys(keys, "")
        for (_, here), answer in zip(self._by_host(devices), _results(asked), strict=True):
            for device in here if answer else ():
                output = answer[device.process_id]
                self._read_to[keys[device.uuid]] = output.read_to
                found[device.uuid] = output.text
        return [found[device.uuid] for device in devices]

    def wait_until_free(self, devices: Sequence[Device], timeout_s: float) -> tuple[str, ...]:
        """Wait until these GPUs, whose workers are gone, have their memory back.

        A sentence for each that has not in time. CPUs are not waited for.
        """
        deadline_s = time.monotonic() + timeout_s
        while (kept := self._memory_leaks(devices)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return tuple(
            f"{size / 1024**3:.1f} GiB of {device.kind}:{device.index} on {device.host} are not "
            f"free {timeout_s:g} s after its worker ended"
            for device, size in kept
        )

    def drain(self) -> tuple[DeviceSample, ...]:
        """Return the samples since the last call, as far as the agents answer in time."""
        said = _results([host.ask("drain") for host in self._hosts])
        return tuple(sample for samples in said for sample in samples or ())

    def device_facts(self, devices: Sequence[Device]) -> tuple[DeviceFacts, ...]:
        """As Cluster.read_device_facts."""
        asked = [host.ask("device_facts", here) for host, here in self._by_host(devices)]
        told = [facts for answer in _results(asked, _FACTS_TIMEOUT_S) for facts in answer or ()]
        by_uuid = {facts.device.uuid: facts for facts in told}
        now, unread = datetime.now(UTC), "the agent of its host does not answer"
        return tuple(
            by_uuid.get(device.uuid, DeviceFacts(device=device, read_at=now, unread=unread))
            for device in devices
        )

    def with_clocks(self, answers: Sequence[Answer], devices: Sequence[Device]) -> list[Answer]:
        """Add to each measurement the SM clocks of its device while it was timed."""
        spans: dict[Host, dict[str, tuple[SpanNs, ...]]] = {}
        for answer, device in zip(answers, devices, strict=True):
            if device.kind == "cuda" and isinstance(answer, Measurement):
                host = self._of_device[device.uuid]
                spans.setdefault(host, {})[device.uuid] = answer.timed_at_ns
        asked = [host.ask("sm_clocks_mhz", here) for host, here in spans.items()]
        read = {uuid: mhz for said in _results(asked) for uuid, mhz in (said or {}).items()}
        return [
            replace(answer, sm_clocks_mhz=read.get(device.uuid, ()))
            if isinstance(answer, Measurement)
            else answer
            for answer, device in zip(answers, devices, strict=True)
        ]

    def close(self) -> None:
        """Let all go."""
        for host in self._hosts:
            host.close()

    def _by_host(self, devices: Sequence[Device]) -> list[tuple[Host, list[Device]]]:
        found: dict[Host, list[Device]] = {}
        for device in devices:
            found.setdefault(self._of_device[device.uuid], []).append(device)
        return list(found.items())

    def _memory_leaks(self, devices: Sequence[Device]) -> list[tuple[Device, int]]:
        """Find the GPUs that have more in use than before the first worker, and how much more."""
        gpus = self._by_host([device for device in devices if device.kind == "cuda"])
        asked = [host.ask("memory_growth_bytes", [one.uuid for one in here]) for host, here in gpus]
        found = [
            (device, (grown or {}).get(device.uuid, 0))
            for (_, here), grown in zip(gpus, _results(asked), strict=True)
            for device in here
        ]
        return [(device, size) for device, size in found if size > _FREE_WITHIN_BYTES]


def _results(asked: Collection[Future[Any]], timeout_s: float = _ANSWER_TIMEOUT_S) -> list[Any]:
    """Wait for all agents as long as for one; None from those that are gone or slow."""
    wait(asked, timeout_s)
    return [_result(answer) for answer in asked]


def _result(answer: Future[Any]) -> Any:
    with suppress(CancelledError, TimeoutError):
        return answer.result(0)
    return None
