"""The shared cache with a real Redis: what one server put another gets, and a dead one costs next to nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis

from python_backend.transport.shared_cache import SharedCache

MODEL = b"m" * 16
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@dataclass
class Running:
    """A Redis of the test's own."""

    process: subprocess.Popen[bytes]
    url: str

    def die(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    binary = shutil.which("redis-server")
    assert binary, "redis-server is missing: `make redis` installs it"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    with redis.Redis.from_url(url) as client:
        assert wait_until(lambda: answers(client))
    yield Running(process, url)
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


@pytest.fixture
def join(server: Running) -> Iterator[Callable[..., SharedCache]]:
    """Joins the Redis as one more server."""
    joined: list[SharedCache] = []

    def one(fingerprint: bytes = MODEL, timeout_s: float = 0.02) -> SharedCache:
        joined.append(SharedCache(server.url, fingerprint, timeout_s))
        return joined[-1]

    yield one
    for cache in joined:
        cache.close()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def has(cache: SharedCache, key: bytes) -> bool:
    return cache.get([key])[0] is not None


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_one_server_put_another_gets(join: Callable[..., SharedCache], dtype: type[np.generic]) -> None:
    one, other = join(timeout_s=1.0), join(timeout_s=1.0)
    key = one.key(b"pixels")
    one.put(key, ROWS.astype(dtype))

    assert wait_until(lambda: has(other, other.key(b"pixels")))
    found, missing = other.get([key, other.key(b"other pixels")])
    assert found is not None
    assert (found.tolist(), found.dtype, missing) == (ROWS.tolist(), dtype, None)


def test_another_model_does_not_get_it(join: Callable[..., SharedCache]) -> None:
    one, other = join(timeout_s=1.0), join(b"n" * 16, timeout_s=1.0)
    one.put(one.key(b"pixels"), ROWS)
    assert wait_until(lambda: has(one, one.key(b"pixels")))

    assert not has(other, other.key(b"pixels"))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:-1] + b"x", lambda data: b"", lambda data: b"?" * 99]
)
def test_a_damaged_value_is_none(
    server: Running, join: Callable[..., SharedCache], damage: Callable[[bytes], bytes]
) -> None:
    cache = join(timeout_s=1.0)
    key = cache.key(b"pixels")
    cache.put(key, ROWS)
    assert wait_until(lambda: has(cache, key))
    with redis.Redis.from_url(server.url) as client:
        client.set(key, damage(client.get(key)))

    assert not has(cache, key)


def test_a_redis_that_died_is_not_asked_until_it_is_back(
    server: Running, join: Callable[..., SharedCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = join()
    server.die()
    cache.get([cache.key(b"pixels")])  # notices

    asked: list[object] = []
    monkeypatch.setattr(cache._reader, "mget", asked.append)
    assert cache.get([cache.key(b"pixels")]) == [None]
    cache.put(cache.key(b"pixels"), ROWS)
    assert (cache.is_up, asked, cache._queue.empty()) == (False, [], True)

    port = server.url.rsplit(":", 1)[1].split("/")[0]
    server.process = subprocess.Popen(
        ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", ""], stdout=subprocess.DEVNULL
    )
    assert wait_until(lambda: cache.is_up)
    server.die()


def test_a_redis_that_hangs_is_waited_for_once(server: Running, join: Callable[..., SharedCache]) -> None:
    cache = join()
    assert cache.is_up
    os.kill(server.process.pid, signal.SIGSTOP)

    cache.get([cache.key(b"pixels")])
    assert not cache.is_up

    os.kill(server.process.pid, signal.SIGCONT)
    assert wait_until(lambda: cache.is_up)


def test_no_redis_at_the_start_is_no_error() -> None:
    cache = SharedCache("redis://127.0.0.1:1/0", MODEL, 0.02)

    assert (cache.is_up, cache.get([cache.key(b"pixels")])) == (False, [None])
    cache.close()
