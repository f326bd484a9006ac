"""A machine that is only described: so many GPUs of one kind, one kind of link between them, and plans for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.placement import place
from scheduler.plan import Plan
from scheduler.profile import (
    DecodeTable,
    EncodeTable,
    LimitsTable,
    ModelTable,
    Policy,
    Profile,
    ScheduleTable,
    TopologyTable,
)
from scheduler.roofline import known_gpus, peak
from scheduler.topology import Topology
from scheduler.topology.topology import Gpu, all_pairs

LinkKind = Literal["nvlink", "pcie", "none"]
LINKS: tuple[LinkKind, ...] = ("nvlink", "pcie", "none")

# Links that a GPU of that kind has to a switch, or to all others of a machine (data sheets).
_NVLINKS = {"V100": 6, "A100": 12, "A800": 8, "H100": 18, "H800": 8, "H200": 18, "H20": 18, "B200": 18}

ENCODER_WEIGHTS_MIB = 620  # CLIP ViT-L/14-336 and projector in float16
DECODER_WEIGHTS_MIB = 12_600  # Vicuna-7B in float16
USABLE_SHARE = 0.9  # of a GPU's memory; the rest is for activations

LEAST_CACHE_MIB = 1024  # below it not even two requests with an image fit


class FleetRefused(ValueError):
    """A machine that cannot be; the message names what was wrong and what is allowed."""


def describe_machine(num_gpus: int, gpu: str, link: LinkKind = "nvlink") -> Topology:
    """A machine of `num_gpus` GPUs, each joined to each by one kind of link; "none" goes through host memory.

    Raises:
        FleetRefused: no GPU at all, a GPU that is not known, or one without NVLink.
    """
    if num_gpus < 1:
        raise FleetRefused(f"{num_gpus} GPUs; allowed: 1 or more")
    if peak(gpu) is None:
        raise FleetRefused(f"GPU {gpu!r} is not known; allowed: {', '.join(known_gpus())}")
    name = "PHB" if link == "pcie" else "SYS"
    if link == "nvlink":
        count = next((number for kind, number in _NVLINKS.items() if kind in gpu.upper()), None)
        if count is None and num_gpus > 1:
            raise FleetRefused(f"{gpu} has no NVLink; allowed: pcie, none")
        name = f"NV{count}"
    pairs = all_pairs(num_gpus)
    return Topology(
        gpus=tuple(Gpu(name=gpu) for _ in range(num_gpus)),
        links=dict.fromkeys(pairs, name),
        peer_access=dict.fromkeys(pairs, link != "none"),
        shows_nvlink=True,
        source=f"{num_gpus} x {gpu}, {link}",
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """How many GPUs encode and how many decode; hybrid: the encoders' GPUs decode too."""

    num_encoders: int
    num_decoders: int
    is_hybrid: bool
    policy: Policy = "cost"

    @property
    def name(self) -> str:
        """For a table."""
        if self.policy == "serial":
            return "serial"
        if self.is_hybrid:
            every = "all" if self.num_encoders == self.num_decoders else f"{self.num_encoders} of {self.num_decoders}"
            return f"hybrid, {every} encode"
        return f"split {self.num_encoders} + {self.num_decoders}"


def serial(num_gpus: int) -> Layout:
    """Every GPU does all of a request."""
    return Layout(num_gpus, num_gpus, True, "serial")


def splits(num_gpus: int) -> list[Layout]:
    """Every division into GPUs that encode and GPUs that decode."""
    return [Layout(count, num_gpus - count, False) for count in range(1, num_gpus)]


def hybrid(num_gpus: int, num_encoders: int | None = None) -> Layout:
    """Every GPU decodes, and all or some may encode; where is decided per request."""
    return Layout(num_encoders or num_gpus, num_gpus, True)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is tuned for each layout."""

    step_tokens: int = 2048  # prefill and decode tokens in one step: the chunk
    max_batch: int = 8  # images in one encode: the encode budget
    step_limit_ms: int = 500
    max_sequences: int = 256


def profile_of(topology: Topology, layout: Layout, tuning: Tuning) -> Profile:
    """The profile of a layout with LLaVA-1.5-7B on a machine of equal GPUs."""
    gpu = topology.gpus[0].name or ""
    found = peak(gpu)
    memory_mib = (found.memory_gib if found else 16) * 1024 * USABLE_SHARE
    slots = 256
    free_mib = int(memory_mib - DECODER_WEIGHTS_MIB - ENCODER_WEIGHTS_MIB - slots * 4.5)
    if free_mib < LEAST_CACHE_MIB:
        raise FleetRefused(f"{gpu} has {memory_mib / 1024:.0f} GiB to use, and LLaVA-1.5-7B needs 14 and a cache")
    return Profile(
        model=ModelTable(encoder_weights_mib=ENCODER_WEIGHTS_MIB, decoder_weights_mib=DECODER_WEIGHTS_MIB),
        topology=TopologyTable(gpu_name=gpu),
        encode=EncodeTable(
            replicas=layout.num_encoders,
            devices=("auto",),
            runtime="tensorrt",
            dtype="float16",
            slots=slots,
            max_batch=tuning.max_batch,
        ),
        decode=DecodeTable(
            replicas=layout.num_decoders,
            devices=("auto",),
            dtype="bfloat16",
            max_sequences=tuning.max_sequences,
            step_tokens=max(tuning.step_tokens, tuning.max_sequences),
            step_limit_ms=tuning.step_limit_ms,
            kv_cache_mib=free_mib,
        ),
        schedule=ScheduleTable(policy=layout.policy, hybrid=layout.is_hybrid),
        limits=LimitsTable(max_in_flight=192),
    )


def plan_of(topology: Topology, layout: Layout, tuning: Tuning | None = None) -> Plan:
    """The plan of a layout, placed as a server would place it.

    Raises:
        PlacementRefused: it does not fit.
        FleetRefused: the GPU is too small for the model.
    """
    return place(profile_of(topology, layout, tuning or Tuning()), topology)
