"""Which rank hangs and why, in words."""

from __future__ import annotations

from raybench.records.hang import HangCause, HangVerdict
from raybench.report.formatting import counted


def hang(verdict: HangVerdict) -> str:
    """Return on one line which rank hangs, why, and where it is."""
    # Such as `all_reduce 118`.
    what = f"{verdict.collective} {verdict.number}" if verdict.collective else "a collective"
    waits = ""
    if count := len(verdict.waiting_ranks):
        waits = f", in which {counted(count, 'rank')} {'waits' if count == 1 else 'wait'}"
    if verdict.rank is None:
        pair = " and ".join(map(str, verdict.slowest_pair))
        network = f"the network between ranks {pair}" if pair else "the network and the devices"
        return _WITHOUT_RANK[verdict.cause].format(what=what, waits=waits, network=network)
    where = f"; it is at {verdict.line}" if verdict.line else ""
    predicate = _WITH_RANK[verdict.cause].format(
        what=what,
        waits=waits,
        where=where,
        at=f" at {verdict.line}" if verdict.line else "",
        called=verdict.called or "another collective",
        expected=verdict.expected or "another collective",
    )
    other_ranks = ""
    if verdict.also:
        other_ranks = f" (so do ranks {', '.join(map(str, verdict.also))})"
    return f"{_rank_name(verdict)} {predicate}{other_ranks}"


# Predicates of a rank. {what}: all_reduce 118. {waits}: ranks that wait. {where}, {at}: line of
# code.
_WITH_RANK = {
    HangCause.DIED: "has died before it entered {what}{waits}",
    HangCause.STOPPED: "is stopped (SIGSTOP or a debugger), and has not entered {what}{waits}",
    HangCause.SLEEPS: "sleeps{at}, and has not entered {what}{waits}",
    HangCause.WAITS_FOR_LOCK: "waits for a lock{at}, and has not entered {what}{waits}",
    HangCause.WAITS_FOR_DATA: "waits for its data loader{at}, and has not entered {what}{waits}",
    HangCause.NOT_ENTERED: "has not entered {what}{waits}{where}",
    HangCause.SKIPPED: "has skipped {what}{waits}{where}",
    HangCause.OTHER_COLLECTIVE: "called {called}{at} where others called {expected} as {what}",
    HangCause.OTHER_SIZE: "called {called}{at} where others called {expected} as {what}",
    HangCause.OTHER_TYPE: "called {called}{at} where others called {expected} as {what}",
    HangCause.DEVICE_BUSY: "has a device that still runs earlier work and has not begun "
    "{what}{waits}{where}",
}
_WITHOUT_RANK = {
    HangCause.NOT_FINISHED: "all ranks have entered {what}, which does not finish: check {network}",
    HangCause.OTHER_COLLECTIVE: "the ranks called different collectives as {what}",
    HangCause.UNKNOWN: "no rank is known to hang; the last known collective is {what}{waits}",
}


def _rank_name(verdict: HangVerdict) -> str:
    """Return `rank 1 (node1, GPU 1, pid 4711)`."""
    device = "GPU" if verdict.device_kind == "cuda" else "worker"
    location = f"{verdict.host}, {device} {verdict.device_index}, pid {verdict.pid}"
    return f"rank {verdict.rank} ({location})"
