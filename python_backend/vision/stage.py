"""Images to leased embeddings: decode, look up, encode together what is new, put it into the store."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from python_backend.errors import InternalError, RelayError
from python_backend.images import decode
from python_backend.metrics import Meter
from python_backend.transport.boot import BootKey
from python_backend.transport.handle import EmbeddingHandle, content_digest
from python_backend.transport.segment import Rows, shape_of
from python_backend.transport.shared_cache import SharedCache
from python_backend.transport.store import EmbeddingStore, Slot
from python_backend.vision.preprocess import Preprocessor
from python_backend.vision.runtime import Encoder
from python_backend.vision.tiling import Tiling

logger = logging.getLogger(__name__)

MAX_KNOWN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Encoded:
    """A leased embedding, and whether it was there already."""

    handle: EmbeddingHandle
    is_cached: bool


@dataclass(slots=True)
class _New:
    """A picture to be encoded, and the places in the batch that wait for it."""

    image: Image.Image
    places: list[int]
    shared_key: bytes = b""  # in the shared cache, where there is one


class EncodeStage:
    """The encoder of one process with its store. Used by one thread.

    An embedding is found by the pixels it was made from, so a picture saved twice is encoded once. Files that
    were seen before are not even decoded: their digest leads to that of their pixels.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        encoder: Encoder,
        store: EmbeddingStore,
        boot: BootKey,
        dtype: str,
        meter: Meter,
        clock: Callable[[], float],
        tiling: Tiling | None = None,
        shared: SharedCache | None = None,
    ) -> None:
        self._shared = shared
        self._tiling = tiling
        self._preprocessor = preprocessor
        self._encoder = encoder
        self._store = store
        self._boot = boot
        self._dtype = dtype
        self._meter = meter
        self._clock = clock
        self._pixels_of: OrderedDict[bytes, bytes] = OrderedDict()  # file digest -> pixel digest
        self._num_evictions = 0  # reported

    def run(self, files: Sequence[bytes]) -> list[Encoded | RelayError]:
        """One result per image file, in order; a bad image fails alone."""
        results: list[Encoded | RelayError | None] = [None] * len(files)
        new: dict[bytes, _New] = {}
        for place, file in enumerate(files):
            try:
                results[place] = self._look_up(file, place, new)
            except RelayError as error:
                results[place] = error
        if new:
            self._encode(new, results)
        self._report()
        return [result if result is not None else InternalError("the image was not encoded") for result in results]

    def _report(self) -> None:
        counts = self._store.counts
        self._meter.set("vlm_relay_embeddings", counts.num_embeddings)
        self._meter.set("vlm_relay_embedding_slots", counts.num_slots)
        if counts.num_evictions > self._num_evictions:
            self._meter.add("vlm_relay_embedding_evictions_total", counts.num_evictions - self._num_evictions)
            self._num_evictions = counts.num_evictions

    def _look_up(self, file: bytes, place: int, new: dict[bytes, _New]) -> Encoded | None:
        """The embedding if it is in the store; else None, with the picture noted in `new`."""
        file_digest = content_digest(file, self._boot)
        key = self._pixels_of.get(file_digest)
        image = None
        if key is None:
            image = decode(file)
            key = self._remember(file_digest, image)
        if key in new:
            new[key].places.append(place)
            return None
        handle = self._store.find(key)
        if handle is not None:
            self._meter.add("vlm_relay_embedding_hits_total")
            return Encoded(handle, is_cached=True)
        new[key] = _New(image if image is not None else decode(file), [place])
        return None

    def _remember(self, file_digest: bytes, image: Image.Image) -> bytes:
        key = content_digest(_pixels(image), self._boot)
        self._pixels_of[file_digest] = key
        if len(self._pixels_of) > MAX_KNOWN_FILES:
            self._pixels_of.popitem(last=False)
        return key

    def _encode(self, new: dict[bytes, _New], results: list[Encoded | RelayError | None]) -> None:
        """Encodes what is new, as many at once as the encoder takes; each batch is stored before the next one."""
        items = self._without_shared(list(new.items()), results)
        for start in range(0, len(items), self._encoder.max_batch):
            self._encode_batch(items[start : start + self._encoder.max_batch], results)

    def _without_shared(
        self, items: list[tuple[bytes, _New]], results: list[Encoded | RelayError | None]
    ) -> list[tuple[bytes, _New]]:
        """Takes from the shared cache what it has; what is left to encode."""
        if self._shared is None or not self._shared.is_up:
            return items
        for _, item in items:
            item.shared_key = self._shared.key(_pixels(item.image))
        left = []
        found = self._shared.get([item.shared_key for _, item in items])
        for (key, item), rows in zip(items, found, strict=True):
            if rows is None or rows.dtype != self._dtype:
                left.append((key, item))
                continue
            self._meter.add("vlm_relay_shared_cache_hits_total")
            self._store_one(key, item, rows, results, is_cached=True)
        return left

    def _encode_batch(self, items: list[tuple[bytes, _New]], results: list[Encoded | RelayError | None]) -> None:
        began_s = self._clock()
        try:
            features = self._features([item.image for _, item in items])
        except Exception as error:  # whatever the runtime raises: these images fail, the stage goes on
            logger.exception("encoding %d image(s) failed", len(items))
            failed = InternalError(f"the encoder failed: {type(error).__name__}")
            for _, item in items:
                for place in item.places:
                    results[place] = failed
            return
        self._meter.observe("vlm_relay_encode_batch_images", len(items))
        self._meter.observe("vlm_relay_encode_seconds", self._clock() - began_s)
        self._meter.add("vlm_relay_embedding_misses_total", len(items))
        for (key, item), rows in zip(items, features, strict=True):
            self._store_one(key, item, rows, results, is_cached=False)
            if self._shared is not None and item.shared_key and isinstance(rows, np.ndarray):
                self._shared.put(item.shared_key, rows.astype(self._dtype, copy=False))

    def _features(self, images: list[Image.Image]) -> Sequence[Rows]:
        if self._tiling is not None:
            return self._tiling.encode(images, self._preprocessor, self._encoder)
        return self._encoder.encode(self._preprocessor.pixels(images))

    def _store_one(
        self,
        key: bytes,
        item: _New,
        rows: Rows,
        results: list[Encoded | RelayError | None],
        is_cached: bool,
    ) -> None:
        """Puts one picture's features into a slot and lends it to all who wait for it."""
        try:
            slot = self._reserve(key, shape_of(rows))
        except RelayError as error:
            for place in item.places:
                results[place] = error
            return
        try:
            slot.write(rows)
        except Exception as error:  # a copy on a GPU: the slot is free again, these requests fail
            self._store.abandon(slot)
            logger.exception("an embedding could not be stored")
            for place in item.places:
                results[place] = InternalError(f"the embedding could not be stored: {type(error).__name__}")
            return
        results[item.places[0]] = Encoded(self._store.commit(slot), is_cached)
        for place in item.places[1:]:
            try:
                handle = self._store.find(key)
            except RelayError as error:
                results[place] = error
                continue
            if handle is not None:
                results[place] = Encoded(handle, is_cached=True)

    def _reserve(self, key: bytes, shape: tuple[int, int]) -> Slot:
        return self._store.reserve(key, shape, "float16" if self._dtype == "float16" else "float32")


def _pixels(image: Image.Image) -> bytes:
    """All that says what a picture looks like."""
    return f"{image.width}x{image.height}:".encode() + image.tobytes()
