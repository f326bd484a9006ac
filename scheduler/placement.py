"""Joins what is wanted (a profile) with what there is into a plan."""

from __future__ import annotations

from scheduler.plan import DECODER, ENCODER, Plan, Replica
from scheduler.profile import Profile


def place(profile: Profile) -> Plan:
    """The plan of a profile: every replica on the CPU, wherever the system schedules it."""
    return Plan(
        checkpoint=profile.model.checkpoint,
        artifacts=profile.model.artifacts,
        encoders=_replicas(ENCODER, profile.encode.replicas),
        decoders=_replicas(DECODER, profile.decode.replicas),
        encode=profile.encode,
        decode=profile.decode,
        limits=profile.limits,
    )


def _replicas(model: str, count: int) -> tuple[Replica, ...]:
    """One keeps the model's own name; several are numbered."""
    names = [model] if count == 1 else [f"{model}_{index}" for index in range(count)]
    return tuple(Replica(name=name, device="cpu") for name in names)
