"""The encode stage with a real store: what is encoded once, what fails alone, and that all comes back."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from python_backend.errors import RelayError
from python_backend.transport.boot import BootKey, boot_key
from python_backend.transport.handle import fingerprint_of
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.reader import EmbeddingReader
from python_backend.transport.segment import Rows, Segment
from python_backend.transport.store import EmbeddingStore
from python_backend.vision.stage import Encoded, EncodeStage
from tests.unit.serving.fakes import Clock, FakeMeter

ROWS, WIDTH, SLOTS = 4, 8, 3


class MeanPreprocessor:
    """One number per picture: the mean of its values."""

    def pixels(self, images: list[Image.Image]) -> npt.NDArray[np.float32]:
        return np.array([np.asarray(image).mean() for image in images], np.float32)


class FakeEncoder:
    """Features that are the picture's number everywhere; notes its batches."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.error: Exception | None = None
        self.max_batch = 64

    def encode(self, pixels: npt.NDArray[np.float32]) -> list[Rows]:
        self.batches.append(pixels.tolist())
        if self.error is not None:
            raise self.error
        return list(np.broadcast_to(pixels[:, None, None], (len(pixels), ROWS, WIDTH)))

    def close(self) -> None:
        pass


@dataclass
class Bench:
    """A stage with all that it holds."""

    stage: EncodeStage
    encoder: FakeEncoder
    store: EmbeddingStore
    meter: FakeMeter
    reader: EmbeddingReader

    def run(self, *files: bytes) -> list[object]:
        """Each result as the values read behind its handle and whether it was cached, or as the error."""
        return [self._told(result) for result in self.stage.run(files)]

    def hold(self, *files: bytes) -> list[Encoded]:
        """Encodes files, with their leases kept."""
        results = self.stage.run(files)
        assert all(isinstance(result, Encoded) for result in results)
        return results  # type: ignore[return-value]

    def _told(self, result: Encoded | RelayError) -> object:
        if isinstance(result, RelayError):
            return str(result)
        embedding = self.reader.read(result.handle)
        values = set(np.asarray(embedding, np.float32).ravel().tolist())
        self.reader.release(result.handle)
        return (values.pop() if len(values) == 1 else values, result.is_cached)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A directory of its own in /dev/shm; at the end nothing may be left in it but the key of the boot."""
    with tempfile.TemporaryDirectory(prefix="vlm_relay_test.", dir="/dev/shm") as name:
        yield Path(name)
        left = [entry.name for entry in Path(name).iterdir() if not entry.name.startswith("vlm_relay.boot.")]
        assert left == []


@pytest.fixture
def boot(shared_memory: Path) -> BootKey:
    return boot_key(os.getppid(), shared_memory)


@pytest.fixture(params=["float32", "float16"])
def bench(shared_memory: Path, boot: BootKey, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A stage over a store of three slots; at the end no lease is out."""
    layout = SegmentLayout(num_slots=SLOTS, slot_bytes=ROWS * WIDTH * 4, num_leases=2 * SLOTS)
    segment = Segment.create(boot.id, layout, shared_memory)
    clock = Clock()
    store = EmbeddingStore(segment, fingerprint_of("a model"), clock, lease_s=120.0)
    encoder, meter = FakeEncoder(), FakeMeter()
    stage = EncodeStage(MeanPreprocessor(), encoder, store, boot, request.param, meter, clock)  # type: ignore[arg-type]
    reader = EmbeddingReader(shared_memory)
    yield Bench(stage, encoder, store, meter, reader)
    store.sweep(clock())
    assert store.counts.num_leases_out == 0
    reader.close()
    store.close()


def grey(value: int, kind: str = "PNG", size: tuple[int, int] = (4, 4)) -> bytes:
    """The file of a picture that is the same everywhere."""
    file = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(file, kind)
    return file.getvalue()


FULL = "[UNAVAILABLE] embedding store"


def test_new_pictures_are_encoded_together_in_order(bench: Bench) -> None:
    assert bench.run(grey(1), grey(2), grey(3)) == [(1.0, False), (2.0, False), (3.0, False)]
    assert bench.encoder.batches == [[1.0, 2.0, 3.0]]


def test_a_picture_twice_in_a_batch_is_encoded_once(bench: Bench) -> None:
    assert bench.run(grey(1), grey(2), grey(1)) == [(1.0, False), (2.0, False), (1.0, True)]
    assert bench.encoder.batches == [[1.0, 2.0]]


def test_a_picture_in_two_batches_is_encoded_once(bench: Bench) -> None:
    assert bench.run(grey(1)) == [(1.0, False)]
    assert bench.run(grey(1), grey(2)) == [(1.0, True), (2.0, False)]
    assert bench.encoder.batches == [[1.0], [2.0]]


def test_the_same_pixels_in_two_formats_are_one_embedding(bench: Bench) -> None:
    assert bench.run(grey(1, "PNG"), grey(1, "BMP")) == [(1.0, False), (1.0, True)]
    assert bench.run(grey(1, "TIFF")) == [(1.0, True)]
    assert bench.encoder.batches == [[1.0]]


def test_the_same_values_in_another_shape_are_another_picture(bench: Bench) -> None:
    assert bench.run(grey(1, size=(2, 8)), grey(1, size=(8, 2))) == [(1.0, False), (1.0, False)]


