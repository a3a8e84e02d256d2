"""The workload `pairs`: messages within disjoint pairs of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.job.point import Precision
from raybench.workloads.base import Context, Workload, WrongResultError
from raybench.workloads.communication.pairings import Pair, pairs_of_turn, parse_pairs

Direction = Literal["forward", "backward", "both", "round_trip"]
Transport = Literal["send", "copy"]

# How often the message goes.
_MESSAGES: Mapping[Direction, int] = {"forward": 1, "backward": 1, "both": 2, "round_trip": 2}


class Pairs(Workload):
    """Moves a message within each pair of devices: latency and bandwidth of the paths between two.

    All pairs of a turn do so at the same time; the others wait. transport: send uses NCCL, or gloo
    on CPUs; copy is a copy between the memories of two GPUs of one host, which the process of the
    lower rank issues. Counted is what moves in a step: both and round_trip move size_bytes twice.
    """

    takes_batch_size = False
    answers = (Answer(metric="busbw_gb_s"),)
    busbw_factor = 1.0

    def __init__(
        self,
        context: Context,
        *,
        turn: Annotated[
            int,
            Field(ge=0, description="Which pairs: after world_size - 1 turns all have come."),
        ] = 0,
        partners: Annotated[
            str, Field(description="The pairs instead, as in 0-3,1-2; ranks not named wait.")
        ] = "",
        direction: Annotated[
            Direction,
            Field(
                description="forward: lower rank to higher. backward. both: at once. round_trip: "
                "there, and back when it has arrived."
            ),
        ] = "forward",
        transport: Annotated[
            Transport, Field(description="send: NCCL or gloo. copy: between GPUs of one host.")
        ] = "send",
        size_bytes: Annotated[
            int, Field(gt=0, multiple_of=8, description="Bytes of one message.")
        ] = 2**28,
    ) -> None:
        # `raybench plan` reads this signature and must not pay for importing torch.
        from raybench.workloads.communication import pair_transports

        _check(context, transport, direction)
        size = context.world_size
        pairs = parse_pairs(partners, size) if partners else pairs_of_turn(size, turn)
        mine = [pair for pair in pairs if context.rank in pair]
        self.pair: Pair | None = mine[0] if mine else None
        self.message_bytes = _MESSAGES[direction] * size_bytes
        self._direction, self._transport = direction, transport
        path = pair_transports.make_path(
            context, pairs, self.pair, transport, direction, size_bytes
        )
        self._path = path
        self._issue = path.issue

    def step(self) -> None:
        """Issue the messages once."""
        self._issue()

    def check(self) -> None:
        """Compare what arrived with what was sent; then make it wrong for the next check.

        Raises WrongResultError, which names the pair.
        """
        wrong = self._path.first_wrong()
        if wrong is not None and self.pair is not None:
            sender, receiver = wrong
            raise WrongResultError(
                f"ranks {self.pair[0]} and {self.pair[1]}: a message from rank {sender} to rank "
                f"{receiver} ({self._transport}, {self._direction}) arrived with a wrong payload"
            )


def _check(context: Context, transport: Transport, direction: Direction) -> None:
    if context.world_size < 2:
        raise UsageError(
            f"workload pairs: needs at least 2 ranks, world_size is {context.world_size}; "
            "raise world_size"
        )
    if context.precision is not Precision.FP32:
        raise UsageError(
            f"workload pairs: precision {context.precision} means nothing to a message; "
            "leave precision out"
        )
    if transport == "copy" and context.device.type != "cuda":
        raise UsageError(
            "workload pairs: transport copy is between the memories of two GPUs, and this is a "
            "CPU worker; give transport: send"
        )
    if transport == "copy" and direction in ("both", "round_trip"):
        raise UsageError(
            f"workload pairs: direction {direction} needs transport: send; a copy goes forward or "
            "backward"
        )
