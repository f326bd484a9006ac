"""The plan: which replica runs where and with what; the one file that all processes read.

Made by `scheduler.placement` from a profile, kept as `plan.json` beside the models of a repository.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from scheduler.profile import DecodeTable, EncodeTable, LimitsTable, Table, describe

PLAN_FILE = "plan.json"
DRAIN_FILE = "drain"  # beside it: new requests are refused while this file exists
ENCODER = "clip_encoder"
DECODER = "llava_decoder"
FRONT = "llava"


class PlanRefused(ValueError):
    """A plan file that cannot be read."""


class Replica(Table):
    """One Triton model that runs a stage on one device."""

    name: str  # of the Triton model
    device: str  # "cpu" or "cuda:0"
    cpus: tuple[int, ...] = ()  # bound to these; empty: wherever the system likes


class Plan(Table):
    """All that the models need to know. Paths are absolute, or relative to the project's root."""

    checkpoint: str
    artifacts: str
    encoders: tuple[Replica, ...]
    decoders: tuple[Replica, ...]
    encode: EncodeTable
    decode: DecodeTable
    limits: LimitsTable

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
