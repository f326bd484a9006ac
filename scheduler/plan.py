"""The plan: which replica runs where and with what; the one file that all processes read.

Made by `scheduler.placement` from a profile, kept as `plan.json` beside the models of a repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from scheduler.profile import DecodeTable, EncodeTable, EngineTable, LimitsTable, ScheduleTable, Table, describe

PLAN_FILE = "plan.json"
DRAIN_FILE = "drain"  # beside it: new requests are refused while this file exists
ENCODER = "clip_encoder"
ENGINE = "clip_engine"  # Triton's own model of the encoder, one per encoder that asks it
DECODER = "llava_decoder"
FRONT = "llava"


class PlanRefused(ValueError):
    """A plan file that cannot be read."""


class Replica(Table):
    """One Triton model that runs a stage on one device."""

    name: str  # of the Triton model
    device: str  # "cpu" or "cuda:0"
    cpus: tuple[int, ...] = ()  # bound to these; empty: wherever the system likes
    place: str = ""  # name of the plan's `Device` that it stands on; empty: that of `device`


class Device(Table):
    """A place for replicas: a GPU, a set of CPUs, or all CPUs."""

    name: str  # "cuda:0", "set:0" or "cpu"
    roles: tuple[Literal["encode", "decode"], ...]  # both: a hybrid
    gpu: int | None = None  # index in nvidia-smi's order; set CUDA_DEVICE_ORDER=PCI_BUS_ID
    cpus: tuple[int, ...] = ()
    numa_nodes: tuple[int, ...] = ()
    model: str | None = None  # "NVIDIA H100 80GB HBM3"
    why: str = ""  # one line: why it has these roles


class Link(Table):
    """What joins two devices of a plan."""

    first: str
    second: str
    link: str  # as `scheduler.topology.links` names it: NV12, PIX, ..., unknown
    gigabytes_per_s: float | None = None  # one way, estimated; None: not known
    path: str = "unknown"  # nvlink, pcie, socket, staged or unknown
    has_peer_access: bool | None = None  # None: nobody asked
    measured_gigabytes_per_s: float | None = None  # of a copy from process to process; None: not measured

    @property
    def is_staged(self) -> bool:
        """Whether bytes must go through host memory."""
        return self.path == "staged" or self.has_peer_access is False

    @property
    def is_nvlink(self) -> bool:
        """Whether it is a direct NVLink."""
        return self.link.startswith("NV") and not self.is_staged


class Transfer(Table):
    """How embeddings come from an encoder's GPU to a decoder's, as a copy between two processes showed."""

    encoder: str  # device
    decoder: str  # device
    route: Literal["device", "peer", "staged"]  # the same GPU, the peer's memory, or through the host
    gigabytes_per_s: float | None = None
    why: str = ""  # what forbids a better one


class Plan(Table):
    """All that the models need to know. Paths are absolute, or relative to the project's root."""

    checkpoint: str
    artifacts: str
    encoders: tuple[Replica, ...]
    decoders: tuple[Replica, ...]
    encode: EncodeTable
    engine: EngineTable = EngineTable()
    decode: DecodeTable
    limits: LimitsTable
    schedule: ScheduleTable = ScheduleTable()
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    transfers: tuple[Transfer, ...] = ()  # empty: not tried; an encoder then tries those that it needs
    tier: str = ""  # the worst of the links that embeddings travel: device, nvlink, switch, numa or any
    notes: tuple[str, ...] = ()  # what a person should know about the placement

    def to_json(self) -> str:
        """The text of `plan.json`."""
        return self.model_dump_json(indent=2) + "\n"


def read_plan(repository: Path) -> Plan:
    """The plan of a model repository.

    Raises:
        PlanRefused: no `plan.json` there, or one that another version wrote.
    """
    path = repository / PLAN_FILE
    try:
        return Plan.model_validate_json(path.read_text())
    except OSError as error:
        raise PlanRefused(f"plan {path}: {error.strerror}; write it with 'python -m scheduler render'") from error
    except ValidationError as error:
        raise PlanRefused(f"plan {path}: {describe(error)}") from error
