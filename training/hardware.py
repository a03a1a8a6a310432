"""Peak arithmetic rates of GPUs, the denominator of MFU. Torch-free: the plan uses it.

All figures are dense: vendors like to print twice as much, with structured sparsity, which training does not use.
float32 is the rate without TF32. For 16-bit types it is the tensor or matrix unit with float32 accumulation, which is
what torch runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TABLE_DATE = "2026-11-30"  # when the figures were last compared with the sources


@dataclass(frozen=True)
class PeakRate:
    """Dense peak FLOP/s of one device as torch counts devices; 0 where the device cannot compute in that type."""

    bf16: float
    fp16: float
    fp32: float
    source: str


_T = 1e12

# Keys are looked for in the device name that the driver reports, upper case; the longest key that occurs wins.
PEAK_RATES: dict[str, PeakRate] = {
    "V100-PCIE": PeakRate(0.0, 112 * _T, 14.0 * _T, "NVIDIA V100 datasheet, PCIe column"),
    "V100": PeakRate(0.0, 125 * _T, 15.7 * _T, "NVIDIA V100 datasheet, SXM2 column"),
    "T4": PeakRate(0.0, 65 * _T, 8.1 * _T, "NVIDIA T4 datasheet"),
    "A100": PeakRate(312 * _T, 312 * _T, 19.5 * _T, "NVIDIA A100 datasheet; the same for 40 and 80 GB, SXM and PCIe"),
    "A800": PeakRate(312 * _T, 312 * _T, 19.5 * _T, "NVIDIA A800 datasheet"),
    "A10": PeakRate(125 * _T, 125 * _T, 31.2 * _T, "NVIDIA A10 datasheet"),
    "A10G": PeakRate(70 * _T, 70 * _T, 31.2 * _T, "NVIDIA A10G datasheet (AWS G5)"),
    "A30": PeakRate(165 * _T, 165 * _T, 10.3 * _T, "NVIDIA A30 datasheet"),
    "A40": PeakRate(149.7 * _T, 149.7 * _T, 37.4 * _T, "NVIDIA A40 datasheet"),
    "RTX A6000": PeakRate(154.8 * _T, 154.8 * _T, 38.7 * _T, "NVIDIA GA102 whitepaper"),
    "L4": PeakRate(121 * _T, 121 * _T, 30.3 * _T, "NVIDIA L4 datasheet, half of the sparse figure"),
    "L40": PeakRate(181 * _T, 181 * _T, 90.5 * _T, "NVIDIA L40 datasheet"),
    "L40S": PeakRate(362 * _T, 362 * _T, 91.6 * _T, "NVIDIA L40S datasheet"),
    "RTX 3090": PeakRate(71 * _T, 71 * _T, 35.6 * _T, "NVIDIA GA102 whitepaper, float32 accumulation"),
    "RTX 4090": PeakRate(165.2 * _T, 165.2 * _T, 82.6 * _T, "NVIDIA AD102 whitepaper, float32 accumulation"),
    "RTX 5090": PeakRate(209.5 * _T, 209.5 * _T, 104.8 * _T, "NVIDIA GB202 whitepaper, float32 accumulation"),
    "H100 PCIE": PeakRate(756 * _T, 756 * _T, 51 * _T, "NVIDIA H100 datasheet, PCIe, half of the sparse figure"),
    "H100 NVL": PeakRate(835 * _T, 835 * _T, 60 * _T, "NVIDIA H100 datasheet, NVL, half of the sparse figure"),
    "H100": PeakRate(989 * _T, 989 * _T, 67 * _T, "NVIDIA H100 datasheet, SXM5, half of the sparse figure"),
    "H800": PeakRate(989 * _T, 989 * _T, 67 * _T, "NVIDIA H800 datasheet, SXM5"),
    "GH200": PeakRate(989 * _T, 989 * _T, 67 * _T, "NVIDIA GH200 datasheet"),
    "H200 NVL": PeakRate(835 * _T, 835 * _T, 60 * _T, "NVIDIA H200 datasheet, NVL, half of the sparse figure"),
    "H200": PeakRate(989 * _T, 989 * _T, 67 * _T, "NVIDIA H200 datasheet, SXM, half of the sparse figure"),
    "H20": PeakRate(148 * _T, 148 * _T, 44 * _T, "NVIDIA H20 datasheet"),
    "B200": PeakRate(2250 * _T, 2250 * _T, 75 * _T, "NVIDIA HGX B200 datasheet, an eighth of the board"),
    "GB200": PeakRate(2500 * _T, 2500 * _T, 80 * _T, "NVIDIA GB200 NVL72 datasheet, a GPU"),
    "B300": PeakRate(2250 * _T, 2250 * _T, 75 * _T, "NVIDIA HGX B300 datasheet, an eighth of the board"),
    "GB300": PeakRate(2500 * _T, 2500 * _T, 80 * _T, "NVIDIA GB300 NVL72 datasheet, a GPU"),
    # MI250(X) cards hold two dies, each a device of its own for torch: half of the card's figure.
    "MI250X": PeakRate(191.5 * _T, 191.5 * _T, 23.95 * _T, "AMD Instinct MI250X datasheet, half a card"),
    "MI250": PeakRate(181.05 * _T, 181.05 * _T, 22.65 * _T, "AMD Instinct MI250 datasheet, half a card"),
    "MI300X": PeakRate(1307.4 * _T, 1307.4 * _T, 163.4 * _T, "AMD Instinct MI300X datasheet"),
    "MI325X": PeakRate(1307.4 * _T, 1307.4 * _T, 163.4 * _T, "AMD Instinct MI325X datasheet"),
    "MI350X": PeakRate(2300 * _T, 2300 * _T, 144.2 * _T, "AMD Instinct MI350X datasheet"),
    "MI355X": PeakRate(2500 * _T, 2500 * _T, 157.3 * _T, "AMD Instinct MI355X datasheet"),
}


def peak_flop_per_s(device_name: str, precision: str) -> float | None:
    """Returns the dense peak of the named device in "bf16", "fp16" or "fp32".

    None if the device is not in the table or has no arithmetic of that type: MFU is then unknown, not zero. Slower
    variants that share a name (laptop chips, the 4090 D) are unknown too, rather than guessed.
    """
    words = _words(device_name)
    matches = [key for key in PEAK_RATES if _contains(words, _words(key))]
    if not matches or not {"LAPTOP", "D"}.isdisjoint(words):
        return None
    rate: float = getattr(PEAK_RATES[max(matches, key=len)], precision)
    return rate or None


def _words(name: str) -> list[str]:
    return re.split(r"[\s/_-]+", name.upper().strip())


def _contains(words: list[str], part: list[str]) -> bool:
    """Whether `part` occurs in `words` in order; other words may stand between (H100 80GB HBM3 PCIe)."""
    rest = iter(words)
    return all(word in rest for word in part)
