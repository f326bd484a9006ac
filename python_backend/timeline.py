"""When one request passed its stations: what its metrics and the spans of its trace are made of.

    arrived ─queue─▶ started ─decide─▶ placed ─encode─▶ sent ─transfer─▶ landed ─wait─▶ first step ─prefill─▶
    first token ─decode─▶ ended

All times are on the machine's monotonic clock, which the stages' processes share. Each station of a request is
noted by one thread; a request that is tried again has the stations of every attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Attribute = str | int | float


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a request's life."""

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


class Timeline:
    """The spans of one request, in the order in which they ended."""

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.spans: list[Span] = []

    def add(self, name: str, began_s: float, ended_s: float, **attributes: Attribute) -> None:
        """Notes a stretch that is over."""
        self.spans.append(Span(name, began_s, ended_s, attributes))

    def add_decoding(self, decoder: str, sent_s: float, ended_s: float, times: Mapping[str, float]) -> None:
        """Notes what a decoder told of an answer: `landed_s`, `started_s` and `first_token_s`, as far as it got."""
        marks = [("transfer", "landed_s"), ("wait", "started_s"), ("prefill", "first_token_s")]
        began_s = sent_s
        for name, key in marks:
            if key not in times:
                break
            self.add(name, began_s, times[key], decoder=decoder)
            began_s = times[key]
        else:
            marks = []
        self.add("decode" if not marks else "lost", began_s, ended_s, decoder=decoder)
