from __future__ import annotations

import pytest

from client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RelayClientError,
    ServerError,
    ServerUnreachable,
    Unavailable,
    from_message,
    from_status,
)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("[INVALID_ARGUMENT] no prompt", InvalidRequest, "no prompt"),
        ("[UNAVAILABLE] the decoder died", Unavailable, "the decoder died"),
        ("[UNAVAILABLE] full; retry after 2 s", Overloaded, "full; retry after 2 s"),
        ("[DEADLINE_EXCEEDED] 100 ms passed", DeadlineExceeded, "100 ms passed"),
        ("[CANCELLED] the client went away", Cancelled, "the client went away"),
        ("[INTERNAL] see the log", ServerError, "see the log"),
        ("in ensemble 'x', [StatusCode.INTERNAL] [UNAVAILABLE] gone", Unavailable, "gone"),
        ("Request for unknown model: 'llava' is not found", ServerError, None),
        ("Request for unknown model: 'llava' has no available versions", Unavailable, None),
        ("Stub process 'llava_0_0' is not healthy.", Unavailable, None),
        ("several\nlines", ServerError, "several lines"),
    ],
)
def test_the_code_anywhere_in_a_message_decides_the_error(
    message: str, kind: type[RelayClientError], text: str | None
) -> None:
    error = from_message(message)

    assert type(error) is kind
    assert str(error) == (message if text is None else text)


@pytest.mark.parametrize(("hint", "seconds"), [("2", 2.0), ("0.25", 0.25), ("1.5e-05", 1.5e-05), ("1e+02", 100.0)])
def test_an_overload_carries_the_servers_hint(hint: str, seconds: float) -> None:
    error = from_message(f"[UNAVAILABLE] the queue is full; retry after {hint} s")

    assert isinstance(error, Overloaded)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize(
    ("status", "details", "has_answered", "kind", "words"),
    [
        ("UNAVAILABLE", "connection refused", False, ServerUnreachable, "vlm-relay serve"),
        ("UNAVAILABLE", "Socket closed", True, ServerUnreachable, "in the middle of the answer"),
        ("UNAVAILABLE", "[UNAVAILABLE] full; retry after 1 s", False, Overloaded, "full; retry after 1 s"),
        ("DEADLINE_EXCEEDED", "", False, DeadlineExceeded, "within the deadline"),
        ("CANCELLED", "", False, Cancelled, "cancelled"),
        ("UNIMPLEMENTED", "", False, ServerUnreachable, "not a Triton server"),
        ("RESOURCE_EXHAUSTED", "too large", False, ServerError, "RESOURCE_EXHAUSTED: too large"),
    ],
)
def test_a_status_without_a_message_is_judged_by_what_had_arrived(
    status: str, details: str, has_answered: bool, kind: type[RelayClientError], words: str
) -> None:
    error = from_status(status, details, "127.0.0.1:8001", has_answered)

    assert type(error) is kind
    assert words in str(error)


def test_an_unreachable_server_is_named_by_its_address() -> None:
    error = from_status("UNAVAILABLE", "connection refused", "127.0.0.1:8001", has_answered=False)

    assert "127.0.0.1:8001" in str(error)
