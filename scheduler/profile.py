"""What the operator wants: a deployment profile, read from TOML.

Every key has its default and its reason here and nowhere else. Unknown keys are refused.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]
PositiveMilliseconds = Annotated[float, Field(gt=0)]

AUTO = "auto"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


def _to_tuple(value: object) -> object:
    """TOML has lists; a single word is a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def check_redis_url(url: str) -> str:
    """Passes an address of Redis. Raises ValueError, without the address: a password may be in it."""
    if not url.startswith(REDIS_SCHEMES):
        raise ValueError(f"an address of Redis begins with {', '.join(REDIS_SCHEMES)}")
    return url


DeviceName = Annotated[str, Field(pattern=r"^(auto|cpu|cuda:[0-9]+|set:[0-9]+)$")]
Devices = Annotated[tuple[DeviceName, ...], BeforeValidator(_to_tuple), Field(min_length=1)]
CpuLists = Annotated[tuple[str, ...], BeforeValidator(_to_tuple)]
RedisUrl = Annotated[str, AfterValidator(check_redis_url)]


class ProfileRefused(ValueError):
    """A profile that cannot be used; the message names file, key, value and what is allowed."""


class Table(BaseModel):
    """A TOML table: immutable, strictly typed, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelTable(Table):
    """`[model]`: the checkpoint and where what is built from it goes."""

    checkpoint: str = "demo/checkpoint"  # a Hugging Face folder; relative paths start at the project's root
    artifacts: str = "build"  # the exported encoder; rebuilt when the checkpoint changes
    # What a replica of each stage needs on its device; left out, memory is not checked.
    encoder_weights_mib: Positive | None = None
    decoder_weights_mib: Positive | None = None
    embedding_kib: Positive = 4608  # of one image: 576 x 4096 x 2 bytes, LLaVA-1.5-7B in float16


class TopologyTable(Table):
    """`[topology]`: where the devices and their links are read from."""

    file: str | None = None  # recorded `nvidia-smi topo -m`, beside the profile; left out, the machine is asked
    gpu_name: str | None = None  # what the GPUs of `file` are: a text does not say it, and GB/s depend on it
    stands_for: Literal["gpus", "cpu_sets"] = "gpus"  # cpu_sets: each GPU of `file` is the set of its near CPUs
    strict: Literal["nvlink", "switch", "numa", "any"] = "any"  # refuse a placement whose links are worse
    memory_gib: Positive | None = None  # of each GPU; left out, known from its name or not checked


class EncodeTable(Table):
    """`[encode]`: the vision encoder's replicas and each one's embedding store."""

    replicas: Positive = 1
    devices: Devices = ("cpu",)  # "auto", or one of "cpu", "cuda:0", "set:0" per replica; a single one is for all
    cpus: CpuLists = ()  # one CPU list ("0-3,8") per replica on "cpu"; empty: wherever the system likes
    # tensorrt: an engine in the encoder's own process; triton: the same engine as a native model, `clip_engine`
    runtime: Literal["onnxruntime", "tensorrt", "torch", "triton"] = "onnxruntime"
    graphs: bool = True  # CUDA graphs: fewer launches; each is compared with the plain run at start
    threads: Positive = 1  # per replica
    max_batch: Annotated[int, Field(ge=1, le=64)] = 8  # an encoder saturates near 6; larger only adds latency
    queue_delay_us: Annotated[int, Field(ge=0)] = 2000  # how long Triton waits for a fuller batch
    slots: Positive = 64  # embeddings kept per replica; beyond the leased ones they are the cache
    dtype: Literal["float16", "float32"] = "float32"  # of the stored features; float32 is exact
    lease_s: PositiveSeconds = 120.0  # a holder that died gives its slot back after this
    redis_url: RedisUrl | None = None  # a second level of the cache, shared by servers: redis://host:6379/0
    redis_timeout_ms: PositiveMilliseconds = 50.0  # one that hangs is waited for so long, once


class EngineTable(Table):
    """`[engine]`: `clip_engine`, Triton's own TensorRT model, for `encode.runtime = "triton"`."""

    busy_wait_events: bool = True  # lower latency, for a busy CPU
    output_copy_stream: bool = False  # with graphs it crashes Triton (server#5789): refused
    eager_batching: bool = False
    gather_kernel_buffer_threshold: Annotated[int, Field(ge=0)] = 0
    queue_delay_us: Annotated[int, Field(ge=0)] = 0  # the encoder's own batcher has waited already
    # The engine's shapes; `vlm-relay serve` takes them from the checkpoint, `render` from here: LLaVA-1.5-7B's.
    image_size: Positive = 336
    image_tokens: Positive = 576
    width: Positive = 4096


