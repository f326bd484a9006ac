"""Which replica serves a request: the least loaded one of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has before it, in its own unit (images for encoders, tokens for decoders)."""

    pending: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request was placed, by which weight (lower is better), and why."""

    encoder: str | None  # None: no image, nothing to encode
    decoder: str
    encoder_pending_images: int
    decoder_pending_tokens: int
    mode: str  # "split": encoder and decoder are processes of their own; "text": no image
    reason: str

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


def decide(num_images: int, encoders: Mapping[str, Load], decoders: Mapping[str, Load]) -> Decision:
    """The replicas with the least pending work; the first of equals.

    Raises:
        LookupError: no replica is able to serve a stage that the request needs.
    """
    if not decoders:
        raise LookupError("no decoder is available")
    decoder = min(decoders, key=lambda name: decoders[name].pending)
    if num_images == 0:
        return Decision(None, decoder, 0, decoders[decoder].pending, "text", "no image: the encoder is skipped")
    if not encoders:
        raise LookupError("no encoder is available")
    encoder = min(encoders, key=lambda name: encoders[name].pending)
    return Decision(
        encoder,
        decoder,
        encoders[encoder].pending,
        decoders[decoder].pending,
        "split",
        "least pending images, least pending tokens",
    )
