"""What two healthy H200s of one host have read, by the tests of the suite: nobody is to be named.

Medians of `raybench health` on two hosts, torch 2.11, November 2026. Of the first the run was not
kept; the other is health-20261122-192647-9705, where copies between host and device were a false
alarm once.
"""

import pytest
from builders import make_device

from raybench.health.readings import Reading
from raybench.health.suite import SUITE, device_subjects
from raybench.health.verdicts import judge
from raybench.records.health import Verdict

FIRST = {
    "gemm fp32 2048": (50.3, 50.3),
    "gemm fp32 8192": (51.3, 51.3),
    "gemm tf32 2048": (334, 346),
    "gemm tf32 8192": (353, 352),
    "gemm fp16 2048": (689, 671),
    "gemm fp16 8192": (643, 664),
    "gemm bf16 2048": (707, 703),
    "gemm bf16 8192": (687, 686),
    "memory 500 MB": (4330, 4332),
    "memory 1000 MB": (4355, 4357),
    "launch and wait": (14.6, 20.1),
    "launch": (6.53, 9.02),
    "same bits bf16 2048": (693, 694),
    "h2d alone": (55.2, 55.2),
    "d2h alone": (55.3, 55.2),
    "both alone": (100, 99.4),
    "both all at once": (70.9, 71.4),
    "smoke 784-256-10": (1.37, 1.39),
}
THIRD = {
    "gemm tf32 2048": (328, 335),
    "gemm fp16 8192": (657, 664),
    "gemm bf16 8192": (672, 701),
    "memory 1000 MB": (4355, 4354),
    "launch and wait": (29.6, 26.5),
    "launch": (11.3, 11.2),
    "h2d alone": (49.4, 51.0),
    "h2d all at once": (42.1, 42.0),
    "d2h alone": (55.1, 55.2),
    "both alone": (78.9, 78.3),
    "both all at once": (58.8, 58.8),
    "step compute": (5.92, 6.23),
}
DEVICES = tuple(make_device(rank, topology="NVLink x18, 1:PHB") for rank in range(2))
TESTS = {test.name: test for test in SUITE["cuda"]}


def read(values: dict[str, tuple[float, float]]) -> list[Reading]:
    return [
        Reading(test=TESTS[name], subject=subject, pass_number=number, value=value)
        for name, both in values.items()
        for subject, value in zip(device_subjects(DEVICES), both, strict=True)
        for number in (1, 2, 3)
    ]


@pytest.mark.parametrize("values", [FIRST, THIRD])
def test_two_healthy_h200s_are_healthy(values):
    assert {one.verdict for one in judge(read(values), DEVICES)} == {Verdict.HEALTHY}


def test_one_of_them_with_99_of_132_multiprocessors_is_named():
    values = FIRST | {"gemm bf16 8192": (684, 0.82 * 684)}
    ill = [one for one in judge(read(values), DEVICES) if one.verdict is not Verdict.HEALTHY]
    assert [(one.subject.name, one.test) for one in ill] == [("alpha GPU 1", "gemm bf16 8192")]
