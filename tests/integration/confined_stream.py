"""A CUDA stream that has some of the multiprocessors of a device."""

from typing import Any

_kept: list[Any] = []


def make_confined_stream(index: int, sms: int) -> Any:
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
