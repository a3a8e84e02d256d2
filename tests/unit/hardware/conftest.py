"""What every test of devices needs."""

from collections.abc import Iterator

import pytest

from raybench.hardware import nvml


@pytest.fixture(autouse=True)
def _nvml_is_opened_anew() -> Iterator[None]:
    yield
    nvml._is_open.cache_clear()
