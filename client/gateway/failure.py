"""Errors as OpenAI's clients know them: a status, and `{"error": {message, type, param, code}}`.

InvalidRequest      400  invalid_request_error
(no key)            401  authentication_error    invalid_api_key
(no such model)     404  invalid_request_error   model_not_found
(body too large)    413  invalid_request_error
Overloaded          429  rate_limit_error        with Retry-After
Unavailable,
ServerUnreachable,
Cancelled           503  service_unavailable     with Retry-After
DeadlineExceeded    504  timeout_error
anything else       500  server_error
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RelayClientError,
    ServerUnreachable,
    Unavailable,
)

RETRY_AFTER_S = 1  # when the server gave no hint of its own
_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request, ready to be told."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The JSON object of the error."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def json(self) -> str:
        """`body` as one line."""
        return json.dumps(self.body(), separators=(",", ":"))


class Refused(Exception):
    """Raised by what finds a request wrong before the server is asked."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(status, message, param, code)


def failure_from(error: RelayClientError) -> Failure:
    """The failure behind a client library's error."""
    message = str(error)
    if isinstance(error, InvalidRequest):
        # The one code that clients act on: they shorten the conversation and ask again.
        code = "context_length_exceeded" if "the context holds" in message else None
        return Failure(400, message, "messages" if code else None, code)
    if isinstance(error, Overloaded):
        return Failure(429, message, code="overloaded", headers=_retry_after(error.retry_after_s))
    if isinstance(error, DeadlineExceeded):
        return Failure(504, message, code="deadline_exceeded")
    if isinstance(error, Unavailable | ServerUnreachable | Cancelled):
        return Failure(503, message, code="unavailable", headers=_retry_after(RETRY_AFTER_S))
    return Failure(500, message)


def too_busy(message: str) -> Failure:
    """The gateway's own refusal when its limits are reached."""
    return Failure(429, message, code="overloaded", headers=_retry_after(RETRY_AFTER_S))


def no_key(is_given: bool) -> Failure:
    """The answer to a request without a key, or with a wrong one."""
    message = "the API key is wrong" if is_given else "an API key is needed: Authorization: Bearer KEY"
    return Failure(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def no_model(asked: str, served: str) -> Refused:
    """The answer to a model name that is not served."""
    message = f"The model {asked!r} does not exist; this server has {served!r}"
    return Refused(message, "model", status=404, code="model_not_found")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
