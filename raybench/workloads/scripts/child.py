"""The process of a script: the script as `__main__`, held where an iteration ends.

`process.py` starts this file as a program. Until the steps are timed nothing of raybench is
loaded in it but this file: the process is the script's. It imports no torch either; when the script
does, every optimizer of torch.optim calls `_Steps.end_step` where its `step` returns.

Messages are JSON, one a line. The parent says how many steps to run next, and this process answers
with their durations. Between two blocks the script waits in its optimizer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from types import ModuleType
from typing import Any, NoReturn
from weakref import WeakSet

_STDERR = 2
_PR_SET_PDEATHSIG = 1
_MS_TO_NS = 1_000_000
_OPTIMIZERS = "torch.optim.optimizer"
# What the parent keeps of a text.
_CHARACTERS = 20_000


class _Channel:
    """Sends and receives messages; the process ends where the parent has."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._file = socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8")

    def send(self, **message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            os._exit(1)
        message: dict[str, Any] = json.loads(line)
        return message


class _AfterImport(MetaPathFinder):
    """Calls `then` with a module as soon as the script has imported it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            loader.exec_module = execute_and_tell
        return spec


class _HostClock:
    """Marks are those of the host alone."""

    name = "host"

    def begin(self, iterations: int) -> None: ...

    def mark(self) -> None: ...

    def step_ns(self, marks_ns: Sequence[int]) -> list[int]:
        return [end - start for start, end in pairwise(marks_ns)]

    def peaks(self) -> tuple[int | None, int | None]:
        return None, None

    def forget_memory(self) -> None: ...

    def device(self) -> Any:
        return sys.modules["torch"].device("cpu")


class _DeviceClock:
    """One CUDA event between iterations, on the stream of the device of the parameters."""

    name = "cuda"

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device
        self._events: list[Any] = []
        self._used = 0

    def begin(self, iterations: int) -> None:
        cuda = self._torch.cuda
        self._stream = cuda.current_stream(self._device)
        self._events = [cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        self._used = 0

    def mark(self) -> None:
        self._events[self._used].record(self._stream)
        self._used += 1

    def step_ns(self, marks_ns: Sequence[int]) -> list[int]:
        self._torch.cuda.synchronize(self._device)
        events = self._events[: self._used]
        return [round(start.elapsed_time(end) * _MS_TO_NS) for start, end in pairwise(events)]

    def peaks(self) -> tuple[int | None, int | None]:
        cuda = self._torch.cuda
        return cuda.max_memory_allocated(self._device), cuda.max_memory_reserved(self._device)

    def forget_memory(self) -> None:
        self._torch.cuda.reset_peak_memory_stats(self._device)

    def device(self) -> Any:
        return self._device


class _Steps:
    """Where iterations end, and how long they took.

    step_of: the class of the optimizer whose step ends an iteration; empty: the last one to make
    its first step.
    """

    def __init__(self, channel: _Channel, step_of: str) -> None:
        self._channel, self._step_of = channel, step_of
        self._origin_ns = perf_counter_ns()
        self._counted: Any = None
        self._known: WeakSet[Any] = WeakSet()
        self._names: dict[str, None] = {}
        self._is_warm = False
        self._lead_in = self._left = 0
        self._marks_ns: list[int] = []
        self._marks: Any = None
        self._clock: _HostClock | _DeviceClock = _HostClock()

    def watch(self, optimizers: ModuleType) -> None:
        """Have every optimizer call `end_step` from now on."""
        optimizers.register_optimizer_step_post_hook(self.end_step)

    def end_step(self, optimizer: Any, *_: Any) -> None:
        """End an iteration where this optimizer is the one that ends them."""
        if self._marks is not None:
            self._marks.end_optimizer()
        if optimizer is not self._counted and not self._is_new(optimizer):
            return
        if self._marks is not None:
            self._marks.end_step()
        if self._lead_in:
            self._lead_in -= 1
            if not self._lead_in:
                self._mark()
            return
        if self._left:
            self._mark()
            self._left -= 1
            if self._left:
                return
            self._channel.send(samples=self._take())
        self._obey()

    def end_script(self) -> dict[str, Any]:
        """Return the samples of the block that the script's end cut short, and all optimizers."""
        return {"samples": self._take(), "optimizers": list(self._names)}

    def _is_new(self, optimizer: Any) -> bool:
        """Take a new optimizer for the one that ends iterations, while they are warming up."""
        if optimizer in self._known:
            return False
        self._known.add(optimizer)
        name = type(optimizer).__name__
        self._names[name] = None
        if self._is_warm or (self._step_of and name != self._step_of):
            return False
        is_first = self._counted is None
        self._counted = optimizer
        if is_first:
            self._clock = _make_clock(optimizer)
            self._channel.send(begun=_facts(self._clock))
        return True

    def _obey(self) -> None:
        """Do what messages of the parent ask, until one asks for steps."""
        while True:
            message = self._channel.receive()
            match message["do"]:
                case "steps":
                    self._begin(message["lead_in"], message["iterations"])
                    return
                case "forget_memory":
                    self._is_warm = True
                    self._clock.forget_memory()
                case "mark_parts":
                    self._channel.send(why_not=self._mark_parts(**message["how"]))
                case "time_gradients":
                    self._marks.time_gradients()
                case "keep_gradients":
                    self._marks.keep_gradients()
                case "end":
                    os._exit(0)

    def _mark_parts(self, module: str, has_peers: bool) -> str:
        """Load raybench to time parts of steps; return why that cannot be, else an empty text.

        Only after the timed steps: until then the process has nothing of raybench.
        """
        sys.path.append(str(Path(__file__).parents[3]))
        try:
            marks = import_module(module).ScriptMarks(self._clock.device())
            why_not = str(marks.hook_gradients()) if has_peers else ""
        except Exception as error:  # the samples are there already
            return f"unknown: raybench cannot be loaded beside the script: {error!r}"
        self._marks = marks
        return why_not

    def _begin(self, lead_in: int, iterations: int) -> None:
        self._lead_in, self._left, self._marks_ns = lead_in, iterations, []
        self._clock.begin(iterations)
        if not lead_in:
            self._mark()

    def _mark(self) -> None:
        self._marks_ns.append(perf_counter_ns())
        self._clock.mark()

    def _take(self) -> dict[str, Any]:
        marks_ns, self._marks_ns = self._marks_ns, []
        host_ns = [end - start for start, end in pairwise(marks_ns)]
        step_ns = self._clock.step_ns(marks_ns) if host_ns else []
        allocated_bytes, reserved_bytes = self._clock.peaks()
        return {
            "start_ns": [mark - self._origin_ns for mark in marks_ns[:-1]],
            "step_ns": step_ns,
            "host_ns": host_ns,
            "allocated_bytes": allocated_bytes,
            "reserved_bytes": reserved_bytes,
            "parts": self._marks.take(len(step_ns)) if self._marks is not None else {},
        }


def _make_clock(optimizer: Any) -> _HostClock | _DeviceClock:
    """Return the clock of the device on which the parameters are."""
    torch = sys.modules["torch"]
    devices = (p.device for group in optimizer.param_groups for p in group["params"])
    device = next(devices, None)
    if device is None or device.type != "cuda":
        return _HostClock()
    return _DeviceClock(torch, device)


def _facts(clock: _HostClock | _DeviceClock) -> dict[str, Any]:
    distributed: Any = sys.modules.get("torch.distributed")
    is_joined = (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )
    return {
        "clock": clock.name,
        "ranks": distributed.get_world_size() if is_joined else 1,
    }


def _end_with_parent() -> None:
    """Have the system kill this process when the worker dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(script: str, arguments: Sequence[str]) -> None:
    """Run the file as `python script arguments` does."""
    path = Path(script).absolute()
    main = ModuleType("__main__")
    main.__file__ = str(path)
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.parent)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), path, "exec"), main.__dict__)


def _tell_error(channel: _Channel, error: BaseException) -> NoReturn:
    """Write the traceback as Python does, without the frames of this file, and tell the parent."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    sys.stderr.write(text)
    sys.stderr.flush()
    channel.send(
        raised={
            "type": type(error).__name__,
            "bases": [base.__name__ for base in type(error).__mro__],
            "message": str(error)[:_CHARACTERS],
            "traceback": text[-_CHARACTERS:],
        }
    )
    os._exit(1)


def _exit_code(ended: SystemExit) -> int:
    """Return the code that Python would end with; a text goes to stderr."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    sys.stderr.write(f"{ended.code}\n")
    return 1


def main(descriptor: str, options: str, script: str, *arguments: str) -> int:
    """Run the script, and return the exit code."""
    _end_with_parent()
    given = json.loads(options)
    channel = _Channel(int(descriptor))
    faulthandler.enable(_STDERR)
    faulthandler.dump_traceback_later(given["timeout_s"], file=_STDERR)
    steps = _Steps(channel, given["step_of"])
    sys.meta_path.insert(0, _AfterImport(_OPTIMIZERS, steps.watch))
    code = 0
    try:
        _run(script, arguments)
    except SystemExit as ended:
        code = _exit_code(ended)
    except BaseException as error:  # whatever the script raises
        _tell_error(channel, error)
    channel.send(ended={"code": code, **steps.end_script()})
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
