"""What the operator wants: a deployment profile, read from TOML.

Every key has its default and its reason here and nowhere else. Unknown keys are refused.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]


class ProfileRefused(ValueError):
    """A profile that cannot be used; the message names file, key, value and what is allowed."""


class Table(BaseModel):
    """A TOML table: immutable, strictly typed, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelTable(Table):
    """`[model]`: the checkpoint and where what is built from it goes."""

    checkpoint: str = "demo/checkpoint"  # a Hugging Face folder; relative paths start at the project's root
    artifacts: str = "build"  # the exported encoder; rebuilt when the checkpoint changes


class EncodeTable(Table):
    """`[encode]`: the vision encoder's replicas and each one's embedding store."""

    replicas: Positive = 1
    runtime: Literal["onnxruntime"] = "onnxruntime"
    threads: Positive = 1  # per replica
    max_batch: Annotated[int, Field(ge=1, le=64)] = 8  # an encoder saturates near 6; larger only adds latency
    queue_delay_us: Annotated[int, Field(ge=0)] = 2000  # how long Triton waits for a fuller batch
    slots: Positive = 64  # embeddings kept per replica; beyond the leased ones they are the cache
    dtype: Literal["float16", "float32"] = "float32"  # of the stored features; float32 is exact
    lease_s: PositiveSeconds = 120.0  # a holder that died gives its slot back after this


class DecodeTable(Table):
    """`[decode]`: the language decoder's replicas and each one's batch and KV cache."""

    replicas: Positive = 1
    threads: Positive = 2  # per replica
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_sequences: Positive = 32  # decoded together in one step
    max_waiting: Positive = 256  # accepted, not yet running
    step_tokens: Positive = 2048  # prefill and decode tokens in one step
    block_tokens: Positive = 16
    kv_cache_mib: Positive = 512
    compile: bool = False  # a compiled decode step: faster, and slower to start


class LimitsTable(Table):
    """`[limits]`: the bounds that keep the server alive."""

    max_in_flight: Annotated[int, Field(ge=1, le=192)] = 128  # below the 256 threads of Triton's pool
    max_waiting: Annotated[int, Field(ge=0)] = 512  # admitted behind those; beyond: [UNAVAILABLE]
    max_images: Positive = 8
    max_image_mib: Positive = 20
    max_image_megapixels: Positive = 64
    max_text_kib: Positive = 256
    stall_s: PositiveSeconds = 60.0  # a stream that gives nothing for this long is ended
    ageing_s: PositiveSeconds = 10.0  # waiting this long is worth one step of priority
    drain_s: PositiveSeconds = 30.0  # at stop, how long running requests may take to finish


class Profile(Table):
    """A whole profile: pools, memory and limits."""

    model: ModelTable = ModelTable()
    encode: EncodeTable = EncodeTable()
    decode: DecodeTable = DecodeTable()
    limits: LimitsTable = LimitsTable()


def read_profile(path: Path) -> Profile:
    """The profile in a TOML file.

    Raises:
        ProfileRefused: no such file, not TOML, an unknown key, a wrong type or a value out of range.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ProfileRefused(f"profile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileRefused(f"profile {path}: not UTF-8: {error.reason} at byte {error.start}") from error
    return parse_profile(text, str(path))


def parse_profile(text: str, source: str) -> Profile:
    """The profile in a TOML text; `source` names it in errors. Raises as `read_profile`."""
    try:
        return Profile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ProfileRefused(f"profile {source}: not TOML: {error}") from error
    except ValidationError as error:
        raise ProfileRefused(f"profile {source}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """One line for what pydantic found wrong: key, what is allowed, the value given."""
    parts = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            parts.append(f"unknown key {key}")
        else:
            words = fault["msg"][:1].lower() + fault["msg"][1:]
            parts.append(f"{key}: {words} (given {fault['input']!r})")
    return "; ".join(parts)
