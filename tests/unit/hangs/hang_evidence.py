"""Evidence of made-up ranks, for the tests of verdicts."""

from collections.abc import Sequence

from raybench.hangs.evidence import Evidence, RankEvidence, RankPlace
from raybench.hangs.processes import ProcessFacts
from raybench.hangs.ras import NoRas
from raybench.hangs.recorder import Call, CallShape, Recording, Stage
from raybench.hangs.stacks import Frame, Wait
from raybench.records.hang import RecorderState

GRADIENT = CallShape(operation="all_reduce", sizes=((4096,),), dtypes=("Float",))
LOSS = CallShape(operation="all_reduce", sizes=((1,),), dtypes=("Float",))
TIMES = CallShape(operation="all_gather", sizes=((8,),), dtypes=("Float",))
STEP = (GRADIENT, LOSS)
LEAST_WAIT_S = 5.0


def entered(
    shapes: Sequence[CallShape],
    done: int,
    *,
    age_s: float = 9.0,
    begun: bool = False,
    group: str = "0",
) -> list[Call]:
    """Return calls of these shapes, numbered from 1, of which the first `done` are done."""
    pending = Stage.BEGUN if begun else Stage.ENTERED
    return [
        Call(
            group=group,
            number=number,
            shape=shape,
            stage=Stage.DONE if number <= done else pending,
            age_s=age_s,
        )
        for number, shape in enumerate(shapes, 1)
    ]


def rank(
    number: int,
    calls: Sequence[Call] = (),
    *,
    wait: Wait = Wait.NOTHING_KNOWN,
    line: int | None = 88,
    state: str = "S",
    recorder: RecorderState = RecorderState.ON,
    groups: dict[str, frozenset[int]] | None = None,
) -> RankEvidence:
    place = RankPlace(
        rank=number, host="node1", device_kind="cuda", device_index=number, worker_pid=4700
    )
    frame = Frame(path="/home/me/train.py", line=line, function="step") if line else None
    is_on = recorder is RecorderState.ON
    return RankEvidence(
        place=place,
        process=ProcessFacts(pid=4711 + number, state=state),
        stack=(frame,) if frame else (),
        line=frame,
        wait=wait,
        recorder=recorder,
        recording=Recording(is_on=is_on, calls=tuple(calls), members=groups or {}),
    )


def evidence(*ranks: RankEvidence, ras=NoRas.REFUSED) -> Evidence:
    return Evidence(ranks=ranks, ras=ras)
