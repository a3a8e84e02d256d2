"""Datasheet peaks by device and math mode."""

from __future__ import annotations

import pytest

from raybench.hardware import peaks
from raybench.hardware.peaks import dense_peak_tflops
from raybench.job.point import Precision


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "bf16"),
    [
        ("NVIDIA H200", 67.0, 494.5, 989.5),
        ("NVIDIA H200 NVL", 60.0, 417.5, 835.5),
        ("NVIDIA H100 80GB HBM3", 66.9, 494.7, 989.4),
        ("NVIDIA H100 PCIe", 51.2, 378.0, 756.0),
        ("NVIDIA H100 NVL", 60.0, 417.5, 835.5),
        ("NVIDIA GH200 480GB", 67.0, 494.0, 990.0),
        ("NVIDIA A100-SXM4-80GB", 19.5, 156.0, 312.0),
        ("A100-SXM4-40GB", 19.5, 156.0, 312.0),
        ("NVIDIA A100-PCIE-40GB", 19.5, 156.0, 312.0),
        ("NVIDIA A10", 31.2, 62.5, 125.0),
        ("NVIDIA L4", 30.3, 60.0, 121.0),
        ("NVIDIA L40", 90.5, 90.5, 181.05),
        ("NVIDIA L40S", 91.6, 183.0, 362.05),
        ("NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2),
        ("NVIDIA B200", None, 1125.0, 2250.0),
        ("NVIDIA GB200", 80.0, 1250.0, 2500.0),
        ("AMD Instinct MI300X", 163.4, 653.7, 1307.4),
        ("AMD Instinct MI325X", 163.4, 653.7, 1307.4),
        ("AMD Instinct MI355X", 157.3, None, 2516.6),
        ("NVIDIA B300 SXM6 AC", 75.0, 1125.0, 2250.0),
        ("NVIDIA H20", 44.0, 74.0, 148.0),
        ("NVIDIA H800", 66.9, 494.7, 989.4),
        ("NVIDIA A800-SXM4-80GB", 19.5, 156.0, 312.0),
        ("NVIDIA GeForce RTX 5090", 104.8, 104.8, 209.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 125.0, None, None),
    ],
)
def test_each_form_factor_has_its_own_dense_peaks(name, fp32, tf32, bf16):
    asked = [dense_peak_tflops(name, p) for p in (Precision.FP32, Precision.TF32, Precision.BF16)]
    assert asked == [fp32, tf32, bf16]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla V100-SXM3-32GB",
        "GRID A100-40C",
        "Intel(R) Xeon(R)",
        "",
    ],
)
def test_a_device_whose_name_is_only_similar_gets_no_peak(name):
    assert all(dense_peak_tflops(name, precision) is None for precision in Precision)


def test_a_device_without_units_for_a_precision_has_no_peak_in_it():
    assert dense_peak_tflops("Tesla V100-SXM2-16GB", Precision.FP16) == 125.0
    assert dense_peak_tflops("Tesla V100-SXM2-16GB", Precision.BF16) is None
    assert dense_peak_tflops("Tesla V100-SXM2-16GB", Precision.TF32) is None
    assert dense_peak_tflops("NVIDIA H100 PCIe", Precision.FLOAT8) == 1513.0
    assert dense_peak_tflops("NVIDIA A100-SXM4-80GB", Precision.FLOAT8) is None


def test_every_row_names_its_source_and_no_device_has_two():
    assert all(row.source and row.names for row in peaks._TABLE)
    names = [name for row in peaks._TABLE for name in row.names]
    assert len(names) == len(set(names))
    assert not any(name.startswith("NVIDIA ") for name in names)
