"""What can go wrong for a client, and what it can do about it.

    RelayClientError
    ├── InvalidRequest         [INVALID_ARGUMENT]    the request cannot be served as it is; retrying is no use
    │   └── ImageNotReadable                         raised before anything is sent: no such file, say
    ├── Unavailable            [UNAVAILABLE]         a stage died or the server is closing; a retry may help
    │   ├── Overloaded                               no room now; retry after `retry_after_s`
    │   └── RegionUnknown                            the server was restarted since shared memory was registered
    ├── DeadlineExceeded       [DEADLINE_EXCEEDED]   the request's own deadline passed
    ├── Cancelled              [CANCELLED]           this client cancelled, or closed the stream
    ├── ServerUnreachable                            nothing answers at the address, or the connection broke
    └── ServerError            [INTERNAL]            a fault of the server, or a message without a code

The server puts its code in brackets into every message, since gRPC streams carry no status of their own;
`from_message` reads it back, and `from_status` judges a call that ended without a message.
"""

from __future__ import annotations

import re


class RelayClientError(Exception):
    """A failed request: one line, without the server's `[CODE]`, which is the attribute `code`."""

    code = ""


class InvalidRequest(RelayClientError):
    """The request cannot be served as it is."""

    code = "INVALID_ARGUMENT"


class ImageNotReadable(InvalidRequest):
    """An image that is not there or cannot be read; nothing was sent."""


class Unavailable(RelayClientError):
    """The server cannot serve the request now; a retry may help."""

    code = "UNAVAILABLE"


class Overloaded(Unavailable):
    """No room now; the server expects some in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RegionUnknown(Unavailable):
    """The server does not know the shared memory of this client; it was restarted, and must be told again."""


class DeadlineExceeded(RelayClientError):
    """The deadline that the request carried has passed; more time can help."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(RelayClientError):
    """The request was cancelled, or its stream closed before the answer was complete."""

    code = "CANCELLED"


class ServerUnreachable(RelayClientError):
    """Nothing answers at the address, or the connection broke."""


class ServerError(RelayClientError):
    """A fault on the server's side; its log says more."""

    code = "INTERNAL"


_PREFIX = re.compile(r"\[(INVALID_ARGUMENT|UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED|INTERNAL)\]\s*")
_HINT = re.compile(r"retry after (\d+(?:\.\d+)?(?:e[+-]?\d+)?) s\b")
_BY_CODE: dict[str, type[RelayClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "INTERNAL": ServerError,
}
_REGION_UNKNOWN = "Unable to find shared memory region"
# Triton's own words, without a code, while a model loads, a stub is dead or the server is closing.
_NOT_SERVING = ("is not ready", "is not healthy", "no available versions", "unloading", "Server not ready")


def from_message(message: str) -> RelayClientError:
    """The error behind a server's message; Triton's own words may stand before the `[CODE]`."""
    line = " ".join(message.split())
    found = _PREFIX.search(line)
    if found is None and _REGION_UNKNOWN in line:
        return RegionUnknown(line)
    if found is None:
        return Unavailable(line) if any(words in line for words in _NOT_SERVING) else ServerError(line)
    text = line[found.end() :]
    hint = _HINT.search(text)
    if found.group(1) == "UNAVAILABLE" and hint is not None:
        return Overloaded(text, float(hint.group(1)))
    return _BY_CODE[found.group(1)](text)


def from_status(status: str, details: str, address: str, has_answered: bool) -> RelayClientError:
    """The error behind a call that ended with a gRPC status, by its name (`UNAVAILABLE`).

    `has_answered`: something had arrived before, so the server was there and the connection broke.
    """
    if _PREFIX.search(details):
        return from_message(details)
    if status == "UNAVAILABLE" and has_answered:
        return ServerUnreachable(f"lost the server at {address} in the middle of the answer: {_first(details)}")
    if status == "UNAVAILABLE":
        return ServerUnreachable(f"no server answers at {address}; start one with `vlm-relay serve`")
    if status == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(f"no answer from {address} within the deadline")
    if status == "CANCELLED":
        return Cancelled("the request was cancelled")
    if status == "UNIMPLEMENTED":
        return ServerUnreachable(f"what answers at {address} is not a Triton server's gRPC port")
    return ServerError(f"{status}: {_first(details)}")


def _first(details: str) -> str:
    return " ".join(details.split())[:200] or "no details"
