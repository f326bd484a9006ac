"""What was observed of a served request, and what of it corrects the predictions: on a server, and simulated."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.decision import Decision
from scheduler.routing import Router

MIN_STEPS = 8
"""Tokens after the first ones below which their time says little about a decode step."""


@dataclass(slots=True)
class Observed:
    """How long the parts of a request took, in seconds; 0 where it had no such part, or not yet."""

    queue_s: float = 0.0  # arrival until a place was free
    encode_s: float = 0.0  # to the encoders and back, the slowest image counts
    has_cached: bool = False  # an image was not encoded, because its features were there
    prefill_s: float = 0.0  # to the decoder until its first token
    transfer_s: float = 0.0  # of that, copying embeddings
    step_s: float = 0.0  # per token after the first ones

    def to_dict(self) -> dict[str, float | bool]:
        """What is known when the first text comes, for JSON."""
        return {
            "queue_s": round(self.queue_s, 6),
            "encode_s": round(self.encode_s, 6),
            "prefill_s": round(self.prefill_s, 6),
            "is_cached": self.has_cached,
        }


def learn(router: Router, decision: Decision, observed: Observed) -> None:
    """Corrects the predictions of the replicas that served a request, by how long they really took."""
    decoder, observe = decision.decoder, router.observe
    if len(set(decision.encoders)) == 1 and not observed.has_cached:
        observe("encode", decision.encoders[0], decision.encode_s, observed.encode_s)
    if decision.transfer_s and observed.transfer_s:
        observe("transfer", decoder, decision.transfer_s - router.hop_s(decoder), observed.transfer_s)
    if decision.wait_s == 0:
        observe("prefill", decoder, decision.prefill_s, observed.prefill_s)
    if observed.step_s:
        observe("decode", decoder, decision.step_s, observed.step_s)
