"""Scripts as their libraries' documentation has users write them, and how a test runs them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raybench.job.model import Measure
from raybench.job.point import SCRIPT
from raybench.records.task import Task
from tests.unit.builders import unscaled_point

FOLDER = Path(__file__).with_name("scripts")
# File -> the packages that it needs beside torch.
SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "ddp.py": (),
    "scaler.py": (),
    "fsdp.py": (),
    "nanogpt.py": (),
    "hf_trainer.py": ("transformers", "accelerate"),
    "hf_accelerate.py": ("accelerate",),
    "lightning_fit.py": ("pytorch_lightning",),
}


def make_task(name: str, world_size: int = 1, args: str = "", **measure: Any) -> Task:
    """A point of the script; skips the test where its packages are not installed."""
    for package in SCRIPTS.get(name, ()):
        pytest.importorskip(package)
    params = {"path": str(FOLDER / name), "args": args, "items_per_step": "4 * 2", "step_of": ""}
    point = unscaled_point(SCRIPT, world_size, **params)
    settings = {"warmup": 10, "iterations": 30, "timeout_s": 120, **measure}
    return Task(point=point, settings=Measure.model_validate(settings), precisions=None)
