"""Dense peak rates of devices by math mode and of their memory, with their sources. Pure.

Names are exact, as `torch.cuda.get_device_name` gives them: a name that is only similar may be a
slower card (RTX 4090 D, A10G) or a slice of one (MIG). Figures are the makers', without sparsity;
where only the figure with 2:4 sparsity is published, it is halved.
"""

from __future__ import annotations

# By name GB/s of the memory, None where it is unknown or one name covers cards of several
# bandwidths (GH200, B200 boards); and TFLOP/s of fp32, tf32, fp16, bf16, float8: fp32 outside the
# tensor cores, fp16, bf16 and float8 accumulated in fp32, as torch does. None: the device has no
# such mode, or its maker has published more than one figure. Above each row is its source.
_DATASHEETS: tuple[tuple[dict[str, float | None], tuple[float | None, ...]], ...] = (
    # NVIDIA Tesla V100 whitepaper.
    (
        {"Tesla V100-SXM2-16GB": 900.0, "Tesla V100-SXM2-32GB": 900.0},
        (15.7, None, 125.0, None, None),
    ),
    # NVIDIA V100 datasheet, PCIe.
    ({"Tesla V100-PCIE-16GB": None, "Tesla V100-PCIE-32GB": None}, (14.0, None, 112.0, None, None)),
    # NVIDIA V100 datasheet, V100S PCIe.
    ({"Tesla V100S-PCIE-32GB": None}, (16.4, None, 130.0, None, None)),
    # NVIDIA T4 datasheet.
    ({"Tesla T4": None}, (8.1, None, 65.0, None, None)),
    # NVIDIA A100 and A800 datasheets, the same for SXM and PCIe. The A800 is made for China: the
    # same chip, with 400 GB/s of NVLink instead of 600.
    (
        {
            "A100-SXM4-40GB": 1555.0,
            "A100-SXM4-80GB": 2039.0,
            "A100-PCIE-40GB": 1555.0,
            "A100-PCIE-80GB": None,
            "A100 80GB PCIe": 1935.0,
            "A800-SXM4-80GB": 2039.0,
            "A800 80GB PCIe": 1935.0,
        },
        (19.5, 156.0, 312.0, 312.0, None),
    ),
    # NVIDIA A10 datasheet.
    ({"A10": 600.0}, (31.2, 62.5, 125.0, 125.0, None)),
    # NVIDIA A30 datasheet.
    ({"A30": 933.0}, (10.3, 82.0, 165.0, 165.0, None)),
    # NVIDIA A40 datasheet.
    ({"A40": 696.0}, (37.4, 74.8, 149.7, 149.7, None)),
    # NVIDIA Ampere GA102 whitepaper.
    ({"RTX A6000": 768.0}, (38.7, 77.4, 154.8, 154.8, None)),
    # NVIDIA Ampere GA102 whitepaper, fp32 accumulate.
    ({"GeForce RTX 3090": 936.0}, (35.6, 35.6, 71.0, 71.0, None)),
    # NVIDIA L4 datasheet, halved. The L4's datasheet gives 120 (TF32) and 242 (fp16), but with
    # sparsity: its footnote says so.
    ({"L4": 300.0}, (30.3, 60.0, 121.0, 121.0, 242.5)),
    # NVIDIA L40 datasheet.
    ({"L40": 864.0}, (90.5, 90.5, 181.05, 181.05, 362.0)),
    # NVIDIA L40S datasheet.
    ({"L40S": 864.0}, (91.6, 183.0, 362.05, 362.05, 733.0)),
    # NVIDIA Ada GPU architecture whitepaper, professional cards.
    ({"RTX 6000 Ada Generation": 960.0}, (91.1, 182.1, 364.2, 364.2, None)),
    # NVIDIA Ada GPU architecture whitepaper, fp32 accumulate. With fp16 accumulate it reaches
    # 330.3, which torch's products do not use.
    ({"GeForce RTX 4090": 1008.0}, (82.6, 82.6, 165.2, 165.2, None)),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, fp32 accumulate. 838 with sparsity and fp16
    # accumulate, which torch's products do not use: a quarter of it.
    ({"GeForce RTX 5090": 1792.0}, (104.8, 104.8, 209.5, 209.5, None)),
    # NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet. Its tensor rates are quoted in
    # TOPS of FP4 only, and the Server and Max-Q editions are slower.
    ({"RTX PRO 6000 Blackwell Workstation Edition": 1792.0}, (125.0, None, None, None, None)),
    # NVIDIA H100 whitepaper, SXM5; H800 datasheet, SXM. The H800 has less NVLink and FP64 than the
    # H100, and the same arithmetic otherwise.
    ({"H100 80GB HBM3": 3350.0, "H800": 3350.0}, (66.9, 494.7, 989.4, 989.4, 1978.9)),
    # NVIDIA H100 whitepaper, PCIe; H800 datasheet, PCIe.
    ({"H100 PCIe": 2000.0, "H800 PCIe": 2000.0}, (51.2, 378.0, 756.0, 756.0, 1513.0)),
    # NVIDIA H20 datasheet, dense.
    ({"H20": 4000.0}, (44.0, 74.0, 148.0, 148.0, 296.0)),
    # NVIDIA H100 and H200 datasheets, NVL, halved.
    ({"H100 NVL": None, "H200 NVL": 4800.0}, (60.0, 417.5, 835.5, 835.5, 1670.5)),
    # NVIDIA H200 datasheet, SXM, halved.
    ({"H200": 4800.0}, (67.0, 494.5, 989.5, 989.5, 1979.0)),
    # NVIDIA GH200 Grace Hopper datasheet.
    (
        {"GH200 480GB": None, "GH200 120GB": None, "GH200 144G HBM3e": None},
        (67.0, 494.0, 990.0, 990.0, 1979.0),
    ),
    # NVIDIA Blackwell datasheet, HGX B200, halved. fp32 of the B200: 80 in the first datasheet, 75
    # in the later ones for HGX boards.
    ({"B200": None}, (None, 1125.0, 2250.0, 2250.0, 4500.0)),
    # NVIDIA HGX B300 datasheet, an eighth of the board, halved.
    ({"B300": None, "B300 SXM6 AC": None}, (75.0, 1125.0, 2250.0, 2250.0, None)),
    # NVIDIA GB200 NVL72 datasheet, halved.
    ({"GB200": None}, (80.0, 1250.0, 2500.0, 2500.0, 5000.0)),
    # AMD Instinct MI300X and MI325X data sheets.
    (
        {"AMD Instinct MI300X": 5300.0, "AMD Instinct MI325X": 6000.0},
        (163.4, 653.7, 1307.4, 1307.4, None),
    ),
    # AMD Instinct MI355X data sheet. CDNA 4 has no units for TF32.
    ({"AMD Instinct MI355X": 8000.0}, (157.3, None, 2516.6, 2516.6, None)),
)
_MODES = ("fp32", "tf32", "fp16", "bf16", "float8")
_TFLOPS = {
    name: dict(zip(_MODES, rates, strict=True)) for names, rates in _DATASHEETS for name in names
}
_MEMORY_GB_S = {name: rate for names, _ in _DATASHEETS for name, rate in names.items()}


def dense_peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the peak without sparsity on the datasheet, in TFLOP/s.

    None for a device or a precision that is not in the table.
    device_name: as `torch.cuda.get_device_name` gives it. precision: as in job files.
    """
    # Drivers before 460 or so leave the maker out.
    return _TFLOPS.get(device_name.removeprefix("NVIDIA "), {}).get(precision)


def memory_peak_gb_s(device_name: str) -> float | None:
    """Return the bandwidth of the device's memory on its datasheet; None where it is unknown."""
    return _MEMORY_GB_S.get(device_name.removeprefix("NVIDIA "))
