"""Evidence of ranks of which one waits for the other."""

from raybench.hangs.evidence import RankEvidence, RankPlace
from raybench.hangs.processes import ProcessFacts
from raybench.hangs.recorder import Call, CallShape, Recording, Stage
from raybench.hangs.stacks import Frame, Wait
from raybench.records.hang import RecorderState

SHAPE = CallShape(operation="all_reduce", sizes=((1,),), dtypes=("Float",))


def make_rank(rank, *, waits, wait=Wait.NOTHING_KNOWN, function="step"):
    place = RankPlace(rank=rank, host="a", device_kind="cpu", device_index=rank, worker_pid=7)
    stage = Stage.ENTERED if waits else Stage.DONE
    call = Call(group="0", number=1 + waits, shape=SHAPE, stage=stage, age_s=60.0)
    line = Frame(path="/home/me/train.py", line=8, function=function)
    return RankEvidence(
        place=place,
        process=ProcessFacts(pid=70 + rank, state="S"),
        stack=(line,),
        line=line,
        wait=wait,
        recorder=RecorderState.ON,
        recording=Recording(is_on=True, calls=(call,), members={}),
    )
