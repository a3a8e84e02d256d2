"""The process of a script, which runs as `__main__` and is held where an iteration ends.

`running.py` starts this file as a program. While steps are timed, `hangs/responder.py` is the only
other file of raybench in this process. Once the script has imported torch, every optimizer calls
`_StepControl.end_step` when its `step` returns.

Messages are lines of JSON. The parent asks for a number of steps, and this process answers with
their durations. Between two blocks the script waits in its optimizer.
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
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from types import ModuleType
from typing import Any
from weakref import WeakSet

_STDERR = 2
_RESPONDER = Path(__file__).parents[2] / "hangs" / "responder.py"
_PR_SET_PDEATHSIG = 1
# Not from raybench.conversion, because the script's process must not load the package.
_NS_PER_MS = 1_000_000
# Limits of the text and frames of an exception: the parent keeps no more.
_MOST_CHARACTERS = 20_000
_MOST_FRAMES = 100


class _Channel:
    """Sends messages to the parent and receives its messages."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._file = socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8")

    def send(self, **message: Any) -> None:
        """Send a message, which must be plain JSON."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next message; end this process if the parent has ended."""
        line = self._file.readline()
        if not line:
            os._exit(1)
        message: dict[str, Any] = json.loads(line)
        return message


class _OptimizerHook(MetaPathFinder):
    """Makes every optimizer call `hook` after each step, once torch.optim is imported."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torch.optim.optimizer with a loader that adds the hook."""
        if name != "torch.optim.optimizer":
            return None  # other finders import the module
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            exec_module = loader.exec_module

            def exec_and_hook(module: Any) -> None:
                exec_module(module)
                module.register_optimizer_step_post_hook(self._hook)

            loader.exec_module = exec_and_hook
        return spec


class _Clock:
    """Times the intervals between marks: by CUDA events on a GPU, otherwise by the host's clock."""

    def __init__(self, device: Any) -> None:
        self.device = device
        on_gpu = device is not None and device.type == "cuda"
        self.cuda: Any = sys.modules["torch"].cuda if on_gpu else None
        self.name = "cuda" if self.cuda else "host"
        # The host's time of each mark.
        self._marks_ns: list[int] = []

    def begin(self, iterations: int) -> None:
        """Forget earlier marks, and prepare to mark this number of iterations."""
        self._marks_ns = []
        if self.cuda:
            self._stream = self.cuda.current_stream(self.device)
            # Make the events now, because making one takes time.
            self._unused_events = [
                self.cuda.Event(enable_timing=True) for _ in range(iterations + 1)
            ]
            self._events: list[Any] = []

    def mark(self) -> None:
        """Mark the end of an iteration."""
        self._marks_ns.append(perf_counter_ns())
        if self.cuda:
            event = self._unused_events.pop()
            event.record(self._stream)
            self._events.append(event)

    def take(self, origin_ns: int) -> dict[str, Any]:
        """Wait for the device; return iterations and memory peaks in bytes; forget the marks.

        Args:
            origin_ns: starts of iterations count from this time.
        """
        marks_ns, self._marks_ns = self._marks_ns, []
        host_ns = [end - start for start, end in pairwise(marks_ns)]
        step_ns = host_ns
        if host_ns and self.cuda:
            self.cuda.synchronize(self.device)
            pairs = pairwise(self._events)
            step_ns = [round(start.elapsed_time(end) * _NS_PER_MS) for start, end in pairs]
        cuda = self.cuda
        return {
            "start_ns": [mark - origin_ns for mark in marks_ns[:-1]],
            "step_ns": step_ns,
            "host_ns": host_ns,
            "allocated_bytes": cuda.max_memory_allocated(self.device) if cuda else None,
            "reserved_bytes": cuda.max_memory_reserved(self.device) if cuda else None,
        }


