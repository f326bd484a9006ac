"""The second level of the embedding cache: Redis, shared by servers of the same model.

    get ──▶ up? ── no ──▶ nothing, at once          one thread of its own: pings, and puts what was queued
              └─ yes ─▶ one MGET within `timeout_s` ── late or refused ──▶ down, until a ping is answered

So a Redis that died costs one refused connection, one that hangs one `timeout_s`, and after that nothing.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

logger = logging.getLogger(__name__)

PING_S = 0.25
WRITE_TIMEOUT_S = 1.0  # of the cache's own thread, which nobody waits for
MAX_QUEUED = 64  # embeddings waiting to be put; more are dropped: it is only a cache
KEEP_S = 86_400  # Redis forgets them after a day, or before, by its own limit of memory
PREFIX = b"vlm-relay:"
_DTYPES: dict[bytes, np.dtype[Any]] = {b"f2": np.dtype(np.float16), b"f4": np.dtype(np.float32)}
_HEADER = struct.Struct("<4s2sII16s")  # mark, dtype, rows, width, digest of the values
_MARK = b"VRE1"


class SharedCache:
    """Embeddings by the pixels they were made from. `fingerprint` says of which model and dtype.

    One thread gets; another one, its own, puts and looks whether Redis is there.
    """

    def __init__(self, url: str, fingerprint: bytes, timeout_s: float) -> None:
        self._fingerprint = fingerprint
        self._reader = _connect(url, timeout_s)
        self._writer = _connect(url, WRITE_TIMEOUT_S)
        self._where = url.rsplit("@", 1)[-1]  # without a password
        self._is_up = False
        self._queue: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue(MAX_QUEUED)
        self._is_closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._work, name="shared cache", daemon=True)
        self._thread.start()

    @property
    def is_up(self) -> bool:
        """Whether Redis answered the last time."""
        return self._is_up

    def key(self, pixels: bytes) -> bytes:
        """The key of an image, by all that says what it looks like."""
        return PREFIX + self._fingerprint + hashlib.blake2b(pixels, digest_size=32, person=b"relay shared").digest()

    def get(self, keys: Sequence[bytes]) -> list[npt.NDArray[np.generic] | None]:
        """The embeddings (rows, width) that are there, by key; None for each that is not, or when Redis is not."""
        if not self._is_up or not keys:
            return [None] * len(keys)
        try:
            values = self._reader.mget(keys)
            return [_unpack(value) if isinstance(value, bytes) else None for value in values]
        except redis.RedisError as error:
            self._down(error)
            return [None] * len(keys)

    def put(self, key: bytes, rows: npt.NDArray[np.generic]) -> None:
        """Has an embedding kept, soon; dropped when Redis is not there or too much waits already."""
        if self._is_up and not self._queue.full():
            self._queue.put_nowait((key, _pack(rows)))

    def close(self) -> None:
        """Puts what waits, and lets go of Redis."""
        self._is_closed.set()
        if not self._queue.full():
            self._queue.put_nowait(None)  # wakes the thread
        self._thread.join(timeout=5)
        self._reader.close()
        self._writer.close()

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=PING_S)
            except queue.Empty:
                item = None
            if item is None:
                if self._is_closed.is_set():
                    return
                self._look()
                continue
            try:
                self._writer.set(item[0], item[1], ex=KEEP_S)
            except redis.RedisError as error:
                self._down(error)

    def _look(self) -> None:
        try:
            self._writer.ping()
        except redis.RedisError as error:
            self._down(error)
            return
        if not self._is_up:
            logger.info("shared cache: Redis at %s answers", self._where)
            self._is_up = True

    def _down(self, error: Exception) -> None:
        if self._is_up:
            logger.warning("shared cache: Redis at %s does not answer, going on without: %s", self._where, error)
        self._is_up = False


def _connect(url: str, timeout_s: float) -> redis.Redis:
    """A client that tries once: redis-py's own retries hold a caller for seconds."""
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)


def _pack(rows: npt.NDArray[np.generic]) -> bytes:
    name = next(name for name, dtype in _DTYPES.items() if dtype == rows.dtype)
    values = np.ascontiguousarray(rows).tobytes()
    return _HEADER.pack(_MARK, name, rows.shape[0], rows.shape[1], _digest(values)) + values


def _unpack(data: bytes) -> npt.NDArray[np.generic] | None:
    """The embedding in a value; None for one that is damaged or of another version."""
    if len(data) < _HEADER.size:
        return None
    mark, name, num_rows, width, digest = _HEADER.unpack_from(data)
    values = data[_HEADER.size :]
    dtype = _DTYPES.get(name)
    if mark != _MARK or dtype is None or len(values) != num_rows * width * dtype.itemsize or digest != _digest(values):
        return None
    rows: npt.NDArray[np.generic] = np.frombuffer(values, dtype).reshape(num_rows, width)
    return rows


def _digest(values: bytes) -> bytes:
    return hashlib.blake2b(values, digest_size=16).digest()
