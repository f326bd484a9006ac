"""Cost functions where nothing was measured: LLaVA-1.5-7B in float16 on a named GPU, or the shipped model on a CPU.

The numbers follow from its dimensions: CLIP ViT-L/14-336 with 23 of 24 layers, two projector layers, Vicuna-7B.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scheduler.cost import Costs, DecodeCost, EncodeCost, PrefillCost

ENCODE_FLOP = 390e9  # per image: 366 in the vision tower, 24 in the projector
ENCODER_BYTES = 649e6
DECODER_BYTES = 13.21e9  # read in every step
FLOP_PER_TOKEN = 12.96e9  # prefill of 640 tokens is 8.40 TFLOP, 0.107 of it attention
ATTENTION_FLOP = 262_144.0  # per token squared: 32 layers x 4096 x 4 / 2 (causal)
KV_BYTES_PER_TOKEN = 524_288.0  # 2 x 32 layers x 4096 x 2 bytes

ENCODE_SHARE = 0.5  # of peak: small matrices, 577 positions
PREFILL_SHARE = 0.6
DECODE_SHARE = 1.0  # the floor; the running estimate finds what is lost


@dataclass(frozen=True, slots=True)
class Peak:
    """What a GPU can do at most."""

    flop_per_s: float  # fp16 dense, tensor cores
    bytes_per_s: float
    memory_gib: int


# Data sheets of NVIDIA, fp16 dense with fp32 accumulation. The first match counts: the more special stands first.
_PEAKS = (
    (r"A100.*40GB", Peak(312e12, 1.555e12, 40)),
    (r"A100|A800", Peak(312e12, 2.04e12, 80)),
    (r"H100.*PCIe", Peak(756e12, 2.0e12, 80)),
    (r"H100.*NVL", Peak(835e12, 3.9e12, 94)),
    (r"GH200", Peak(989e12, 4.0e12, 96)),
    (r"H100|H800", Peak(989e12, 3.35e12, 80)),
    (r"H200", Peak(989e12, 4.8e12, 141)),
    (r"H20", Peak(148e12, 4.0e12, 96)),
    (r"B200|GB200", Peak(2250e12, 8.0e12, 180)),
    (r"V100.*16GB", Peak(125e12, 0.9e12, 16)),
    (r"V100", Peak(125e12, 0.9e12, 32)),
    (r"A30", Peak(165e12, 0.933e12, 24)),
    (r"A10", Peak(125e12, 0.6e12, 24)),
    (r"A40|RTX A6000", Peak(150e12, 0.696e12, 48)),
    (r"L40S", Peak(362e12, 0.864e12, 48)),
    (r"L40", Peak(181e12, 0.864e12, 48)),
    (r"L4", Peak(121e12, 0.3e12, 24)),
    (r"T4", Peak(65e12, 0.32e12, 16)),
    (r"RTX 4090", Peak(165e12, 1.008e12, 24)),
    (r"RTX 3090", Peak(71e12, 0.936e12, 24)),
)

UNKNOWN_GPU = Peak(65e12, 0.32e12, 16)
"""A T4: the slowest in the list, so that nothing is promised that an unknown GPU cannot keep."""

CPU = Costs(
    # The shipped checkpoint (4 layers of width 128 and 192) with one thread per stage, rounded up from what two
    # cores of a shared virtual machine (Intel Xeon, AVX-512) did; a real model is slower by orders of magnitude,
    # and the running estimate or a measurement says by how much.
    encode=EncodeCost(batch_s=0.005, image_s=0.040),
    prefill=PrefillCost(start_s=0.005, token_s=60e-6, token_squared_s=10e-9),
    decode=DecodeCost(
        step_s=0.002,
        weight_bytes=8.5e6,  # 2.1 million parameters in float32
        kv_bytes_per_token=6144.0,  # 2 x 4 layers x 192 x 4 bytes
        bytes_per_s=5e9,  # one core's share of two memory channels
        flop_per_token=4.2e6,
        flop_per_s=10e9,
    ),
    source="estimate for the shipped checkpoint on a CPU",
)


def peak(name: str | None) -> Peak | None:
    """The peak of a GPU by its product name ("NVIDIA A100-SXM4-80GB"); None where it is not known."""
    return next((each for pattern, each in _PEAKS if name and _is_model(name, pattern)), None)


def known_gpus() -> list[str]:
    """What a GPU may be called."""
    names = [pattern.replace(".*", " ") for pattern, _ in _PEAKS]
    return sorted({name for each in names for name in each.split("|")})


def roofline(name: str | None) -> Costs:
    """LLaVA-1.5-7B on the GPU of that name; on one that is not known, as on the slowest known.

    Without launch overhead: as with captured graphs.
    """
    found = peak(name)
    limit = found or UNKNOWN_GPU
    return Costs(
        encode=EncodeCost(
            batch_s=ENCODER_BYTES / limit.bytes_per_s, image_s=ENCODE_FLOP / (ENCODE_SHARE * limit.flop_per_s)
        ),
        prefill=PrefillCost(
            start_s=0.0,
            token_s=FLOP_PER_TOKEN / (PREFILL_SHARE * limit.flop_per_s),
            token_squared_s=ATTENTION_FLOP / (PREFILL_SHARE * limit.flop_per_s),
        ),
        decode=DecodeCost(
            step_s=0.0,
            weight_bytes=DECODER_BYTES,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            bytes_per_s=limit.bytes_per_s * DECODE_SHARE,
            flop_per_token=FLOP_PER_TOKEN,
            flop_per_s=limit.flop_per_s,
        ),
        source=f"roofline of {name}" if found else f"roofline of a T4, standing for {name or 'an unknown GPU'}",
    )


def _is_model(name: str, pattern: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", name, re.IGNORECASE) is not None