def test_a_broken_image_fails_alone(bench: Bench) -> None:
    assert bench.run(grey(1), b"no image", grey(2)) == [
        (1.0, False),
        "[INVALID_ARGUMENT] not an image (it starts with b'no image'); allowed: JPEG, PNG, WEBP, GIF, BMP, TIFF as raw "
        "bytes, base64 or a data: URI",
        (2.0, False),
    ]


def test_an_encoder_that_raises_fails_its_images_only(bench: Bench) -> None:
    bench.run(grey(1))
    bench.encoder.error = RuntimeError("never shown")

    failed = bench.run(grey(1), grey(2), grey(2))

    assert failed == [(1.0, True)] + ["[INTERNAL] the encoder failed: RuntimeError"] * 2
    bench.encoder.error = None
    assert bench.run(grey(2)) == [(2.0, False)]  # and is not thought to be known


def test_a_full_store_refuses_what_does_not_fit_and_serves_the_rest(bench: Bench) -> None:
    held = bench.hold(grey(1), grey(2))

    third, fourth = bench.run(grey(3), grey(4))
    again = bench.run(grey(1))

    assert third == (3.0, False)
    assert isinstance(fourth, str)
    assert fourth.startswith(FULL)
    assert "of 3 slots 3 are leased" in fourth
    assert fourth.endswith("retry after 1 s")
    assert again == [(1.0, True)]
    for encoded in held:
        bench.reader.release(encoded.handle)
    assert bench.run(grey(4)) == [(4.0, False)]


def test_one_picture_wanted_by_more_than_there_are_leases_is_refused_to_the_last_only(bench: Bench) -> None:
    results = bench.run(*[grey(1)] * (2 * SLOTS + 1))

    assert results[: 2 * SLOTS] == [(1.0, False), *[(1.0, True)] * (2 * SLOTS - 1)]
    assert str(results[-1]).startswith(FULL)
    assert "all 6 leases are out" in str(results[-1])


def test_an_evicted_picture_is_encoded_again(bench: Bench) -> None:
    for value in range(1, SLOTS + 2):
        bench.run(grey(value))

    assert bench.run(grey(1)) == [(1.0, False)]
    assert bench.encoder.batches[-1] == [1.0]


def test_hits_misses_and_batches_are_counted(bench: Bench) -> None:
    bench.run(grey(1), grey(2))
    bench.run(grey(1))

    assert bench.meter.counters == {
        "vlm_relay_embedding_misses_total": 2.0,
        "vlm_relay_embedding_hits_total": 1.0,
    }
    assert bench.meter.observed == ["vlm_relay_encode_batch_images", "vlm_relay_encode_seconds"]


def test_nothing_to_do_encodes_nothing(bench: Bench) -> None:
    assert bench.run() == []
    assert bench.encoder.batches == []


def test_more_new_pictures_than_the_encoder_takes_are_encoded_in_turns(bench: Bench) -> None:
    bench.encoder.max_batch = 2

    results = bench.run(*(grey(number) for number in (1, 2, 3)))

    assert results == [(1.0, False), (2.0, False), (3.0, False)]
    assert bench.encoder.batches == [[1.0, 2.0], [3.0]]


def test_an_embedding_that_cannot_be_stored_fails_alone_and_its_slot_is_free(bench: Bench) -> None:
    encode = bench.encoder.encode

    def broken(pixels: npt.NDArray[np.float32]) -> list[Rows]:
        return [np.full((ROWS, WIDTH), "no number", dtype=object), *encode(pixels)[1:]]

    bench.encoder.encode = broken  # type: ignore[method-assign]
    results = bench.run(grey(1), grey(2))

    assert results == ["[INTERNAL] the embedding could not be stored: ValueError", (2.0, False)]
    bench.encoder.encode = encode  # type: ignore[method-assign]
    assert bench.run(grey(1), grey(3)) == [(1.0, False), (3.0, False)]


class OtherServers:
    """A shared cache in which another server has left some embeddings."""

    is_up = True

    def __init__(self) -> None:
        self.kept: dict[bytes, npt.NDArray[np.generic]] = {}

    def key(self, pixels: bytes) -> bytes:
        return hashlib.blake2b(pixels).digest()

    def get(self, keys: Sequence[bytes]) -> list[npt.NDArray[np.generic] | None]:
        return [self.kept.get(key) for key in keys]

    def put(self, key: bytes, rows: npt.NDArray[np.generic]) -> None:
        self.kept[key] = rows.copy()


def test_what_another_server_encoded_is_not_encoded_again(bench: Bench) -> None:
    bench.stage._shared = others = OtherServers()  # type: ignore[assignment]
    assert bench.run(grey(1)) == [(1.0, False)]
    (rows,) = others.kept.values()
    for value in range(2, SLOTS + 2):  # until the first is no longer in the store
        bench.run(grey(value))

    assert bench.run(grey(1), grey(9)) == [(1.0, True), (9.0, False)]
    assert bench.encoder.batches[-1] == [9.0]
    assert rows.dtype == bench.stage._dtype
    assert bench.meter.counters["vlm_relay_shared_cache_hits_total"] == 1.0
