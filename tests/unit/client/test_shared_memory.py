"""Large images by shared memory: placed, told once, given back, and gone with the client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import AsyncRelayClient, InvalidRequest, RelayClient, Unavailable
from client.shared_memory import Piece, SharedMemory
from tests.unit.client.scripted import ScriptedServer

LARGE = [bytes([number]) * (200 << 10) for number in (1, 2)]
GONE = "Unable to find shared memory region: 'vlm_relay_client_1'"


def _files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("vlm_relay_client_*")}


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """One MiB; at the end all of it must be free, and nothing left in /dev/shm."""
    before = _files()
    made = SharedMemory("right", region_bytes=1 << 20, least_bytes=1000)
    yield made
    assert made.num_free_bytes == 1 << 20
    made.close()
    assert _files() == before


def _read(piece: Piece) -> bytes:
    raw = (Path("/dev/shm") / piece.region).read_bytes()
    return raw[piece.offset : piece.offset + piece.num_bytes]


def test_images_lie_there_as_a_bytes_tensor(memory: SharedMemory) -> None:
    piece = memory.place([b"a" * 1000, b"bc"])

    assert piece is not None
    assert _read(piece) == b"\xe8\x03\x00\x00" + b"a" * 1000 + b"\x02\x00\x00\x00bc"
    assert (Path("/dev/shm") / piece.region).stat().st_mode & 0o777 == 0o600
    memory.free(piece)


def test_small_images_and_those_without_room_go_in_the_message(memory: SharedMemory) -> None:
    first = memory.place([bytes(900 << 10)])

    assert memory.place([b"small"]) is None
    assert memory.place([bytes(200 << 10)]) is None
    assert first is not None
    memory.free(first)


def test_a_full_shared_memory_is_no_crash(monkeypatch: pytest.MonkeyPatch, memory: SharedMemory) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("client.shared_memory.os.posix_fallocate", full)

    assert memory.place([bytes(2000)]) is None


def test_no_two_pieces_overlap_and_all_of_it_can_be_lent_again(memory: SharedMemory) -> None:
    chance = random.Random(1)
    lent: list[tuple[Piece, bytes]] = []
    for _ in range(300):
        image = chance.randbytes(chance.randrange(1000, 200_000))
        piece = memory.place([image])
        if piece is not None:
            lent.append((piece, image))
        if piece is None or chance.random() < 0.4:
            memory.free(lent.pop(chance.randrange(len(lent)))[0])
        assert all(_read(each)[4:] == image for each, image in lent)
    for each, _ in lent:
        memory.free(each)

    whole = memory.place([bytes((1 << 20) - 4)])
    assert whole is not None
    memory.free(whole)


def test_a_client_tells_its_region_once_and_takes_it_back(server: ScriptedServer) -> None:
    before = _files()
    server.play([server.chunk("a car", "stop"), server.final()])
    with RelayClient(server.address, shared_memory_key="right") as client:
        for _ in range(2):
            client.ask("What?", images=LARGE)
            assert server.images() == LARGE
            assert sum(map(len, server.requests[-1].raw_input_contents)) < 1000
        client.ask("What?", images=[b"small"])
        assert server.images() == [b"small"]
        assert server.num_registered == 1

    assert server.regions == {}
    assert _files() == before


def test_the_asyncio_client_does_the_same(server: ScriptedServer) -> None:
    before = _files()
    server.play([server.chunk("a car", "stop"), server.final()])

    async def ask() -> None:
        async with AsyncRelayClient(server.address, shared_memory_key="right") as client:
            await asyncio.gather(*(client.ask("What?", images=LARGE) for _ in range(8)))
            assert [server.images(call) for call in range(8)] == [LARGE] * 8

    asyncio.run(ask())

    assert server.regions == {}
    assert _files() == before


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_server_that_was_restarted_is_told_again(server: ScriptedServer, kind: str) -> None:
    def lose(context: object, ended: object) -> None:
        server.regions.clear()
        return server.fail(GONE)(context, ended)  # type: ignore[arg-type, return-value]

    server.play([lose, server.final()], [server.chunk("a car", "stop"), server.final()])  # type: ignore[list-item]

    async def ask() -> None:
        async with AsyncRelayClient(server.address, shared_memory_key="right") as client:
            await client.ask("What?", images=LARGE)
            assert server.images() == LARGE

    if kind == "async":
        asyncio.run(ask())
    else:
        with RelayClient(server.address, shared_memory_key="right") as client:
            client.ask("What?", images=LARGE)
            assert server.images() == LARGE

    assert (server.num_registered, len(server.requests)) == (2, 2)


def test_a_server_that_never_knows_the_region_is_not_asked_for_ever(server: ScriptedServer) -> None:
    server.play([server.fail(GONE), server.final()])

    with RelayClient(server.address, shared_memory_key="right") as client, pytest.raises(Unavailable, match="region"):
        client.ask("What?", images=LARGE)

    assert len(server.requests) == 2


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_wrong_key_is_said_before_anything_is_asked(server: ScriptedServer, kind: str) -> None:
    async def ask() -> None:
        async with AsyncRelayClient(server.address, shared_memory_key="wrong") as client:
            await client.ask("What?", images=LARGE)

    def ask_now() -> None:
        with RelayClient(server.address, shared_memory_key="wrong") as client:
            client.ask("What?", images=LARGE)

    with pytest.raises(InvalidRequest, match="VLM_RELAY_SHM_KEY"):
        asyncio.run(ask()) if kind == "async" else ask_now()

    assert server.requests == []
