"""A sequence in a simulated decoder: counts instead of tokens."""

from __future__ import annotations

from typing import Protocol


class SequenceJob(Protocol):
    """What a sequence tells its request."""

    def token(self, sequence: SimulatedSequence) -> None:
        """Its first token here was given."""

    def finished(self, sequence: SimulatedSequence) -> None:
        """Its last token was given."""


class SimulatedSequence:
    """A sequence: its known tokens, and how many are in the cache."""

    __slots__ = (
        "blocks",
        "finish_step",
        "is_cancelled",
        "job",
        "join_step",
        "known",
        "left",
        "num_computed",
        "num_given",
    )

    def __init__(self, job: SequenceJob, prompt_tokens: int, output_tokens: int) -> None:
        self.job = job
        self.known = prompt_tokens  # tokens known when it last started
        self.left = output_tokens  # tokens to give
        self.num_computed = 0  # of the known ones; while it decodes, when it joined
        self.num_given = 0  # here
        self.blocks = 0  # when it was admitted
        self.join_step = -1  # of the first decode step; -1: it does not decode
        self.finish_step = -1  # after so many steps it has ended
        self.is_cancelled = False
