"""The process of a training script, which a worker starts and steers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from raybench.conversion import MIB
from raybench.errors import (
    DETAIL_CHARACTERS,
    OUT_OF_MEMORY_PHRASES,
    last_user_frame,
    shorten_start,
)
from raybench.job.point import fill_in, product_of, split_arguments
from raybench.records.doubts import Doubt, DoubtKind, NotMeasured
from raybench.records.measurement import Failure, RankShare, Samples
from raybench.records.status import Cause, Status
from raybench.records.task import Task
from raybench.workloads.base import Context, Workload
from raybench.workloads.part import PartFailedError, StepKind

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_CHILD = Path(__file__).with_name("child.py")
# A script writes its stack this long before the deadline, so that the driver sees where the script
# hangs.
_STACK_WRITE_S = 0.3
# For this long after the deadline an abort does not end the wait for the script, because the driver
# looks for the rank that hangs.
_HANG_SEARCH_S = 1.3
# How long a script may take to end.
_END_TIMEOUT_S = 2.0
_OUT_OF_MEMORY_ERRORS = {"OutOfMemoryError", "MemoryError"}
# Variables of the worker that a script must not inherit: torchrun does not set them, and a script
# need not outlive the loss of a peer.
_WORKER_VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)
# As in `hangs/responder.py`, which this room may not import.
RAS_VARIABLE, CHOSEN_RAS_VARIABLE = "NCCL_RAS_ADDR", "RAYBENCH_RAS_ADDR"
# With these events torch's flight recorder distinguishes collectives that have begun from
# collectives that wait for their device. An event is recorded for each collective.
COLLECTIVE_TIMING_VARIABLES = {"TORCH_NCCL_ENABLE_TIMING": "1"}


class ScriptFailedError(PartFailedError):
    """The script has failed."""


class ScriptAbortedError(Exception):
    """Another rank has failed and ended the worker's process group."""


class ScriptEndedError(Exception):
    """The script has ended without a failure before it was asked to end."""


class ScriptPart:
    """This rank's part of a step that a script runs; a `workloads.part.Part`."""

    share: RankShare | None = None
    doubts: tuple[Doubt, ...] = ()
    kind: StepKind | None = None
    has_own_process = True

    def __init__(
        self,
        context: Context,
        task: Task,
        *,
        serve_store: Callable[[], TCPStore],
        is_aborted: Callable[[], bool],
        deadline_s: float,
    ) -> None:
        """Prepare the part; `build` starts the script.

        Args:
            serve_store: starts the TCP store of the script's ranks; called on rank 0 only.
            is_aborted: tells whether another rank has failed.
            deadline_s: time limit by `time.monotonic`.
        """
        self.context, self._task = context, task
        self._serve_store, self._is_aborted = serve_store, is_aborted
        self._deadline_s = deadline_s
        self._script: RunningScript | None = None
        # `RunningScript.close` adds the ids of the script's processes.
        self._ended_processes: set[int] = set()

    @property
    def has_ended(self) -> bool:
        """Whether the script has ended by itself."""
        return self._script is not None and self._script.has_ended

    @property
    def ended_processes(self) -> frozenset[int]:
        """The ids of the script's processes, which have ended."""
        return frozenset(self._ended_processes)

    def build(self) -> Workload:
        """Start the script and wait for its first step. Collective.

        Raises:
            the errors of `RunningScript`.
        """
        self._script = RunningScript(
            self.context,
            self._task,
            self._serve_store() if self.context.rank == 0 else None,
            is_aborted=self._is_aborted,
            deadline_s=self._deadline_s,
            ended_processes=self._ended_processes,
        )
        return self._script


