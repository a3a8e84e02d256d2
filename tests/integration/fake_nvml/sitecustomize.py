"""With FAKE_GPUS set, CPU workers that are started with this folder first say that they own a GPU.

Worker 0 has the first GPU, `GPU-00000000`, and is on the list of its processes. FAKE_GPU_NAME is
the model of all GPUs. Where FAKE_CONDITIONS is set too, workers read the counters of a GPU.
"""

import os
import sys
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

_MODULE = "raybench.hardware.devices"


class _Hook(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_replace(module):
            execute(module)
            describe = module.describe_device

            def describe_gpu(device, index, **place):
                uuid = f"GPU-{index:08}"
                with Path(os.environ["FAKE_GPUS"], uuid).open("a") as processes:
                    processes.write(f"{os.getpid()}\n")
                worker = describe(device, index, **place)
                name = os.environ.get("FAKE_GPU_NAME", "a made-up GPU")
                return replace(worker, kind="cuda", uuid=uuid, name=name)

            class CountersOfGpu(module.Counters):
                def __init__(self, device):
                    super().__init__(device)
                    # All GPUs count the same.
                    self._handle = module.nvml.device("GPU-00000000")

            module.describe_device = describe_gpu
            if "FAKE_CONDITIONS" in os.environ:
                module.Counters = CountersOfGpu

        spec.loader.exec_module = execute_and_replace
        return spec


if os.environ.get("FAKE_GPUS"):
    sys.meta_path.insert(0, _Hook())
