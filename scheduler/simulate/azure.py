"""A production-like workload: figures of Azure's multimodal trace of one week of October 2024, read off public plots.

Source: "Azure LMM inference trace 2025" (github.com/Azure/AzurePublicDataset, CC-BY), described in "ModServe:
Modality- and Stage-Aware Resource Disaggregation for Scalable Multimodal Model Serving", SoCC 2025. The figures are
digitised from plots and carry an error of a few per cent. The trace's image counts fall only on perfect squares
(1, 4, 9, ...); read here as their roots, which gives a mean of about 2.8 images.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.cost import IMAGE_TOKENS
from scheduler.simulate.workload import Floats, Ints, Workload

PERCENTILES = (1, 2, 5, *range(10, 91, 5), 92, 94, 95, 96, 97, 98, 99)
CONTEXT_WITH_IMAGES = (
    *(251, 261, 342, 428, 649, 712, 868, 960, 1108, 1141, 1212, 1419, 1721, 2014, 2684, 3732, 4027, 4731, 6338, 9458),
    *(9934, 14268, 21978, 28433, 32722, 34726, 51733),
)
CONTEXT_OF_TEXT = (
    *(73, 110, 137, 175, 259, 308, 366, 438, 519, 605, 711, 788, 888, 995, 1128, 1282, 1465, 1762, 2205, 3112),
    *(3534, 3834, 4129, 5077, 5769, 7310, 12619),
)
GENERATED_WITH_IMAGES = (
    *(1, 3, 9, 14, 25, 27, 33, 40, 48, 56, 67, 80, 91, 105, 122, 143, 179, 259, 329, 404, 442, 486, 509, 542, 589),
    *(647, 777),
)
GENERATED_OF_TEXT = (
    *(1, 1, 1, 8, 11, 16, 26, 45, 64, 85, 112, 146, 188, 197, 203, 210, 219, 245, 327, 475, 555, 669, 751, 861, 936),
    *(1012, 1275),
)
IMAGE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 14, 15, 16, 18, 20, 21, 22, 23)
IMAGE_SHARES = (
    *(66.1, 4.65, 15.0, 1.95, 4.7, 0.3, 0.55, 0.15, 1.15, 0.15, 0.75, 0.15, 0.3, 0.3, 0.45, 0.75, 0.9, 1.75),
)
REQUESTS_BY_HOUR = (
    *(38824, 41157, 41311, 39308, 38303, 31610, 36082, 41748, 55329, 36785, 36742, 35975, 36331, 40018, 44084, 44328),
    *(51074, 51832, 44199, 45947, 45539, 44524, 42771, 35706),
)
"""Of the whole week by hour of the day (UTC)."""

IMAGE_SHARE = 0.5
CONTEXT_LIMIT = 4096  # of LLaVA-1.5; longer prompts of the trace are cut to what leaves room for the answer
MOST_IMAGES = 6  # that fit that context with 576 tokens each


def azure(arrived_s: Floats, chance: np.random.Generator, max_tokens: int | None = None) -> Workload:
    """Requests as in the trace, cut to the context of LLaVA-1.5, that arrive at those times."""
    count = len(arrived_s)
    has_images = chance.random(count) < IMAGE_SHARE
    shares = np.array(IMAGE_SHARES) / sum(IMAGE_SHARES)
    images = np.minimum(chance.choice(IMAGE_COUNTS, count, p=shares), MOST_IMAGES) * has_images
    output = _drawn(GENERATED_OF_TEXT, GENERATED_WITH_IMAGES, has_images, chance)
    output = np.minimum(output, CONTEXT_LIMIT // 4)
    context = _drawn(CONTEXT_OF_TEXT, CONTEXT_WITH_IMAGES, has_images, chance)
    # The trace's context counts the images by another model's measure: at least ours must fit.
    prompt = np.minimum(np.maximum(context, images * IMAGE_TOKENS + 16), CONTEXT_LIMIT - output)
    images = np.minimum(images, prompt // IMAGE_TOKENS)
    return Workload(
        arrived_s=arrived_s,
        num_images=images.astype(np.int64),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output if max_tokens is None else np.full(count, max_tokens),
    ).checked()


def day(count: int, rate_per_s: float, chance: np.random.Generator) -> Floats:
    """Arrivals that follow the trace's hours of the day; the mean rate over a whole day is `rate_per_s`."""
    ends = np.cumsum(np.array(REQUESTS_BY_HOUR) / np.mean(REQUESTS_BY_HOUR)) * 3600 * rate_per_s
    ticks = np.cumsum(chance.exponential(1.0, count))
    days, rest = np.divmod(ticks, ends[-1])
    within = np.interp(rest, np.concatenate(([0.0], ends)), np.arange(25) * 3600.0)
    result: Floats = days * 86400 + within
    return result


def _drawn(
    of_text: tuple[int, ...],
    with_images: tuple[int, ...],
    has_images: npt.NDArray[np.bool_],
    chance: np.random.Generator,
) -> Ints:
    """By the quantiles, with straight lines between them; the ends are held."""
    at = chance.random(len(has_images)) * 100
    values = [np.interp(at, PERCENTILES, quantiles) for quantiles in (of_text, with_images)]
    result: Ints = np.maximum(1, np.rint(np.where(has_images, values[1], values[0]))).astype(np.int64)
    return result