class RunningScript(Workload):
    """A script that has made its first step and waits for requests."""

    def __init__(
        self,
        context: Context,
        task: Task,
        store: TCPStore | None,
        is_aborted: Callable[[], bool],
        deadline_s: float,
        ended_processes: set[int],
    ) -> None:
        """Start the script and wait for its first step. Collective: every rank must call it.

        Args:
            store: TCP store of the script's ranks, served by rank 0; None on other ranks.
            is_aborted: tells whether another rank has failed.
            deadline_s: time limit by `time.monotonic`; shortly before, the script writes its stack.
            ended_processes: `close` adds the ids of the script's processes.

        Raises:
            ScriptFailedError: the script has failed or ended before its first step.
            ScriptAbortedError: another rank has failed.
        """
        params, settings = task.point.params, task.point.settings
        script_file = task.code.script if task.code else None
        # The parameter is a product such as "{batch_size} * 8", or empty.
        items = product_of(fill_in(str(params["items_per_step"]), settings))
        if items is not None:
            self.items_per_step = items
        # Keep the store alive for the ranks of the script.
        self._store = store
        inherited = inherited_variables(os.environ)
        variables = dict(_torchrun_variables(context, store))
        if task.settings.hang_s is not None:
            # To find a rank that hangs, torch must record which collectives have begun.
            for name, value in COLLECTIVE_TIMING_VARIABLES.items():
                # A value that the user exported wins.
                if name not in inherited:
                    variables[name] = value
        self._is_aborted, self._step_of = is_aborted, str(params["step_of"])
        timeout_s = max(0.1, deadline_s - _STACK_WRITE_S - time.monotonic())
        self._deadline_s = time.monotonic() + timeout_s
        # Whether the script waits in its optimizer for the next request.
        self._is_held = False
        self._has_stepped = self.has_ended = False
        # Times of the parts of the last block in ms, by name of the part.
        self.parts: Mapping[str, Sequence[float]] = {}
        # Peaks of allocated and reserved bytes since `end_warmup`; None on a CPU.
        self.peaks: tuple[int | None, int | None] = None, None
        options = json.dumps({"step_of": self._step_of, "timeout_s": timeout_s})
        path = Path(script_file.path if script_file else str(params["path"])).absolute()
        arguments = split_arguments(fill_in(str(params["args"]), settings))
        self._socket, child_socket = socket.socketpair()
        with child_socket:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-u", str(_CHILD), str(child_socket.fileno()), options),
                    *(str(path), *arguments),
                ],
                env={**inherited, **variables, **task.point.env},
                cwd=Path(script_file.folder) if script_file else Path.cwd(),
                stdin=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
                # A new process group, so that `close` kills the script's children with it.
                process_group=0,
            )
        # Bytes that the script has sent beyond the last whole message.
        self._received = b""
        self._ended_processes = ended_processes
        self._pidfd = os.pidfd_open(self._process.pid)
        try:
            # `clock` is cuda or host; `ranks` is the size of the script's process group.
            self._first_step_report: Mapping[str, Any] = self._receive()["begun"]
        except BaseException:
            self.close()
            raise
        self._has_stepped = self._is_held = True

    def step(self) -> None:
        """Run one iteration, unless the script ends."""
        self.run_steps(1)

    def run_steps(self, iterations: int, *, lead_in: int = 0) -> Samples:
        """Run `lead_in` untimed iterations, then time `iterations` more; return their times.

        If the script ends during these iterations, the result has fewer iterations or none. Starts
        count from the start of the script's process.

        Raises:
            ScriptEndedError: the script had ended before.
            ScriptFailedError: the script has failed or was killed.
            ScriptAbortedError: another rank has failed.
        """
        if self.has_ended:
            raise ScriptEndedError
        self._send(do="steps", iterations=iterations, lead_in=lead_in)
        self._is_held = False
        try:
            samples = self._receive()["samples"]
        except ScriptEndedError:
            return Samples()
        self._is_held = not self.has_ended
        self.peaks = samples["allocated_bytes"], samples["reserved_bytes"]
        self.parts = samples["parts"]
        return Samples(
            start_ns=tuple(samples["start_ns"]),
            step_ns=tuple(samples["step_ns"]),
            host_ns=tuple(samples["host_ns"]),
        )

    def end_warmup(self) -> None:
        """Let the script reset its memory peaks before its next step; do not wait for the script.

        Before this call, an optimizer that steps for the first time may become the optimizer whose
        steps end the iterations. Afterwards no other optimizer can.
        """
        self._send(do="end_warmup")

    def mark_parts(self, module: str, *, has_peers: bool) -> tuple[NotMeasured | None, str]:
        """Let later steps fill `self.parts` with times; call this after the timed steps.

        Args:
            module: name of the Python module that defines `ScriptMarks`; the script imports it.
            has_peers: whether there are other ranks; if so, prepare `time_gradients`, too.

        Returns:
            Why not all parts can be timed (None if they can), and the error that prevents it.
        """
        if self.has_ended:
            raise ScriptEndedError
        self._send(do="mark_parts", module=module, has_peers=has_peers)
        answer = self._receive()
        return NotMeasured(answer["why_not"]) if answer["why_not"] else None, str(answer["error"])

    def time_gradients(self) -> None:
        """Let later steps time DDP's reductions. Collective; once, after `mark_parts`."""
        self._send(do="time_gradients")

    def keep_gradients(self) -> None:
        """Let later steps skip DDP's reductions. Collective; after `time_gradients`."""
        self._send(do="keep_gradients")

    def close(self) -> None:
        """End the script, its process group and its descendants within 2 s; call this once."""
        # Find the descendants first, while they still have their parents.
        descendants: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self._process.pid).children(recursive=True)
        self._ended_processes.add(self._process.pid)
        self._ended_processes.update(process.pid for process in descendants)
        self._send(do="end")
        # Only a script that waits for the next request can end by itself.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S if self._is_held else 0.0)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._socket.close()
        os.close(self._pidfd)

    def doubts(self, context: Context) -> Iterator[Doubt]:
        """Yield a doubt if the host's clock times a GPU, and one if not all ranks have joined."""
        if context.device.type == "cuda" and self._first_step_report["clock"] == "host":
            yield Doubt(kind=DoubtKind.HOST_CLOCK)
        ranks = self._first_step_report["ranks"]
        if ranks != context.world_size:
            yield Doubt(kind=DoubtKind.MISSING_RANKS, value=ranks, limit=context.world_size)

    def _send(self, **message: Any) -> None:
        # If the process has ended, `_receive` notices it.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any]:
        """Return the next message; if the script has ended or failed, see `_end_message`."""
        sources: list[Any] = [self._socket, self._pidfd]
        while b"\n" not in self._received:
            # For a moment after the deadline the driver looks for the rank that hangs. During this
            # search an abort must not end the script.
            overtime_s = time.monotonic() - self._deadline_s
            is_hang_search = 0 <= overtime_s < _HANG_SEARCH_S
            if not is_hang_search and self._is_aborted():
                raise ScriptAbortedError
            ready, _, _ = select.select(sources, [], [], 0.05)
            if not ready:
                continue
            # If only the pidfd is ready, the script has ended, although its children may keep the
            # socket open.
            received = b""
            if self._socket in ready:
                with suppress(ConnectionResetError):
                    received = self._socket.recv(MIB)
            if not received:
                select.select([self._pidfd], [], [], _END_TIMEOUT_S)
                return self._end_message({"code": self._process.poll(), "samples": None})
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "raised" in message:
            raise ScriptFailedError(_failure_of(message["raised"]))
        if "ended" in message:
            return self._end_message(message["ended"])
        return message

    def _end_message(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """Return the last samples as a message if the script ended during steps; otherwise raise.

        Args:
            end: `code` is the exit code, negative for a signal; `samples` are the last samples;
                `optimizers` are the names of the optimizers that have stepped.

        Raises:
            ScriptEndedError: the script ended without a failure, and without samples.
            ScriptFailedError: the script failed, or ended before its first step.
        """
        self.has_ended = True
        code = end["code"]
        cause = Cause.NO_STEPS
        if code is not None and code < 0:
            # A real-time signal may have no name.
            names = {number: number.name for number in signal.Signals}
            signal_name = names.get(-code, f"signal {-code}")
            cause, message = Cause.WORKER_DIED, f"the process of the script died by {signal_name}"
        elif code:
            cause, message = Cause.SCRIPT_EXIT, f"the script ended with exit code {code}"
        elif self._has_stepped and end["samples"]:
            return {"samples": end["samples"]}
        elif self._has_stepped:
            raise ScriptEndedError
        elif end.get("optimizers"):
            # The job names a class of optimizers, and no optimizer of this class has stepped.
            message = (
                f"no optimizer {self._step_of} has stepped, by which step_of ends an iteration; "
                f"those that did: {', '.join(end['optimizers'])}"
            )
        else:
            message = (
                "the script ended and no optimizer of torch.optim has stepped: an iteration ends "
                "where Optimizer.step returns"
            )
        raise ScriptFailedError(Failure.of(cause, rank=0, message=message, worker_reusable=True))


def inherited_variables(worker_variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a script inherits from the process of its worker."""
    inherited = {
        name: value
        for name, value in worker_variables.items()
        if not name.startswith("RAY_") and name not in _WORKER_VARIABLES
    }
    # NCCL's RAS subsystem of the script needs an address of its own, so do not inherit the address
    # that raybench chose for the worker. The user's own address stays.
    chosen_address = inherited.pop(CHOSEN_RAS_VARIABLE, None)
    if inherited.get(RAS_VARIABLE) == chosen_address:
        inherited.pop(RAS_VARIABLE, None)
    return inherited


def _failure_of(raised: Mapping[str, Any]) -> Failure:
    """Return the failure of a script that has raised an exception; the worker sets the rank."""
    # `raised` has texts only: type, message and traceback of the exception, `bases` (the names of
    # its classes), and `frames` (file, line and function of each).
    text = raised["message"].strip()
    first_line = text.splitlines()[0] if text else f"{raised['type']}: no message"
    location = last_user_frame(raised["frames"])
    is_oom = not _OUT_OF_MEMORY_ERRORS.isdisjoint(raised["bases"])
    if "RuntimeError" in raised["bases"]:
        is_oom = is_oom or any(phrase in text for phrase in OUT_OF_MEMORY_PHRASES)
    return Failure(
        rank=0,
        status=Status.OOM if is_oom else Status.ERROR,
        error_type=raised["type"],
        message=first_line + (f", at {location}" if location else ""),
        detail=shorten_start(raised["traceback"], DETAIL_CHARACTERS),
        # The state of the device has ended with the script's process.
        worker_reusable=True,
    )


def _torchrun_variables(context: Context, store: TCPStore | None) -> Mapping[str, str]:
    """Return the variables of torchrun that differ from the worker's. Collective."""
    import torch.distributed as dist

    device = ""
    if context.device.type == "cuda":
        visible, index = os.environ.get("CUDA_VISIBLE_DEVICES"), context.device.index
        device = visible.split(",")[index].strip() if visible else str(index)
    local_node = int(os.environ["GROUP_RANK"])
    local_address = (store.host, store.port) if store else None
    # Node, local rank, device, and address of the store of each rank; only rank 0 has a store.
    local_entry = local_node, context.local_rank, device, local_address
    entries: list[Any] = [local_entry]
    if context.world_size > 1:
        entries = [None] * context.world_size
        dist.all_gather_object(entries, local_entry)
    store_addresses = [address for _, _, _, address in entries if address]
    ((host, port),) = store_addresses
    nodes = {node for node, _, _, _ in entries}
    variables = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_NAME": "default",
        "ROLE_RANK": os.environ["RANK"],
        "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The ranks must not serve the store themselves.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if device:
        # LOCAL_RANK is an index into this variable, so list the devices of the node's ranks.
        devices = [
            (local_rank, device) for node, local_rank, device, _ in entries if node == local_node
        ]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(device for _, device in sorted(devices))
    return variables
