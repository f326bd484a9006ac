"""Whether what a plan puts on each GPU fits its memory, where both are known."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.plan import Device, Plan
from scheduler.pools import place_of
from scheduler.profile import Profile
from scheduler.roofline import peak

MIB_PER_GIB = 1024


def check_memory(profile: Profile, devices: Sequence[Device], plan: Plan) -> str | None:
    """The first device that is too small: one line with the key of its largest part. None if all fit."""
    for device in devices:
        capacity_gib = _capacity_gib(profile, device)
        parts = _parts_mib(profile, device, plan)
        needed_mib = sum(parts.values())
        if capacity_gib is not None and needed_mib > capacity_gib * MIB_PER_GIB:
            key = max(parts, key=lambda name: parts[name])
            told = ", ".join(f"{name} {mib / MIB_PER_GIB:.1f}" for name, mib in parts.items() if mib)
            return (
                f"{key}: {device.name} would hold {needed_mib / MIB_PER_GIB:.1f} GiB ({told}); "
                f"allowed: {capacity_gib} GiB, its memory"
            )
    return None


def _capacity_gib(profile: Profile, device: Device) -> int | None:
    if device.gpu is None:
        return None
    known = peak(device.model)
    return profile.topology.memory_gib or (known.memory_gib if known else None)


def _parts_mib(profile: Profile, device: Device, plan: Plan) -> dict[str, float]:
    """By profile key. Weights that the profile does not tell count as nothing."""
    num_encoders = sum(place_of(replica) == device.name for replica in plan.encoders)
    num_decoders = sum(place_of(replica) == device.name for replica in plan.decoders)
    model = profile.model
    return {
        "model.encoder_weights_mib": float(num_encoders * (model.encoder_weights_mib or 0)),
        "encode.slots": num_encoders * profile.encode.slots * model.embedding_kib / 1024,
        "model.decoder_weights_mib": float(num_decoders * (model.decoder_weights_mib or 0)),
        "decode.kv_cache_mib": float(num_decoders * profile.decode.kv_cache_mib),
    }
