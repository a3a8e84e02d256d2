"""Faults for a health check that are injected by a workload in the place of a built-in one."""

from typing import Any

from raybench.workloads.base import Context
from raybench.workloads.kernels import Gemm, SameBits

FLIPPED_BITS = f"{__name__}:FlippedBits"
FEW_SMS = f"{__name__}:FewSms"
_streams: dict[tuple[int, int], Any] = {}
_kept: list[Any] = []


class FlippedBits(SameBits):
    """The last rank flips one bit of every product."""

    def __init__(self, context: Context, *, size: int = 256) -> None:
        super().__init__(context, size=size)
        self._is_faulty = context.rank == context.world_size - 1

    def step(self) -> None:
        import torch

        super().step()
        if self._is_faulty:
            self.product.view(torch.int32)[3, 4] ^= 1


class FewSms(Gemm):
    """The last rank multiplies on `sms` of the multiprocessors of its device."""

    def __init__(
        self, context: Context, *, m: int = 8192, n: int = 8192, k: int = 8192, sms: int = 99
    ) -> None:
        super().__init__(context, m=m, n=n, k=k)
        self._confined = None
        if context.rank == context.world_size - 1:
            # One for the life of the process, as a context takes memory.
            key = (context.device.index, sms)
            if key not in _streams:
                _streams[key] = _make_confined_stream(*key)
            self._confined = _streams[key]

    def step(self) -> None:
        import torch

        if self._confined is None:
            super().step()
            return
        current = torch.cuda.current_stream()
        self._confined.wait_stream(current)
        with torch.cuda.stream(self._confined):
            super().step()
        current.wait_stream(self._confined)


def _make_confined_stream(index: int, sms: int) -> Any:
    """A stream of a green context of so many multiprocessors, or the next more that it may have.

    torch's own green contexts must be current while work is issued, and every switch of the device
    ends that. Here the primary context stays current.
    """
    import torch
    from cuda.bindings import driver

    def checked(answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        assert error == driver.CUresult.CUDA_SUCCESS, error
        return values[0]

    device = checked(driver.cuDeviceGet(index))
    whole = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    resource = checked(driver.cuDeviceGetDevResource(device, whole))
    [part, *_] = checked(driver.cuDevSmResourceSplitByCount(1, resource, 0, sms))
    description = checked(driver.cuDevResourceGenerateDesc([part], 1))
    usual = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = checked(driver.cuGreenCtxCreate(description, device, usual))
    by_itself = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = checked(driver.cuGreenCtxStreamCreate(green, by_itself, 0))
    _kept.append(green)
    return torch.cuda.ExternalStream(int(stream), torch.device("cuda", index))
