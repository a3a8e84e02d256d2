"""The devices of a sweep, held against other sweeps of the same hosts, and who is there besides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from raybench.cluster.bystanders import lock_name
from raybench.cluster.device_locks import CPU, Claim, DeviceLocks, Holder, Terms
from raybench.errors import DevicesInUseError
from raybench.records import Device

if TYPE_CHECKING:
    from raybench.cluster.ray_cluster.node_agents import NodeAgents

_POLL_S = 1.0
# What a killed driver leaves behind is gone after so long; docs/reliability.md.
_ENDING_S = 65.0


@contextmanager
def processors_held(terms: Terms, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the processors of this host: before Ray starts there, which would disturb others.

    tell: gets a line for the user. Raises DevicesInUseError.
    """
    locks = DeviceLocks()
    where = {CPU: "the processors of this host"}

    def others() -> dict[str, tuple[Holder, ...]]:
        return _describe(locks.claim([CPU], terms.holder, shared=terms.shared), where)

    try:
        if terms.shared:
            others()  # who is there is told when all devices are known
        else:
            _wait_for(others, terms, tell)
        yield
    finally:
        locks.close()


class Claims:
    """Takes devices by the terms of the sweep; without terms it holds none, and knows nobody.

    tell: gets a line for the user.
    """

    def __init__(self, nodes: NodeAgents, terms: Terms | None, tell: Callable[[str], None]) -> None:
        self._nodes = nodes
        self._terms = terms
        self._tell = tell
        self._said: set[str] = set()
        self.others: tuple[str, ...] = ()

    def hold(self, devices: Sequence[Device]) -> None:
        """Hold the devices until the sweep ends.

        Raises DevicesInUseError where others have one of them for longer than is waited for.
        """
        if (terms := self._terms) is not None:
            others = _wait_for(lambda: self._others_of(devices, terms), terms, self._tell)
            self.others = tuple(dict.fromkeys(str(one) for held in others.values() for one in held))

    def refusal(self, devices: Sequence[Device]) -> str:
        """Hold the devices if that can be done at once; else why not."""
        if self._terms is None:
            return ""
        others = self._others_of(devices, self._terms)
        return "" if self._terms.shared else _in_use(others)

    def _others_of(self, devices: Sequence[Device], terms: Terms) -> dict[str, tuple[Holder, ...]]:
        """Place -> who has it besides; all devices are held where nobody has."""
        found: dict[str, tuple[Holder, ...]] = {}
        for first, claim in self._nodes.claim(devices, terms.holder, shared=terms.shared):
            if claim.problem:
                self._say(
                    f"device locks of {first.host} cannot be had ({claim.problem}): another sweep "
                    "there would go unseen (warning)"
                )
            here = [device for device in devices if device.node_id == first.node_id]
            found |= _describe(claim, {lock_name(device): _place(device) for device in here})
        if found and not terms.shared:
            # Two sweeps that wait for each other's nodes would wait for ever.
            self._nodes.release(devices)
        return found

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._tell(line)


def _wait_for(
    others_now: Callable[[], Mapping[str, tuple[Holder, ...]]],
    terms: Terms,
    tell: Callable[[str], None],
) -> Mapping[str, tuple[Holder, ...]]:
    """Wait for others by the terms of a sweep, and say for whom.

    Who is there all the same, where that is allowed. Raises DevicesInUseError.
    """
    begun_s, said = time.monotonic(), ""
    while (others := others_now()) and not terms.shared:
        is_ending = all(one.has_ended for held_by in others.values() for one in held_by)
        patience_s = max(terms.wait_s, _ENDING_S if is_ending else 0.0)
        if time.monotonic() >= begun_s + patience_s:
            raise DevicesInUseError(f"{_in_use(others)}; {_ways_out(others)}")
        if said != _in_use(others):
            said = _in_use(others)
            tell(f"waiting: {said}" + (", and ends" if is_ending else ""))
        time.sleep(_POLL_S)
    if others:
        tell(f"not alone: {_in_use(others)}")
    return others


def _place(device: Device) -> str:
    if device.kind == "cuda":
        return f"{device.kind}:{device.index} of {device.host}"
    return f"the processors of {device.host}"


def _describe(claim: Claim, places: Mapping[str, str]) -> dict[str, tuple[Holder, ...]]:
    return {places[name]: held_by for name, held_by in claim.others.items()}


def _in_use(others: Mapping[str, tuple[Holder, ...]]) -> str:
    """Say who is there: `cuda:0 of alpha is used by run a-1 of bob (…) since 2026-11-22 04:00:00`.

    Empty where nobody is.
    """
    if not others:
        return ""
    place, held_by = next(iter(others.items()))
    more = f" and {len(others) - 1} more device{'s' * (len(others) > 2)}" if len(others) > 1 else ""
    are = "are" if more or place.startswith("the processors") else "is"
    besides = f" and {len(held_by) - 1} more" if len(held_by) > 1 else ""
    return f"{place}{more} {are} used by {held_by[0]}{besides} since {held_by[0].since}"


def _ways_out(others: Mapping[str, tuple[Holder, ...]]) -> str:
    has_cpus = any("processors" in place for place in others)
    return (
        "--wait SECONDS waits for them, --shared measures beside them and says so in each row"
        + ("" if has_cpus else ", CUDA_VISIBLE_DEVICES to use other GPUs")
    )
