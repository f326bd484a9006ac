"""A request's images at the encoders: side by side, the most urgent first, a bounded number at each encoder."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from python_backend.errors import InvalidImage, InvalidRequest, PeerGone
from python_backend.gate import Gate
from python_backend.stream import Encoded, Stages

MAX_SIDE_BY_SIDE = 64


class Encoding:
    """Calls encoders for requests, each behind a gate. Any thread may call it."""

    def __init__(self, stages: Stages, gate_width: int) -> None:
        self._stages = stages
        self._gate_width = gate_width
        self._lock = threading.Lock()
        self._gates: dict[str, Gate] = {}  # by encoder
        self._fan_out = ThreadPoolExecutor(max_workers=MAX_SIDE_BY_SIDE, thread_name_prefix="encode")

    def run(
        self,
        encoders: Sequence[str],
        images: Sequence[bytes],
        rank: float,
        is_over: Callable[[], bool],
        keep: Callable[[Encoded], None],
    ) -> None:
        """Encodes each image at its encoder, and has each lease kept, in the order of the images.

        Raises:
            RelayError: of the first image that failed, once all have ended; what the others gave was kept.
        """
        work = enumerate(zip(encoders, images, strict=True))
        calls = [functools.partial(self._encode, index, *each, rank, is_over) for index, each in work]
        if len(calls) == 1:
            keep(calls[0]())
            return
        tasks = [self._fan_out.submit(call) for call in calls]
        wait(tasks)
        errors = [task.exception() for task in tasks]
        for task, error in zip(tasks, errors, strict=True):
            if error is None:
                keep(task.result())
        for error in filter(None, errors):
            raise error

    def died(self, encoder: str) -> None:
        """Whoever hangs in a dead encoder keeps its place in the old gate; the next ones get a new one."""
        with self._lock:
            self._gates.pop(encoder, None)

    def close(self) -> None:
        """Begins nothing more."""
        self._fan_out.shutdown(wait=False, cancel_futures=True)

    def _encode(self, index: int, encoder: str, image: bytes, rank: float, is_over: Callable[[], bool]) -> Encoded:
        with self._lock:
            gate = self._gates.setdefault(encoder, Gate(self._gate_width))
        if not gate.enter(rank, is_over):
            raise PeerGone("the request ended while it waited for the encoder")
        try:
            return self._stages.encode(encoder, image)
        except InvalidRequest as error:
            raise InvalidImage(f"image[{index}]: {error.text}") from error
        finally:
            gate.leave()
