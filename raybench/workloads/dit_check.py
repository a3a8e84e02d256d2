"""Whether the workload `dit`, divided over ranks, computes what it computes undivided."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from raybench.job.point import Precision
from raybench.workloads.dit_steps import Steps, Tokens
from raybench.workloads.sequence_parallel import form_groups

# Tokens of the copy for each rank: of the image, and of the text.
_ROWS, _COLUMNS, _TEXT = 2, 8, 8
# Of queries and keys: a token attends to few others. With all alike attention is next to the mean
# of all tokens, and a wrong one could not be told from a right one.
_NORM = 2.0
_GAIN = 1.5
# Of what the copy computes. Two ranks on a CPU differ from the whole by 3e-7 (fp32) and 5e-3
# (bf16); a log-sum-exp to base 2 is off by 3e-2, parts merged by their mean by 0.16, the heads of
# another rank by 0.8.
TOLERANCES = {
    Precision.FP32: 1e-4,
    Precision.TF32: 1e-2,
    Precision.FP16: 1e-2,
    Precision.BF16: 2e-2,
}


def difference_to_whole(steps: Steps) -> float:
    """Compare the output of a copy of one block of each kind with that of the undivided copy.

    In the type, with the kernel and over the ranks of `steps`; as a share of the whole (Frobenius
    norms). 0 where nothing is divided. All ranks must call it at the same place.
    """
    ranks = steps.parallel.degree
    if ranks == 1:
        return 0.0
    copy = replace(
        steps,
        shape=replace(steps.shape, double_blocks=1, single_blocks=1),
        tokens=Tokens(
            rows=_ROWS * ranks,
            columns=_COLUMNS,
            text=_TEXT * ranks,
            split_text=steps.tokens.split_text,
        ),
        attention=steps.kernel,
        compile=False,
        fill=_fill_steeply,
    )
    undivided = replace(copy, parallel=form_groups(0, ulysses=1, ring=1))
    with torch.inference_mode():
        found, whole = (one.forward()().double() for one in (copy, undivided))
        return float((found - whole).norm() / whole.norm())


def is_finite(output: Tensor) -> bool:
    """Whether all of it are numbers."""
    return bool(output.isfinite().all())


def _fill_steeply(module: nn.Module, generator: torch.Generator | None) -> None:
    """Draw weights by which the output hangs on attention, and attention on single tokens."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            nn.init.constant_(parameter, _NORM)
        else:
            std = _GAIN / math.sqrt(parameter.shape[-1])
            nn.init.normal_(parameter, std=std, generator=generator)
