"""The two stages as the relay sees them: calls from `llava` to the other models, by Triton's BLS."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import EmbeddingGone, HandleRefused, PeerGone, RelayError, from_message
from python_backend.models.adapter import Site, text_tensor
from python_backend.stream import ERROR, Chunk, DecodeJob, Encoded
from python_backend.token_link import Line, TokenLink
from python_backend.transport.handle import EmbeddingHandle
from python_backend.transport.reader import EmbeddingReader

REST_S = 5.0  # Triton's clean-up takes milliseconds; a busy machine may take longer


class BlsStages:
    """Encoders and decoders on this server. Blocks its caller; use one thread per request."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._reader = EmbeddingReader()
        self._link = TokenLink(site.boot.id)
        self._lock = threading.Lock()
        self._resting: deque[tuple[float, Any]] = deque()

    def encode(self, encoder: str, image: bytes) -> Encoded:
        """The features of an image file, with a lease.

        Raises:
            RelayError: what the encoder answered, or `PeerGone` when it could not.
        """
        request = pb_utils.InferenceRequest(
            model_name=encoder,
            requested_output_names=["handle", "is_cached"],
            inputs=[text_tensor("image", image, shape=(1, 1))],
        )
        response = request.exec()
        _raise_error(response, encoder)
        handle = _bytes(pb_utils.get_output_tensor_by_name(response, "handle"))
        is_cached = pb_utils.get_output_tensor_by_name(response, "is_cached").as_numpy()
        return Encoded(handle, bool(is_cached.reshape(-1)[0]))

    def decode(self, decoder: str, job: DecodeJob) -> Iterator[Chunk]:
        """The answer as it comes.

        Raises:
            RelayError: what the decoder answered, or `PeerGone` when it could not.
        """
        inputs = [
            text_tensor("request_id", job.request_id),
            pb_utils.Tensor("token_ids", np.array(job.token_ids, dtype=np.int32)),
            text_tensor("sampling_parameters", job.sampling.to_json()),
            pb_utils.Tensor("rank", np.array([job.rank], dtype=np.float64)),
        ]
        if job.handles:
            inputs.append(text_tensor("handles", *job.handles))
        if job.deadline_s is not None:
            # Both processes read the machine's one monotonic clock.
            inputs.append(pb_utils.Tensor("deadline_ns", np.array([int(job.deadline_s * 1e9)], dtype=np.int64)))
        if job.generated_ids:
            inputs.append(pb_utils.Tensor("generated_ids", np.array(job.generated_ids, dtype=np.int32)))
        inputs.append(pb_utils.Tensor("is_relayed", np.array([True])))
        request = pb_utils.InferenceRequest(
            model_name=decoder,
            requested_output_names=["token_ids", "text", "finish_reason", "report"],
            inputs=inputs,
        )
        with self._link.open(decoder, job.request_id) as lines:
            for response in self._responses(request):
                _raise_error(response, decoder)
                _raise_refusal(response)
            yield from map(_chunk, lines)

    def cancel(self, decoder: str, request_id: str) -> None:
        """Stops a generation; nothing if it has ended.

        Raises:
            PeerGone: the decoder could not be asked.
        """
        request = pb_utils.InferenceRequest(
            model_name=decoder,
            requested_output_names=["finish_reason"],
            inputs=[text_tensor("cancel", request_id)],
        )
        for response in self._responses(request):
            _raise_error(response, decoder)

    def _responses(self, request: Any) -> Iterator[Any]:
        """The responses of a decoupled call, read to the end in any case; there should be but one.

        More than one can make the process stand still, see `token_link`. Triton's stub (2.51) keeps what nobody reads
        for ever. And it forgets an iterator that ended from a thread
        of its own without Python's lock: when that holds the last reference, it frees Python objects while
        other threads run, and the process aborts later. So iterators rest here until that has happened.
        """
        responses = request.exec(decoupled=True)
        try:
            yield from responses
        finally:
            deque(responses, maxlen=0)
            now_s = time.monotonic()
            with self._lock:
                self._resting.append((now_s, responses))
                while self._resting and now_s - self._resting[0][0] > REST_S:
                    self._resting.popleft()

    def close(self) -> None:
        """Lets go of the decoders."""
        self._link.close()

    def release(self, handle: bytes) -> None:
        """Gives a lease back; nothing if it is over already."""
        try:
            opened = EmbeddingHandle.open(handle, self._site.boot, self._site.embedding_fingerprint)
            self._reader.release(opened)
        except (EmbeddingGone, HandleRefused):
            return


def now_s() -> float:
    """The clock that deadlines are on: the machine's monotonic one, the same in every process."""
    return time.monotonic()


def _raise_error(response: Any, stage: str) -> None:
    if not response.has_error():
        return
    error: RelayError = from_message(response.error().message())
    if isinstance(error, PeerGone) and not error.text.startswith(stage):
        raise type(error)(f"{stage}: {error.text}")
    raise error


def _raise_refusal(response: Any) -> None:
    """What a decoder tells in an ordinary response, because Triton loses its own errors here."""
    outputs = {tensor.name(): tensor for tensor in response.output_tensors()}
    if "report" in outputs:
        raise from_message(json.loads(_bytes(outputs["report"]))["error"])


def _chunk(line: Line) -> Chunk:
    report = line.get("report", {})
    if line["finish_reason"] == ERROR:
        raise from_message(report["error"])
    return Chunk(
        token_ids=tuple(line["token_ids"]),
        text=line["text"],
        finish_reason=line["finish_reason"] or None,
        logprobs=tuple(report.get("logprobs", ())),
        cumulative_logprob=float(report.get("cumulative_logprob", 0.0)),
        transfer_s=float(report.get("transfer_s", 0.0)),
        transfer_bytes=int(report.get("transfer_bytes", 0)),
        times=report.get("times", {}),
    )


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.as_numpy().reshape(-1)[0])
