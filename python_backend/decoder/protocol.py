"""What a decoder replica needs of an engine: this project's own, or another behind the same few methods."""

from __future__ import annotations

from typing import Protocol

from python_backend.decoder.options import EngineStatus
from python_backend.decoder.sequence import DecodeRequest, Emit


class DecodingEngine(Protocol):
    """Prompts with image features in, tokens and text out. `Engine` documents the methods."""

    def start(self) -> None:
        """Begin to serve."""

    def close(self) -> None:
        """End all requests and stop."""

    def submit(self, request: DecodeRequest, emit: Emit) -> None:
        """Queue a request; `emit` gets its deltas, the last one final."""

    def cancel(self, request_id: str) -> bool:
        """End a request before its next token."""

    def status(self) -> EngineStatus:
        """Counts as of the end of the last step."""
