"""Dense peak rates of devices by math mode and of their memory, with their sources. Pure.

Names are exact, as `torch.cuda.get_device_name` gives them: a name that is only similar may be a
slower card (RTX 4090 D, A10G) or a slice of one (MIG). Figures are the makers', without sparsity;
where only the figure with 2:4 sparsity is published, it is halved.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peaks:
    """TFLOP/s of devices that share a row of a datasheet.

    None: the device has no such mode, or its maker has published more than one figure.
    fp32: outside the tensor cores. fp16, bf16, float8: accumulated in fp32, as torch does.
    """

    names: tuple[str, ...]
    fp32: float | None
    tf32: float | None
    fp16: float | None
    bf16: float | None
    source: str
    float8: float | None = None


_TABLE = (
    _Peaks(
        names=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        fp32=15.7,
        tf32=None,
        fp16=125.0,
        bf16=None,
        source="NVIDIA Tesla V100 whitepaper",
    ),
    _Peaks(
        names=("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"),
        fp32=14.0,
        tf32=None,
        fp16=112.0,
        bf16=None,
        source="NVIDIA V100 datasheet, PCIe",
    ),
    _Peaks(
        names=("Tesla V100S-PCIE-32GB",),
        fp32=16.4,
        tf32=None,
        fp16=130.0,
        bf16=None,
        source="NVIDIA V100 datasheet, V100S PCIe",
    ),
    _Peaks(
        names=("Tesla T4",),
        fp32=8.1,
        tf32=None,
        fp16=65.0,
        bf16=None,
        source="NVIDIA T4 datasheet",
    ),
    _Peaks(
        names=(
            "A100-SXM4-40GB",
            "A100-SXM4-80GB",
            "A100-PCIE-40GB",
            "A100-PCIE-80GB",
            "A100 80GB PCIe",
            # Made for China: the same chip, with 400 GB/s of NVLink instead of 600.
            "A800-SXM4-80GB",
            "A800 80GB PCIe",
        ),
        fp32=19.5,
        tf32=156.0,
        fp16=312.0,
        bf16=312.0,
        source="NVIDIA A100 and A800 datasheets, the same for SXM and PCIe",
    ),
    _Peaks(
        names=("A10",),
        fp32=31.2,
        tf32=62.5,
        fp16=125.0,
        bf16=125.0,
        source="NVIDIA A10 datasheet",
    ),
    _Peaks(
        names=("A30",),
        fp32=10.3,
        tf32=82.0,
        fp16=165.0,
        bf16=165.0,
        source="NVIDIA A30 datasheet",
    ),
    _Peaks(
        names=("A40",),
        fp32=37.4,
        tf32=74.8,
        fp16=149.7,
        bf16=149.7,
        source="NVIDIA A40 datasheet",
    ),
    _Peaks(
        names=("RTX A6000",),
        fp32=38.7,
        tf32=77.4,
        fp16=154.8,
        bf16=154.8,
        source="NVIDIA Ampere GA102 whitepaper",
    ),
    _Peaks(
        names=("GeForce RTX 3090",),
        fp32=35.6,
        tf32=35.6,
        fp16=71.0,
        bf16=71.0,
        source="NVIDIA Ampere GA102 whitepaper, fp32 accumulate",
    ),
    # The L4's datasheet gives 120 (TF32) and 242 (fp16), but with sparsity: its footnote says so.
    _Peaks(
        names=("L4",),
        fp32=30.3,
        tf32=60.0,
        fp16=121.0,
        bf16=121.0,
        source="NVIDIA L4 datasheet, halved",
        float8=242.5,
    ),
    _Peaks(
        names=("L40",),
        fp32=90.5,
        tf32=90.5,
        fp16=181.05,
        bf16=181.05,
        source="NVIDIA L40 datasheet",
        float8=362.0,
    ),
    _Peaks(
        names=("L40S",),
        fp32=91.6,
        tf32=183.0,
        fp16=362.05,
        bf16=362.05,
        source="NVIDIA L40S datasheet",
        float8=733.0,
    ),
    _Peaks(
        names=("RTX 6000 Ada Generation",),
        fp32=91.1,
        tf32=182.1,
        fp16=364.2,
        bf16=364.2,
        source="NVIDIA Ada GPU architecture whitepaper, professional cards",
    ),
    # With fp16 accumulate it reaches 330.3, which torch's products do not use.
    _Peaks(
        names=("GeForce RTX 4090",),
        fp32=82.6,
        tf32=82.6,
        fp16=165.2,
        bf16=165.2,
        source="NVIDIA Ada GPU architecture whitepaper, fp32 accumulate",
    ),
    # 838 with sparsity and fp16 accumulate, which torch's products do not use: a quarter of it.
    _Peaks(
        names=("GeForce RTX 5090",),
        fp32=104.8,
        tf32=104.8,
        fp16=209.5,
        bf16=209.5,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper, fp32 accumulate",
    ),
    # Its tensor rates are quoted in TOPS of FP4 only, and the Server and Max-Q editions are slower.
    _Peaks(
        names=("RTX PRO 6000 Blackwell Workstation Edition",),
        fp32=125.0,
        tf32=None,
        fp16=None,
        bf16=None,
        source="NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet",
    ),
    # The H800 has less NVLink and FP64 than the H100, and the same arithmetic otherwise.
    _Peaks(
        names=("H100 80GB HBM3", "H800"),
        fp32=66.9,
        tf32=494.7,
        fp16=989.4,
        bf16=989.4,
        source="NVIDIA H100 whitepaper, SXM5; H800 datasheet, SXM",
        float8=1978.9,
    ),
    _Peaks(
        names=("H100 PCIe", "H800 PCIe"),
        fp32=51.2,
        tf32=378.0,
        fp16=756.0,
        bf16=756.0,
        source="NVIDIA H100 whitepaper, PCIe; H800 datasheet, PCIe",
        float8=1513.0,
    ),
    _Peaks(
        names=("H20",),
        fp32=44.0,
        tf32=74.0,
        fp16=148.0,
        bf16=148.0,
        source="NVIDIA H20 datasheet, dense",
        float8=296.0,
    ),
    _Peaks(
        names=("H100 NVL", "H200 NVL"),
        fp32=60.0,
        tf32=417.5,
        fp16=835.5,
        bf16=835.5,
        source="NVIDIA H100 and H200 datasheets, NVL, halved",
        float8=1670.5,
    ),
    _Peaks(
        names=("H200",),
        fp32=67.0,
        tf32=494.5,
        fp16=989.5,
        bf16=989.5,
        source="NVIDIA H200 datasheet, SXM, halved",
        float8=1979.0,
    ),
    _Peaks(
        names=("GH200 480GB", "GH200 120GB", "GH200 144G HBM3e"),
        fp32=67.0,
        tf32=494.0,
        fp16=990.0,
        bf16=990.0,
        source="NVIDIA GH200 Grace Hopper datasheet",
        float8=1979.0,
    ),
    # fp32 of the B200: 80 in the first datasheet, 75 in the later ones for HGX boards.
    _Peaks(
        names=("B200",),
        fp32=None,
        tf32=1125.0,
        fp16=2250.0,
        bf16=2250.0,
        source="NVIDIA Blackwell datasheet, HGX B200, halved",
        float8=4500.0,
    ),
    _Peaks(
        names=("B300", "B300 SXM6 AC"),
        fp32=75.0,
        tf32=1125.0,
        fp16=2250.0,
        bf16=2250.0,
        source="NVIDIA HGX B300 datasheet, an eighth of the board, halved",
    ),
    _Peaks(
        names=("GB200",),
        fp32=80.0,
        tf32=1250.0,
        fp16=2500.0,
        bf16=2500.0,
        source="NVIDIA GB200 NVL72 datasheet, halved",
        float8=5000.0,
    ),
    _Peaks(
        names=("AMD Instinct MI300X", "AMD Instinct MI325X"),
        fp32=163.4,
        tf32=653.7,
        fp16=1307.4,
        bf16=1307.4,
        source="AMD Instinct MI300X and MI325X data sheets",
    ),
    # CDNA 4 has no units for TF32.
    _Peaks(
        names=("AMD Instinct MI355X",),
        fp32=157.3,
        tf32=None,
        fp16=2516.6,
        bf16=2516.6,
        source="AMD Instinct MI355X data sheet",
    ),
)
_BY_NAME = {name: peaks for peaks in _TABLE for name in peaks.names}


# The rates of `_Peaks`, by names of precisions.
_MODES = ("fp32", "tf32", "fp16", "bf16", "float8")


def dense_peak_tflops(device_name: str, precision: str) -> float | None:
    """Datasheet peak without sparsity in TFLOP/s.

    device_name: as `torch.cuda.get_device_name` gives it. precision: as in job files. None for a
    device that is not in the table, and for a precision that it has no units for.
    """
    # Drivers before 460 or so leave the maker out.
    peaks = _BY_NAME.get(device_name.removeprefix("NVIDIA "))
    return getattr(peaks, precision) if peaks and precision in _MODES else None


# GB/s of the memory, from the makers' datasheets named above. Where one name covers cards of
# several bandwidths (GH200, B200 boards), there is none.
_MEMORY_GB_S = {
    "Tesla V100-SXM2-16GB": 900.0,
    "Tesla V100-SXM2-32GB": 900.0,
    "A100-SXM4-40GB": 1555.0,
    "A100-PCIE-40GB": 1555.0,
    "A100-SXM4-80GB": 2039.0,
    "A100 80GB PCIe": 1935.0,
    "A800-SXM4-80GB": 2039.0,
    "A800 80GB PCIe": 1935.0,
    "A10": 600.0,
    "A30": 933.0,
    "A40": 696.0,
    "RTX A6000": 768.0,
    "GeForce RTX 3090": 936.0,
    "L4": 300.0,
    "L40": 864.0,
    "L40S": 864.0,
    "RTX 6000 Ada Generation": 960.0,
    "GeForce RTX 4090": 1008.0,
    "GeForce RTX 5090": 1792.0,
    "RTX PRO 6000 Blackwell Workstation Edition": 1792.0,
    "H100 80GB HBM3": 3350.0,
    "H100 PCIe": 2000.0,
    "H800": 3350.0,
    "H800 PCIe": 2000.0,
    "H20": 4000.0,
    "H200": 4800.0,
    "H200 NVL": 4800.0,
    "AMD Instinct MI300X": 5300.0,
    "AMD Instinct MI325X": 6000.0,
    "AMD Instinct MI355X": 8000.0,
}


def memory_peak_gb_s(device_name: str) -> float | None:
    """Bandwidth of the device's memory on its datasheet; None where the table has none."""
    return _MEMORY_GB_S.get(device_name.removeprefix("NVIDIA "))