class DecodeTable(Table):
    """`[decode]`: the language decoder's replicas and each one's batch and KV cache."""

    replicas: Positive = 1
    devices: Devices = ("cpu",)  # as in [encode]
    cpus: CpuLists = ()
    threads: Positive = 2  # per replica
    engine: Literal["own", "vllm"] = "own"  # vllm: where it is installed in the server's environment
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    weights: Literal["plain", "int8"] = "plain"  # int8: half of bfloat16's memory traffic, rounded; on a CPU
    max_sequences: Positive = 32  # decoded together in one step
    max_waiting: Positive = 8  # accepted ahead of their turn; the others wait in the scheduler, by priority
    step_tokens: Positive = 2048  # prefill and decode tokens in one step
    block_tokens: Positive = 16
    kv_cache_mib: Positive = 512
    step_limit_ms: Positive = 500  # prompts are cut so that a step beside running decodes takes about so long
    graphs: bool = True  # on a GPU: decode steps recorded as CUDA graphs, one per batch size
    compile: bool = True  # on a CPU: operators compiled at the first start, where there is a compiler


Policy = Literal["cost", "article", "serial", "split"]


class ScheduleTable(Table):
    """`[schedule]`: how a request's encoder, decoder and mode are chosen."""

    # Least predicted finish; the founding article's rule; or, for comparison, always or never on the decoder's device.
    policy: Policy = "cost"
    hybrid: bool = False  # automatic placement may put an encoder and a decoder on one device
    hysteresis: Annotated[float, Field(ge=0, le=1)] = 0.15  # serial and split change only for a gain above this share
    costs: str | None = None  # file of `vlm-relay profile`; relative paths start at the project's root
    stall_weight: Annotated[float, Field(ge=0)] = 1.0  # a second that a running decode waits, in seconds of ours


class LimitsTable(Table):
    """`[limits]`: the bounds that keep the server alive."""

    max_in_flight: Annotated[int, Field(ge=1, le=192)] = 128  # below the 256 threads of Triton's pool
    max_waiting: Annotated[int, Field(ge=0)] = 512  # admitted behind those; beyond: [UNAVAILABLE]
    max_images: Positive = 8
    max_image_mib: Positive = 20
    max_image_megapixels: Positive = 64
    max_text_kib: Positive = 256
    max_wait_s: PositiveSeconds = 30.0  # who would wait longer for a place is refused at once: [UNAVAILABLE]
    stall_s: PositiveSeconds = 60.0  # a stream that gives nothing for this long is ended
    ageing_s: PositiveSeconds = 10.0  # waiting this long is worth one step of priority
    drain_s: PositiveSeconds = 30.0  # at stop, how long running requests may take to finish
    encode_transfer_warn_ms: PositiveMilliseconds = 100.0  # a slower encode with its transfer is logged


class Profile(Table):
    """A whole profile: pools, memory and limits."""

    model: ModelTable = ModelTable()
    topology: TopologyTable = TopologyTable()
    encode: EncodeTable = EncodeTable()
    engine: EngineTable = EngineTable()
    decode: DecodeTable = DecodeTable()
    schedule: ScheduleTable = ScheduleTable()
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
        elif fault["type"] == "value_error":  # our own words, which need no value
            parts.append(f"{key}: {fault['ctx']['error']}")
        else:
            words = fault["msg"][:1].lower() + fault["msg"][1:]
            parts.append(f"{key}: {words} (given {fault['input']!r})")
    return "; ".join(parts)
