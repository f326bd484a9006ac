"""What taking embeddings in costs the sequences that decode meanwhile.

    python -m benchmarks.intake

Eight sequences decode on one thread. Another one, as `execute` does, opens a handle every 20 ms, copies the embedding
of LLaVA-1.5-7B's size into the decoder's memory and gives the lease back; in turns of a second with and without it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.decoder_step import GEOMETRIES, write_checkpoint
from benchmarks.provenance import provenance
from benchmarks.workload import EMBEDDING_BYTES, FINGERPRINT, SHAPE, features
from python_backend.decoder.engine import DecodeRequest, Delta, Engine, EngineOptions
from python_backend.decoder.landing import HostLanding
from python_backend.request import SamplingParameters
from python_backend.transport.boot import boot_key
from python_backend.transport.handle import content_digest
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.reader import EmbeddingReader
from python_backend.transport.segment import Segment
from python_backend.transport.store import EmbeddingStore

MEASURED = ("python_backend/decoder", "python_backend/transport", "benchmarks/intake.py")
RESULT = Path(__file__).with_name("results") / "intake.json"
NUM_SEQUENCES, NUM_SLOTS, TURN_S, EVERY_S, NUM_TURNS = 8, 4, 1.0, 0.02, 10


class Intake:
    """A store with some embeddings, and a decoder's end of it."""

    def __init__(self, directory: Path) -> None:
        self._boot = boot_key(os.getppid(), directory)
        layout = SegmentLayout(NUM_SLOTS, EMBEDDING_BYTES, 8 * NUM_SLOTS)
        self._store = EmbeddingStore(Segment.create(self._boot.id, layout, directory), FINGERPRINT, time.monotonic)
        self._landing = HostLanding(EmbeddingReader(directory))
        self._keys = [content_digest(bytes([index]), self._boot) for index in range(NUM_SLOTS)]
        for key in self._keys:
            slot = self._store.reserve(key, SHAPE, "float16")
            slot.array[:] = features()
            self._landing.release(self._store.commit(slot))

    def take(self, index: int) -> float:
        """Seconds that one embedding took."""
        handle = self._store.find(self._keys[index % NUM_SLOTS])
        assert handle is not None
        began_s = time.perf_counter()
        landed = self._landing.land(handle)
        self._landing.release(handle)
        assert landed.shape == SHAPE
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._landing.close()
        self._store.close()


def main() -> None:
    """Measure, and write one JSON file."""
    argparse.ArgumentParser(prog="python -m benchmarks.intake", description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        write_checkpoint(GEOMETRIES["small"], Path(folder))
        engine = Engine.load(Path(folder), EngineOptions(dtype="bfloat16", num_threads=1), time.monotonic)
        intake = Intake(Path(shared))
        steps, takes = measure(engine, intake)
        engine.close()
        intake.close()
    report = {
        "provenance": provenance("benchmarks.intake", sys.argv[1:], MEASURED),
        "embedding_bytes": EMBEDDING_BYTES,
        "step_alone_ms": 1e3 * median(steps[False]),
        "step_beside_intake_ms": 1e3 * median(steps[True]),
        "intake_ms": 1e3 * median(takes),
        "num_embeddings": len(takes),
    }
    print(json.dumps(report))
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(engine: Engine, intake: Intake) -> tuple[dict[bool, list[float]], list[float]]:
    """Seconds of steps without and with embeddings that come, and of each that came."""
    stamps: list[float] = []
    ended = threading.Semaphore(0)

    def receive(index: int, delta: Delta) -> None:
        if index == 0:
            stamps.append(time.perf_counter())
        if delta.is_final:
            ended.release()

    sampling = SamplingParameters(max_tokens=4000, ignore_eos=True)
    engine.start()
    for index in range(NUM_SEQUENCES):
        ids = (1, *range(10 + index, 60 + index))
        engine.submit(DecodeRequest(str(index), ids, (), sampling), lambda delta, index=index: receive(index, delta))  # type: ignore[misc]
    time.sleep(TURN_S)
    steps: dict[bool, list[float]] = {False: [], True: []}
    takes: list[float] = []
    for turn in range(NUM_TURNS):
        takes_in, first = turn % 2 == 1, len(stamps)
        until_s = time.perf_counter() + TURN_S
        while time.perf_counter() < until_s:
            if takes_in:
                takes.append(intake.take(len(takes)))
            time.sleep(EVERY_S)
        steps[takes_in] += [after - before for before, after in pairwise(stamps[first:])]
    for index in range(NUM_SEQUENCES):
        engine.cancel(str(index))
    for _ in range(NUM_SEQUENCES):
        ended.acquire()
    return steps, takes


if __name__ == "__main__":
    main()