class _StepControl:
    """Ends iterations at steps of an optimizer, times them, and obeys the parent between blocks."""

    def __init__(self, channel: _Channel, step_of: str, on_first_step: Callable[[], None]) -> None:
        self._channel, self._step_of, self._on_first_step = channel, step_of, on_first_step
        self._origin_ns = perf_counter_ns()
        # The optimizer whose step ends an iteration: of class `step_of`, otherwise the last
        # optimizer to make its first step.
        self._ending_optimizer: Any = None
        self._seen_optimizers: WeakSet[Any] = WeakSet()
        # Names of the classes of all optimizers that have stepped.
        self.optimizer_names: dict[str, None] = {}
        # Whether the warm-up is over, so that no other optimizer can end iterations.
        self._is_warm = False
        # Untimed and then timed iterations that are left in the block.
        self._untimed_left = self._timed_left = 0
        self._clock: _Clock | None = None
        # Times the parts of a step; None while only steps are timed.
        self._marks: Any = None

    def end_step(self, optimizer: Any, *_: Any) -> None:
        """End an iteration if this optimizer ends iterations; after a block wait for the parent."""
        if self._marks is not None:
            self._marks.end_optimizer()
        if not self._update_ending_optimizer(optimizer):
            return
        if self._clock is None:
            self._clock = self._begin(optimizer)
        if self._marks is not None:
            self._marks.end_step()
        if self._untimed_left:
            self._untimed_left -= 1
            if not self._untimed_left:
                self._clock.mark()  # the begin of the first timed iteration
            return
        if self._timed_left:
            self._clock.mark()
            self._timed_left -= 1
            if self._timed_left:
                return
            self._channel.send(samples=self.take())
        self._obey(self._clock)

    def _update_ending_optimizer(self, optimizer: Any) -> bool:
        """Return whether this optimizer ends iterations; a new optimizer may take over."""
        if optimizer is self._ending_optimizer:
            return True
        name = type(optimizer).__name__
        is_new = optimizer not in self._seen_optimizers
        self._seen_optimizers.add(optimizer)
        self.optimizer_names[name] = None
        # `step_of` is the class of optimizer that the job asks for; "" accepts all classes.
        is_accepted = not self._step_of or name == self._step_of
        if not is_new or self._is_warm or not is_accepted:
            return False
        # During the warm-up, each new optimizer takes over from the optimizer before.
        self._ending_optimizer = optimizer
        return True

    def _begin(self, optimizer: Any) -> _Clock:
        """Tell the parent that the first step has ended; return a clock for the script's device."""
        devices = (p.device for group in optimizer.param_groups for p in group["params"])
        clock = _Clock(next(devices, None))
        dist: Any = sys.modules.get("torch.distributed")
        has_group = dist is not None and dist.is_available() and dist.is_initialized()
        ranks = dist.get_world_size() if has_group else 1
        self._on_first_step()
        self._channel.send(begun={"clock": clock.name, "ranks": ranks})
        return clock

    def take(self) -> dict[str, Any] | None:
        """Return a block's samples, and times of parts in ms; None before the first step."""
        if self._clock is None:
            return None
        samples = self._clock.take(self._origin_ns)
        iterations = len(samples["step_ns"])
        return {**samples, "parts": self._marks.take(iterations) if self._marks else {}}

    def _obey(self, clock: _Clock) -> None:
        """Do what the parent asks, until the parent asks for steps."""
        while True:
            message = self._channel.receive()
            match message["do"]:
                case "steps":
                    self._untimed_left = message["lead_in"]
                    self._timed_left = message["iterations"]
                    clock.begin(self._timed_left)
                    if not self._untimed_left:
                        clock.mark()  # the begin of the first timed iteration
                    return
                case "end_warmup":
                    self._is_warm = True
                    if clock.cuda:
                        clock.cuda.reset_peak_memory_stats(clock.device)
                case "mark_parts":
                    # Load raybench only now, because it must not be there while steps are timed.
                    sys.path.append(str(Path(__file__).parents[3]))
                    # `why_not` is a value of `NotMeasured`; "" if all parts can be timed.
                    why_not, error_text = "", ""
                    try:
                        device = clock.device or sys.modules["torch"].device("cpu")
                        self._marks = import_module(message["module"]).ScriptMarks(device)
                        if message["has_peers"]:
                            why_not = self._marks.find_ddp_models() or ""
                    except Exception as error:  # not fatal: the steps were timed before
                        self._marks = None
                        why_not, error_text = "not_beside_script", repr(error)
                    self._channel.send(why_not=why_not, error=error_text)
                case "time_gradients" | "keep_gradients" as method:
                    getattr(self._marks, method)()
                case "end":
                    os._exit(0)


def _load_responder() -> Any:
    """Load the responder by its path: importing the package would cost the script time."""
    spec = spec_from_file_location("_raybench_responder", _RESPONDER)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(descriptor: str, options: str, script: str, *arguments: str) -> int:
    """Run the script as `__main__` of this process; tell the parent its end; return the exit code.

    If the script raises, the parent and stderr get the traceback, and the process exits with 1.

    Args:
        descriptor: file descriptor of the socket to the parent.
        options: JSON with `step_of`, a class of optimizers, and `timeout_s`, after which stderr
            gets the stacks.
        script: path of the script.
        arguments: its command line.
    """
    # The kernel kills this process when the worker dies; the worker may have died already.
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    parsed_options = json.loads(options)
    channel = _Channel(int(descriptor))
    faulthandler.enable(_STDERR)
    faulthandler.dump_traceback_later(parsed_options["timeout_s"], file=_STDERR)
    responder_module = _load_responder()
    responder_module.choose_ras_address()
    responder = responder_module.of_this_process()
    # The responder's thread starts after the first step, because the script may fork before.
    control = _StepControl(channel, parsed_options["step_of"], on_first_step=responder.serve)
    sys.meta_path.insert(0, _OptimizerHook(control.end_step))
    # Imitate `python script arguments`.
    path = Path(script).absolute()
    module = ModuleType("__main__")
    module.__file__ = str(path)
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.parent)
    sys.modules["__main__"] = module
    exit_code = 0
    try:
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except SystemExit as exit_error:
        # Imitate Python: the lowest byte of a number is the exit code; other values are printed.
        if exit_error.code is None or isinstance(exit_error.code, int):
            exit_code = (exit_error.code or 0) & 0xFF
        else:
            exit_code = 1
            sys.stderr.write(f"{exit_error.code}\n")
    except BaseException as error:  # whatever the script raises
        # Leave this file out of the traceback.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        sys.stderr.write(text)
        sys.stderr.flush()
        last_frames = list(traceback.walk_tb(frames))[-_MOST_FRAMES:]
        channel.send(
            raised={
                "type": type(error).__name__,
                "bases": [base.__name__ for base in type(error).__mro__],
                "message": str(error)[:_MOST_CHARACTERS],
                "traceback": text[-_MOST_CHARACTERS:],
                "frames": [
                    (frame.f_code.co_filename, line, frame.f_code.co_name)
                    for frame, line in last_frames
                ],
            }
        )
        os._exit(1)
    optimizers = list(control.optimizer_names)
    channel.send(ended={"code": exit_code, "samples": control.take(), "optimizers": optimizers})
    return exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
