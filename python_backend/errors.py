"""The errors of the serving side, and the Triton status each becomes.

    RelayError
    ├── InvalidRequest        INVALID_ARGUMENT    the request cannot be served as it is; retrying is no use
    │   ├── InvalidPrompt                         text, messages or image marks
    │   ├── InvalidImage                          an image that cannot be read or is too large
    │   ├── InvalidSampling                       a sampling parameter
    │   └── HandleRefused                         forged, foreign or malformed embedding handle
    ├── EmbeddingGone         UNAVAILABLE         the slot was given to a newer embedding; encoding again helps
    ├── Overloaded            UNAVAILABLE         a queue or a cache is full; retry after `retry_after_s`
    ├── PeerGone              UNAVAILABLE         a stage died or does not answer; retry
    ├── DeadlineExceeded      DEADLINE_EXCEEDED   the request's own deadline passed
    ├── Cancelled             CANCELLED           the client went away or cancelled
    └── InternalError         INTERNAL            our bug

Triton has eight status codes and its older releases flatten the code of a BLS child to INTERNAL, so a
message always starts with its code in brackets, and `from_message` reads it back.
"""

from __future__ import annotations

import re


class RelayError(Exception):
    """An error a client may see: one clear line, behind a stable `[CODE]`."""

    code = "INTERNAL"
    triton_status = "INTERNAL"  # the attribute of pb_utils.TritonError

    def __str__(self) -> str:
        return f"[{self.code}] {super().__str__()}"

    @property
    def text(self) -> str:
        """The message without its code."""
        return super().__str__()


class InvalidRequest(RelayError):
    """The request cannot be served as it is."""

    code = "INVALID_ARGUMENT"
    triton_status = "INVALID_ARG"


class InvalidPrompt(InvalidRequest):
    """The text, the messages or the image marks are wrong, or the prompt does not fit the context."""


class InvalidImage(InvalidRequest):
    """An image is missing, unreadable, of a format not served, or too large."""


class InvalidSampling(InvalidRequest):
    """A sampling parameter is unknown, of the wrong type or out of range."""


class HandleRefused(InvalidRequest):
    """An embedding handle that this server did not issue, or issued for another model or layout."""


class EmbeddingGone(RelayError):
    """The slot behind the handle holds a newer embedding, or its segment is gone."""

    code = "UNAVAILABLE"
    triton_status = "UNAVAILABLE"


class Overloaded(RelayError):
    """No room now; `retry_after_s` is a hint for the client."""

    code = "UNAVAILABLE"
    triton_status = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{message}; retry after {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class PeerGone(RelayError):
    """A stage of the pipeline died or does not answer."""

    code = "UNAVAILABLE"
    triton_status = "UNAVAILABLE"


class DeadlineExceeded(RelayError):
    """The deadline that the request carried has passed."""

    code = "DEADLINE_EXCEEDED"
    triton_status = "CANCELLED"


class Cancelled(RelayError):
    """The client cancelled the request or went away."""

    code = "CANCELLED"
    triton_status = "CANCELLED"


class InternalError(RelayError):
    """Our own bug; the log has the traceback."""


_PREFIX = re.compile(r"\[(INVALID_ARGUMENT|UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED|INTERNAL)\] ")
_RETRY_HINT = re.compile(r"; retry after ([0-9.e+-]+) s$")
_BY_CODE: dict[str, type[RelayError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "UNAVAILABLE": PeerGone,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "INTERNAL": InternalError,
}


def from_message(message: str) -> RelayError:
    """The error whose text a stage sent; one without a known `[CODE]` becomes `PeerGone`.

    Triton writes its own words before ours, so the code is looked for anywhere in the message. Text without
    a code comes from Triton itself (an unhealthy stub, a model not ready): the stage cannot answer.
    """
    found = _PREFIX.search(message)
    if found is None:
        return PeerGone(message)
    text = message[found.end() :]
    hint = _RETRY_HINT.search(text)
    if found.group(1) == "UNAVAILABLE" and hint is not None:
        return Overloaded(text[: hint.start()], float(hint.group(1)))
    return _BY_CODE[found.group(1)](text)
