"""A point: one combination of axis values, and what identifies it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Scalar = str | int | float | bool
# The settings of a point that are not its workload's parameters.
BATCH_SIZES = ("batch_size", "global_batch_size")
RUN_SETTINGS = ("world_size", "precision", "cuda_graph", *BATCH_SIZES)


class Precision(StrEnum):
    """The number format that the heavy arithmetic uses.

    fp32: IEEE single precision, TF32 off everywhere. tf32: TF32 in matmul and convolution.
    fp16: autocast to half with gradient scaling. bf16: autocast to bfloat16.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of axis values: everything that defines what is timed.

    params: the workload's parameters, defaults included, in the order of their names.
    batch_size: per device and forward pass. global_batch_size = batch_size x world_size x
    the workload's `grad_accumulation` (1 where it has none): items per optimizer step.
    scaling: weak when the job fixes batch_size, strong when it fixes global_batch_size.
    These three are None for a workload that takes no batch size.
    cuda_graph: steps are captured in a CUDA graph and replayed.
    """

    workload: str
    params: Mapping[str, Scalar]
    world_size: int
    precision: Precision
    cuda_graph: bool = False
    batch_size: int | None
    global_batch_size: int | None
    scaling: Literal["weak", "strong"] | None

    @property
    def point_id(self) -> str:
        """Twelve hex digits that stay the same as long as what is timed stays the same."""
        meaning: dict[str, object] = {
            "workload": self.workload,
            "params": dict(self.params),
            "world_size": self.world_size,
            "precision": self.precision.value,
            "batch_size": self.batch_size,
        }
        if self.cuda_graph:
            # Only then: the points of older runs keep their ids.
            meaning["cuda_graph"] = True
        text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()

    @property
    def settings(self) -> dict[str, Scalar]:
        """All that it has by name, as tables and filters use it."""
        batch = {
            "batch_size": self.batch_size,
            "global_batch_size": self.global_batch_size,
            "scaling": self.scaling,
        }
        return {
            "world_size": self.world_size,
            "precision": self.precision.value,
            "cuda_graph": self.cuda_graph,
            **{name: value for name, value in batch.items() if value is not None},
            **self.params,
        }

    @property
    def settings_as_given(self) -> dict[str, Scalar]:
        """`settings` without the batch size that follows from the one that the job fixes."""
        derived = "global_batch_size" if self.scaling == "weak" else "batch_size"
        return {name: value for name, value in self.settings.items() if name != derived}

    @property
    def grad_accumulation(self) -> int:
        """Forward passes per optimizer step."""
        return int(self.params.get("grad_accumulation", 1))
