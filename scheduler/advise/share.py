"""What a request costs each stage in GPU time, and what follows before anything is simulated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.cost import IMAGE_TOKENS, Costs
from scheduler.simulate.workload import Workload

TYPICAL_BATCH = 32


@dataclass(frozen=True, slots=True)
class Shares:
    """GPU seconds of a mean request, with decode steps of `TYPICAL_BATCH` sequences."""

    encode_s: float
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        """Of all stages."""
        return self.encode_s + self.prefill_s + self.decode_s

    @property
    def encode_share(self) -> float:
        """f: the share of the encoder."""
        return self.encode_s / self.total_s

    @property
    def break_even_gpus(self) -> float:
        """1/f: GPUs of which one is kept busy by encoding alone; infinite without images."""
        return 1 / self.encode_share if self.encode_share else float("inf")


def shares_of(workload: Workload, costs: Costs) -> Shares:
    """The shares of a workload. Encodes are batched as well as they can be."""
    encode, prefill, decode = costs.encode, costs.prefill, costs.decode
    units = float(workload.num_images.mean()) * workload.image_tokens / IMAGE_TOKENS
    prompts, outputs = workload.prompt_tokens.astype(float), workload.output_tokens.astype(float)
    context = float((prompts + outputs / 2).mean()) * TYPICAL_BATCH
    return Shares(
        encode_s=units * (encode.image_s + encode.batch_s / encode.max_batch),
        prefill_s=float(np.mean([prefill.seconds(each) for each in prompts[:1000]])),
        decode_s=float(outputs.mean()) * decode.seconds(TYPICAL_BATCH, context) / TYPICAL_BATCH,
    )


def guess_per_s(shares: Shares, num_encoders: int, num_decoders: int, is_hybrid: bool) -> float:
    """About how many requests per second a layout can serve at most."""
    if is_hybrid:
        return num_decoders / shares.total_s
    of_decoders = num_decoders / (shares.prefill_s + shares.decode_s)
    return min(of_decoders, num_encoders / shares.encode_s) if shares.encode_s else of_decoders
