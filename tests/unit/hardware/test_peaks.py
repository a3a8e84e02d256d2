"""Datasheet peaks by device and math mode."""

import pytest

from raybench.hardware.peaks import dense_peak_tflops
from raybench.job.point import Precision


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "bf16"),
    [
        ("NVIDIA H200", 67.0, 494.5, 989.5),
        ("NVIDIA H200 NVL", 60.0, 417.5, 835.5),
        ("NVIDIA H100 80GB HBM3", 66.9, 494.7, 989.4),
        ("NVIDIA H100 PCIe", 51.2, 378.0, 756.0),
        ("NVIDIA A100-SXM4-80GB", 19.5, 156.0, 312.0),
        ("A100-SXM4-40GB", 19.5, 156.0, 312.0),  # as drivers before 460 call it
        ("NVIDIA B200", None, 1125.0, 2250.0),
        ("AMD Instinct MI355X", 157.3, None, 2516.6),
        ("Tesla V100-SXM2-16GB", 15.7, None, None),
        # A name that is only similar may be another card, or a slice of one.
        ("NVIDIA H100", None, None, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, None, None),
        ("NVIDIA A10G", None, None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("Intel(R) Xeon(R)", None, None, None),
        ("", None, None, None),
    ],
)
def test_each_form_factor_has_its_own_dense_peaks_and_an_unknown_device_none(
    name, fp32, tf32, bf16
):
    asked = [dense_peak_tflops(name, p) for p in (Precision.FP32, Precision.TF32, Precision.BF16)]
    assert asked == [fp32, tf32, bf16]


def test_a_device_without_units_for_a_precision_has_no_peak_in_it():
    assert dense_peak_tflops("Tesla V100-SXM2-16GB", Precision.FP16) == 125.0
    assert dense_peak_tflops("NVIDIA H100 PCIe", Precision.FLOAT8) == 1513.0
    assert dense_peak_tflops("NVIDIA A100-SXM4-80GB", Precision.FLOAT8) is None
