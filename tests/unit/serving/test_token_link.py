"""Tokens over the socket: each request gets its own lines, and hears of it when its decoder is gone."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator

import pytest

from python_backend.errors import PeerGone
from python_backend.token_link import Line, TokenLink, TokenSender, address


def line(request_id: str, text: str, finish_reason: str = "") -> Line:
    """What a decoder sends."""
    return {"request_id": request_id, "text": text, "finish_reason": finish_reason}


@pytest.fixture
def boot_id() -> str:
    """A boot that no other test has."""
    return secrets.token_hex(8)


@pytest.fixture
def link(boot_id: str) -> Iterator[TokenLink]:
    """The scheduler's end; nobody waits for lines when the test is over."""
    link = TokenLink(boot_id)
    yield link
    assert link._waiting == {}
    link.close()


@pytest.fixture
def decoder(link: TokenLink, boot_id: str) -> Iterator[TokenSender]:
    """A decoder's end."""
    sender = TokenSender(boot_id, "d")
    yield sender
    sender.close()


def test_each_request_gets_its_own_lines_until_the_last(link: TokenLink, decoder: TokenSender) -> None:
    with link.open("d", "1") as first, link.open("d", "2") as second:
        for each in (line("1", "a"), line("2", "x", "length"), line("1", "b", "stop")):
            decoder.send(each)

        assert list(first) == [line("1", "a"), line("1", "b", "stop")]
        assert list(second) == [line("2", "x", "length")]


def test_lines_that_nobody_waits_for_hold_up_no_others(link: TokenLink, decoder: TokenSender) -> None:
    with link.open("d", "1") as lines:
        decoder.send(line("gone", "a", "stop"))
        decoder.send(line("1", "b", "stop"))

        assert list(lines) == [line("1", "b", "stop")]


def test_a_decoder_that_goes_away_ends_its_requests_and_no_others(
    link: TokenLink, decoder: TokenSender, boot_id: str
) -> None:
    other = TokenSender(boot_id, "e")
    with link.open("d", "1") as lines, link.open("e", "2") as others:
        decoder.send(line("1", "a"))
        assert next(lines)["text"] == "a"

        decoder.close()

        with pytest.raises(PeerGone, match="d died; retry"):
            next(lines)
        other.send(line("2", "b", "stop"))
        assert list(others) == [line("2", "b", "stop")]
    other.close()


@pytest.mark.parametrize("data", [b"no JSON\n", b'{"text": "of nobody"}\n', b"[]\n"])
def test_a_decoder_that_talks_nonsense_ends_its_requests(link: TokenLink, boot_id: str, data: bytes) -> None:
    with link.open("d", "1") as lines, socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address(boot_id))
        peer.sendall(b'"d"\n' + data)

        with pytest.raises(PeerGone):
            next(lines)


def test_a_sender_connects_again_after_the_scheduler_was_gone(boot_id: str) -> None:
    sender = TokenSender(boot_id, "d")
    with pytest.raises(OSError, match="refused"):
        sender.send(line("1", "a"))

    link = TokenLink(boot_id)
    with link.open("d", "1") as lines:
        sender.send(line("1", "b", "stop"))
        assert list(lines) == [line("1", "b", "stop")]
    sender.close()
    link.close()


def test_many_decoders_may_send_at_the_same_time(link: TokenLink, boot_id: str) -> None:
    def decode(name: str) -> None:
        sender = TokenSender(boot_id, name)
        for number in range(200):
            sender.send(line(name, str(number), "stop" if number == 199 else ""))
        sender.close()

    names = ("d0", "d1", "d2")
    with link.open("d0", "d0") as first, link.open("d1", "d1") as second, link.open("d2", "d2") as third:
        threads = [threading.Thread(target=decode, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for lines in (first, second, third):
            assert [each["text"] for each in lines] == [str(number) for number in range(200)]
        for thread in threads:
            thread.join()
