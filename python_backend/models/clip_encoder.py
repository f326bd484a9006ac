"""The `clip_encoder` model: image bytes in, a handle out."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.checkpoint import resolve
from python_backend.errors import InternalError, InvalidImage, RelayError
from python_backend.models.adapter import Site, failure, open_site, tensors, text_tensor
from python_backend.models.engine_call import EngineCall
from python_backend.models.metrics import TritonMeter
from python_backend.pulse import Pulse, pulse_path
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.placing import create_segment
from python_backend.transport.shared_cache import SharedCache
from python_backend.transport.store import EmbeddingStore
from python_backend.vision.preprocess import Preprocessor
from python_backend.vision.runtime import Encoder, make_encoder
from python_backend.vision.stage import Encoded, EncodeStage
from python_backend.vision.tiling import make_tiling

logger = logging.getLogger(__name__)

LEASES_PER_SLOT = 8  # as many requests may hold one popular image at once


class TritonPythonModel:
    """One encoder replica with its embedding store."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the encoder and takes the store's memory."""
        site = open_site(args)
        self._site = site
        self._meter = TritonMeter(site.model, "clip_encoder")
        self._store = _create_store(site)
        self._encoder = _load_encoder(site)
        self._meter.poll(lambda: self._meter.set("vlm_relay_leases", self._store.num_leases_held))
        self._shared = _join_shared_cache(site)
        self._stage = EncodeStage(
            Preprocessor(site.facts.path),
            self._encoder,
            self._store,
            site.boot,
            site.plan.encode.dtype,
            self._meter,
            time.monotonic,
            make_tiling(site.facts),
            self._shared,
        )
        counts = self._store.counts
        self._pulse = Pulse(pulse_path(site.boot.id, site.model))
        logger.info("loaded: %s on %s, %d slots", site.plan.encode.runtime, site.replica.device, counts.num_slots)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Encodes what Triton batched; one response per request."""
        files: list[bytes] = []
        faults: dict[int, RelayError] = {}
        for place, request in enumerate(requests):
            given = tensors(request).get("image")
            if given is None or given.size != 1:
                faults[place] = InvalidImage("clip_encoder takes one image per request")
            else:
                files.append(bytes(given.reshape(-1)[0]))
        try:
            results = iter(self._stage.run(files))
        except Exception as error:
            logger.exception("a batch failed")
            results = iter([InternalError(f"the encoder failed: {type(error).__name__}")] * len(files))
        return [self._respond(faults.get(place) or next(results)) for place in range(len(requests))]

    def finalize(self) -> None:
        """Removes the store."""
        self._pulse.close()
        self._encoder.close()
        if self._shared is not None:
            self._shared.close()
        self._store.close()
        self._meter.close()
        logger.info("closed")

    def _respond(self, result: Encoded | RelayError) -> Any:
        if isinstance(result, RelayError):
            return failure(result)
        handle = text_tensor("handle", result.handle.seal(self._site.boot), shape=(1, 1))
        is_cached = pb_utils.Tensor("is_cached", np.array([[result.is_cached]]))
        return pb_utils.InferenceResponse([handle, is_cached])


def _create_store(site: Site) -> EmbeddingStore:
    encode, facts = site.plan.encode, site.facts
    item_bytes = 2 if encode.dtype == "float16" else 4
    layout = SegmentLayout(
        num_slots=encode.slots,
        slot_bytes=facts.most_image_tokens * facts.width * item_bytes,
        num_leases=LEASES_PER_SLOT * encode.slots,
    )
    segment = create_segment(site.boot.id, layout, site.plan, site.replica)
    return EmbeddingStore(segment, site.embedding_fingerprint, time.monotonic, encode.lease_s)


def _join_shared_cache(site: Site) -> SharedCache | None:
    """The cache that servers share, if the plan names one; its embeddings lie in host memory, so not for GPUs."""
    encode = site.plan.encode
    if encode.redis_url is None:
        return None
    if site.replica.device != "cpu":
        logger.warning("encode.redis_url is not used on %s: embeddings stay in its memory", site.replica.device)
        return None
    return SharedCache(encode.redis_url, site.embedding_fingerprint, encode.redis_timeout_ms / 1000)


def _load_encoder(site: Site) -> Encoder:
    if site.plan.encode.runtime == "triton":
        return EngineCall(site)
    return make_encoder(site.plan, site.replica, site.facts, resolve(site.plan.artifacts))
