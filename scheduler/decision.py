"""Where a request was placed, by which weights, and why; and what it means when it cannot be placed."""

from __future__ import annotations

from typing import Literal, NamedTuple

Mode = Literal["serial", "split", "text"]

# Why a placement was chosen: a bounded set, for metrics.
TEXT = "text"  # no image: least finish of all decoders
ONLY = "only"  # there was no choice
FINISH = "finish"  # least predicted finish
CACHED = "cached"  # the same, and a cache saved work
FAN_OUT = "fan_out"  # the same, images spread over several encoders
STICKY = "sticky"  # another mode would have been better by less than the hysteresis
ARTICLE = "article"  # by the founding article's rule
REASONS = (TEXT, ONLY, FINISH, CACHED, FAN_OUT, STICKY, ARTICLE)


class NoReplica(LookupError):
    """No replica of a stage that the request needs is available."""


class StagesFull(Exception):
    """Every available replica of a stage has all it may take; the message says which stage."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class StageChoice(NamedTuple):
    """One stage of a decision: the replica, its device, and the weight it was chosen by.

    Policy `cost`: predicted seconds, less is better. Policy `article`: the article's weight, more is better.
    """

    stage: Literal["encode", "decode"]
    replica: str
    device: str
    weight: float


class Alternative(NamedTuple):
    """The best placement of the other mode on the same decoder, and what its encode side costs."""

    mode: Mode
    device: str
    price_s: float


class Decision(NamedTuple):
    """A placement. `encoders` has one replica per image, in the order of the images."""

    encoders: tuple[str, ...]
    decoder: str
    mode: Mode  # serial: encoded on the decoder's own device; split: elsewhere; text: no image
    policy: str
    reason_kind: str  # one of REASONS
    stages: tuple[StageChoice, ...] = ()
    encode_s: float = 0.0  # predicted: waiting for the encoder, and encoding
    transfer_s: float = 0.0  # predicted: control hop and copy
    stall_s: float = 0.0  # price of the running decodes that wait meanwhile; not part of the finish
    wait_s: float = 0.0  # predicted: until the decoder has room
    prefill_s: float = 0.0
    step_s: float = 0.0  # predicted: per token of the answer
    finish_s: float = 0.0  # predicted: all of it, to the last token
    running: int = 0  # sequences on the decoder
    alternative: Alternative | None = None

    @property
    def encoder(self) -> str | None:
        """The encoder of the first image; None without images."""
        return self.encoders[0] if self.encoders else None

    @property
    def reason(self) -> str:
        """One line for a person."""
        place = f"{self.decoder} with {self.running} running, finish in {_time(self.finish_s)}"
        if self.mode == "text":
            return f"no image: the encoder is skipped; {place}"
        spread = ", ".join(dict.fromkeys(self.encoders))
        parts = f"{_time(self.encode_s)} + transfer {_time(self.transfer_s)}"
        stall = f" + stall {_time(self.stall_s)}" if self.stall_s else ""
        return f"{_WORDS[self.reason_kind]}{self.mode}: encode on {spread} {parts}{stall}{self._other()}; {place}"

    def _other(self) -> str:
        other = self.alternative
        if other is None:
            return ""
        return f", against {_time(other.price_s)} for {other.mode} on {other.device}"

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {
            "encoder": self.encoder,
            "encoders": list(self.encoders),
            "decoder": self.decoder,
            "mode": self.mode,
            "policy": self.policy,
            "reason": self.reason,
            "reason_kind": self.reason_kind,
            "stages": [
                {"stage": each.stage, "replica": each.replica, "device": each.device, "weight": _round(each.weight)}
                for each in self.stages
            ],
            "predicted": {
                "encode_s": _round(self.encode_s),
                "transfer_s": _round(self.transfer_s),
                "stall_s": _round(self.stall_s),
                "wait_s": _round(self.wait_s),
                "prefill_s": _round(self.prefill_s),
                "step_s": _round(self.step_s),
                "finish_s": _round(self.finish_s),
            },
        }

    def warning(self, limit_ms: float, observed_s: float | None = None) -> str | None:
        """One line when encode with transfer took, or will take, longer than `limit_ms`; else None."""
        seconds = self.encode_s + self.transfer_s if observed_s is None else observed_s
        if not self.encoders or seconds * 1000 <= limit_ms:
            return None
        verb = "are predicted to take" if observed_s is None else "took"
        spread = ", ".join(dict.fromkeys(self.encoders))
        return (
            f"encode and transfer ({spread} to {self.decoder}) {verb} {_time(seconds)}, more than {limit_ms:g} ms; "
            f"{self.mode}, predicted {_time(self.encode_s)} + {_time(self.transfer_s)}"
        )


_WORDS = {
    TEXT: "",
    ONLY: "the only choice, ",
    FINISH: "",
    CACHED: "a cache saves work, ",
    FAN_OUT: "images spread, ",
    STICKY: "kept, too little to gain, ",
    ARTICLE: "by free slots and NVLink, ",
}


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.0f} us"


def _round(seconds: float) -> float:
    return float(f"{seconds:.6g}")
