"""What each stage costs, in seconds: four functions per device, measured once or taken from a roofline.

    encode(b)      = e0 + e1 * b                   per batch of b images
    prefill(T)     = p0 + p1 * T + p2 * T ** 2     T prompt tokens
    decode(B, K)   = d0 + max((W + K * kv) / bandwidth, B * flop / flops)
                                                   one step of B sequences with K context tokens together
    transfer(n, l) = c + n * embedding / bandwidth(l)
                                                   n images over the link l

`scheduler.roofline` has the values where nothing was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from scheduler.plan import Link
from scheduler.profile import Table, describe

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

EMBEDDING_BYTES = 4_718_592
"""One image of LLaVA-1.5-7B: 576 patches x 4096 x 2 bytes."""

IMAGE_TOKENS = 576
"""Of one image at 336 x 336 in patches of 14."""

GIGABYTE = 1e9

NVLINK_SHARE = 0.8
"""Of the theoretical rate, what a copy of a few megabytes reaches; PCIe figures of a topology are effective already."""

# GB/s one way where only the class is known, not the GPUs: the slowest that NCCL plans with for the class.
_UNKNOWN_GPU_GIGABYTES_PER_S = {"PIX": 12.0, "PXB": 12.0, "PHB": 12.0, "NODE": 12.0, "SYS": 10.0, "SOC": 10.0}
_UNKNOWN_NVLINK_GIGABYTES_PER_S = 14.0  # per link: the x4 sub-links of a GA102, the narrowest
UNKNOWN_GIGABYTES_PER_S = 6.0
"""PCIe generation 3 x16 through host memory: what is left when nothing is known of a link."""


class CostsRefused(ValueError):
    """Cost functions that cannot be read; the message names file, key, value and what is allowed."""


class EncodeCost(Table):
    """The vision encoder with its projector. A batch takes at most `max_batch` images."""

    batch_s: Seconds  # e0
    image_s: PositiveFloat  # e1, per image of IMAGE_TOKENS tokens
    max_batch: Annotated[int, Field(ge=1)] = 8

    def seconds(self, num_images: float) -> float:
        """To encode `num_images` (a larger image counts as several), one batch after the other."""
        return self.batch_s * -(-num_images // self.max_batch) + self.image_s * num_images


class PrefillCost(Table):
    """The decoder over a prompt, image tokens included."""

    start_s: Seconds  # p0
    token_s: PositiveFloat  # p1
    token_squared_s: Seconds = 0.0  # p2: attention

    def seconds(self, num_tokens: float) -> float:
        """Until the first token of a prompt of `num_tokens`."""
        return self.start_s + self.token_s * num_tokens + self.token_squared_s * num_tokens * num_tokens


class DecodeCost(Table):
    """One decode step: weights and KV cache are read once, every sequence is computed."""

    step_s: Seconds  # d0
    weight_bytes: PositiveFloat  # W
    kv_bytes_per_token: PositiveFloat
    bytes_per_s: PositiveFloat
    flop_per_token: PositiveFloat  # twice the parameters
    flop_per_s: PositiveFloat

    def seconds(self, num_sequences: float, context_tokens: float) -> float:
        """One step of `num_sequences` whose contexts hold `context_tokens` together."""
        read_s = (self.weight_bytes + context_tokens * self.kv_bytes_per_token) / self.bytes_per_s
        return self.step_s + max(read_s, num_sequences * self.flop_per_token / self.flop_per_s)


class TransferCost(Table):
    """Embeddings on their way from the encoder's memory to the decoder's."""

    hop_s: Seconds = 0.0005  # the control message to an encoder and its answer: two passes through Triton's BLS
    setup_s: Seconds = 20e-6  # c: a peer copy's launch and event
    staged_setup_s: Seconds = 60e-6  # c without peer access: two copies and the pinned buffer between them
    embedding_bytes: PositiveFloat = float(EMBEDDING_BYTES)
    gigabytes_per_s: Mapping[str, PositiveFloat] = Field(default_factory=dict)  # measured, by link class; wins

    def start_s(self, link: Link | None) -> float:
        """The part that does not grow; `link` None is the same device, where nothing is copied."""
        return 0.0 if link is None else self.staged_setup_s if link.is_staged else self.setup_s

    def image_s(self, link: Link | None) -> float:
        """Per image; 0 on the same device."""
        return 0.0 if link is None else self.embedding_bytes / (self._rate(link) * GIGABYTE)

    def seconds(self, num_images: float, link: Link | None) -> float:
        """To copy `num_images` over a link; 0 on the same device or without images."""
        return self.start_s(link) + num_images * self.image_s(link) if num_images else 0.0

    def _rate(self, link: Link) -> float:
        """GB/s: measured by copying, else by class, else the plan's estimate, else by class alone (staged: half)."""
        if link.measured_gigabytes_per_s is not None:
            return link.measured_gigabytes_per_s
        if link.link in self.gigabytes_per_s:
            return self.gigabytes_per_s[link.link]
        if link.gigabytes_per_s is not None:
            return link.gigabytes_per_s * (NVLINK_SHARE if link.path == "nvlink" else 1.0)
        width = link.link.removeprefix("NV")
        known = _UNKNOWN_GPU_GIGABYTES_PER_S.get(link.link, UNKNOWN_GIGABYTES_PER_S)
        rate = _UNKNOWN_NVLINK_GIGABYTES_PER_S * int(width) if link.is_nvlink and width.isdecimal() else known
        return rate / 2 if link.is_staged else rate


class ContentionCost(Table):
    """What share of its speed a stage keeps while the other stage computes on the same device.

    A GPU that runs two processes gives each its turn: half and half.
    """

    encode_speed: Annotated[float, Field(gt=0, le=1)] = 0.5
    decode_speed: Annotated[float, Field(gt=0, le=1)] = 0.5


class Costs(Table):
    """The four functions of one model on one kind of device."""

    encode: EncodeCost
    prefill: PrefillCost
    decode: DecodeCost
    transfer: TransferCost = TransferCost()
    contention: ContentionCost = ContentionCost()
    source: str = "given"  # "roofline of ...", "measured on ..."

    def to_json(self) -> str:
        """As a file keeps them."""
        return self.model_dump_json(indent=2) + "\n"


def read_costs(path: Path) -> dict[str, Costs]:
    """The cost functions in a file. Raises `CostsRefused`, as `parse_costs`, and when it cannot be read."""
    try:
        return parse_costs(path.read_text(), str(path))
    except OSError as error:
        raise CostsRefused(f"costs {path}: {error.strerror}; write it with `vlm-relay profile`") from error
    except UnicodeDecodeError as error:
        raise CostsRefused(f"costs {path}: not UTF-8; write it with `vlm-relay profile`") from error


def parse_costs(text: str, source: str) -> dict[str, Costs]:
    """Cost functions from JSON: one object for all devices (key "*"), or `{"devices": {name: object}}`.

    Raises:
        CostsRefused: not JSON, an unknown key, or a value out of range; `source` names the text.
    """
    try:
        values = json.loads(text)
        if isinstance(values, dict) and values.keys() == {"devices"}:
            return {
                str(name): Costs.model_validate_json(json.dumps(value)) for name, value in values["devices"].items()
            }
        return {"*": Costs.model_validate_json(text)}
    except ValidationError as error:
        raise CostsRefused(f"costs {source}: {describe(error)}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise CostsRefused(f"costs {source}: not JSON of the form expected: {error}") from error
