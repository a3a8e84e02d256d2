"""Linear layers whose products are in float8, by torchao: `precision: float8`.

As torchtitan trains: inputs, weights and gradients are scaled by the largest number of each tensor
(torchao's recipe `tensorwise`), and what leaves a product is in bf16. Loads neither torch nor
torchao where `plan` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from raybench.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

# Of CUDA devices whose tensor cores have products in 8 bits: Ada, Hopper, and later ones.
_LEAST_CAPABILITY = (8, 9)


def float8_refusals(tp: int) -> Iterator[str]:
    """Why a model cannot be trained in float8 by so many ranks to a product, a sentence each."""
    if find_spec("torchao") is None:
        yield "precision float8 needs torchao: pip install 'raybench[float8]'; or take bf16"
    if tp > 1:
        yield f"precision float8 is not divided by tp; take dp_shard, or bf16, given tp {tp}"


def convert_linear_layers(model: nn.Module, device: torch.device, *, emulate: bool = False) -> None:
    """Let the products of all linear layers of the model be in float8; in place.

    Nothing on the meta device. emulate: in fp32, of numbers rounded to float8, on any device.
    Raises UsageError on a device that has no products in float8, and without a torchao that loads.
    """
    if device.type == "meta":
        return
    if not emulate and (reason := _why_no_float8(device)):
        raise UsageError(f"precision float8 needs {reason}; take bf16")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(f"precision float8: torchao cannot be imported: {error}") from error

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate))


def _why_no_float8(device: torch.device) -> str:
    """Name what is needed and what is there; empty where it suffices."""
    import torch

    needed = "a CUDA device of compute capability 8.9 or later"
    if device.type != "cuda":
        return f"{needed}, given a CPU"
    found = torch.cuda.get_device_capability(device)
    if found >= _LEAST_CAPABILITY:
        return ""
    return f"{needed}, given {torch.cuda.get_device_name(device)} of {found[0]}.{found[1]}"
