"""Which kernel of attention torch takes, also in compiled code."""

import pytest
import torch
import torch.compiler.config
from torch.nn import functional

from raybench.measure.profiling import attention_kernels
from raybench.worker.state import settings
from raybench.workloads.attention import KernelOrAuto, use_kernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before():
    before = [(setting, setting.read()) for setting in settings()]
    yield
    for setting, value in before:
        setting.write(value)


def test_code_compiled_for_one_kernel_has_another_key_than_that_for_others():
    keys = set()
    asked: tuple[KernelOrAuto, ...] = ("auto", "flash", "math")
    for one in asked:
        use_kernel(one, CPU)
        keys.add(torch.compiler.config.cache_key_tag)
    assert len(keys) == len(asked)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
def test_a_compiled_step_runs_the_kernel_that_is_asked_for_and_not_that_of_the_cache(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tokens = torch.ones(1, 2, 16, 8)
    found = []
    for asked in ("flash", "math", "flash"):
        torch._dynamo.reset()
        use_kernel(asked, CPU)
        compiled = torch.compile(
            lambda: functional.scaled_dot_product_attention(2 * tokens, tokens, tokens)
        )
        with torch.no_grad():
            compiled()
            found.append(attention_kernels(compiled))
    # What Inductor makes of math are other operators.
    assert found == [("flash",), (), ("flash",)]
