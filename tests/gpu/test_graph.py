"""Steps captured in a CUDA graph and replayed: `pytest -m gpu tests/gpu`."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from raybench.errors import UsageError
from raybench.job.model import Measure
from raybench.measure.instruments import TRIAL_REPLAYS
from raybench.measure.phases import measure
from raybench.workloads.base import Workload
from raybench.workloads.networks import Mlp
from tests.gpu.gpus import make_context

pytestmark = pytest.mark.gpu

SETTINGS = Measure(warmup=20, iterations=50, breakdown=False)


class Counting(Workload):
    """Adds one to a counter on the device, with many launches; counts what Python does too."""

    def __init__(self, context, launches=20):
        # Exact where float32 would round thousands of small steps.
        self._total = torch.zeros(1, dtype=torch.float64, device=context.device)
        self._launches = launches
        self.python_steps = 0
        self.checks = []

    def step(self):
        self.python_steps += 1
        for _ in range(self._launches):
            self._total.add_(1 / self._launches)

    def check(self):
        self.checks.append(self._total.item())


class Waiting(Counting):
    """Waits for the device in its step."""

    def step(self):
        super().step()
        self._total.item()


def measured(workload, context):
    return measure(lambda: workload, context, SETTINGS)


def median_ns(done):
    (repetition,) = done.repetitions
    return float(torch.tensor(repetition.timed.step_ns).double().median())


def test_replays_run_every_step_on_the_device_alone():
    context = make_context(cuda_graph=True)
    workload = Counting(context)
    (repetition,) = measured(workload, context).repetitions
    inner = repetition.inner_iterations
    assert 1 < inner <= 100
    # A graph of one step tells how long it takes. One replay goes before those that are timed,
    # and two lead into their block.
    assert workload.python_steps == 20 + 1 + inner
    trial = 1 + TRIAL_REPLAYS
    assert workload.checks == pytest.approx([20, 20 + trial + (1 + 2 + 50) * inner])


def step_ns(make):
    """The step in ns of this workload, from Python and in a graph."""
    contexts = [make_context(cuda_graph=cuda_graph) for cuda_graph in (False, True)]
    return [median_ns(measured(make(context), context)) for context in contexts]


def test_replayed_launches_take_less_than_those_of_python():
    eager_ns, graph_ns = step_ns(Counting)
    assert graph_ns < 0.8 * eager_ns


def test_a_long_kernel_takes_equal_time_in_graphs():
    class Long(Counting):
        def step(self):
            torch.cuda._sleep(4_000_000)

    eager_ns, graph_ns = step_ns(Long)
    assert graph_ns == pytest.approx(eager_ns, rel=0.02)


def test_captured_training_leaves_no_memory_behind():
    before = torch.cuda.memory_allocated()
    context = make_context(cuda_graph=True)
    done = measure(lambda: Mlp(context, hidden=256, layers=3), context, SETTINGS)
    assert median_ns(done) > 0
    assert done.peak_mem_allocated_bytes > 0
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_step_that_waits_for_devices_is_refused():
    # In a process of its own: a broken capture leaves the random generator of the device captured.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        told = pool.submit(refusal_of_waiting).result()
    assert told.startswith("cuda_graph: a step of workload Waiting cannot")
    assert "\n" not in told


def refusal_of_waiting():
    context = make_context(cuda_graph=True)
    with pytest.raises(UsageError) as told:
        measured(Waiting(context), context)
    return str(told.value)
