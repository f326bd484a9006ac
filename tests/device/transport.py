"""Embeddings from one process to another on the GPU: right bytes, speed, and handles that must be refused."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import numpy as np

from python_backend.errors import EmbeddingGone, HandleRefused
from python_backend.transport.boot import boot_key
from python_backend.transport.cuda import CudaDevice, Driver
from python_backend.transport.device import DeviceReader
from python_backend.transport.handle import EmbeddingHandle, fingerprint_of
from python_backend.transport.probe import NUM_BYTES, _staged_rate, probe
from python_backend.transport.reader import EmbeddingReader
from tests.device.setting import Setting
from tests.unit.transport.conftest import Peer, end
from tests.unit.transport.device_peer import features

FINGERPRINT = fingerprint_of("a model", "its preprocessing")
NUM_COPIES = 50


def run(setting: Setting) -> dict[str, object]:
    """The probe, the store with its refusals, and staging."""
    driver = Driver.load(setting.driver)
    device = driver.device(0)
    variables = _variables(setting)
    found: dict[str, object] = {"probe": probe(driver, 0, 0, {**os.environ, **variables}).model_dump()}
    found["store"] = _store(device, variables)
    found["embedding_copy_us"] = _copy_us(device, setting)
    found["staged_gigabytes_per_s"] = _staged(device)
    return found


def _variables(setting: Setting) -> dict[str, str]:
    """For other processes, so that they find the same driver."""
    folder = Path(setting.driver).parent
    return {"LD_LIBRARY_PATH": str(folder)} if folder.name else {}


def _store(device: CudaDevice, variables: dict[str, str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="vlm_relay_check.", dir="/dev/shm") as name:
        directory = Path(name)
        boot = boot_key(os.getppid(), directory)
        owner = Peer(directory, os.getppid(), "device_peer.py", variables)
        reader = DeviceReader(EmbeddingReader(directory), device)
        stream, memory = device.new_stream(), device.allocate(64)
        try:
            owner.ask("create", "0", "both")
            sealed = owner.ask("compute", "image", "7")
            handle = EmbeddingHandle.open(bytes.fromhex(sealed), boot, FINGERPRINT)
            copied = reader.copy(handle, memory.address, stream)
            values = np.zeros(handle.shape, np.float16)
            stream.copy_out(values.ctypes.data, memory.address, values.nbytes)
            stream.synchronize()
            owner.ask("release_all")
            for content in ("b", "c", "d"):
                owner.ask("put", content, "9")
            return {
                "route": copied.path,
                "are_bytes_right": bool((values == features(7)).all()),
                "is_stale_refused": _is_refused(lambda: reader.copy(handle, memory.address, stream), EmbeddingGone),
                "is_forged_refused": _is_refused(
                    lambda: EmbeddingHandle.open(bytes.fromhex(sealed)[:-1] + b"\0", boot, FINGERPRINT), HandleRefused
                ),
                "is_dead_owner_refused": _is_dead_owner_refused(owner, reader, memory.address, stream, boot),
            }
        finally:
            end(owner)
            reader.close()
            memory.close()
            stream.close()


def _is_dead_owner_refused(owner: Peer, reader: DeviceReader, address: int, stream: object, boot: object) -> bool:
    owner.ask("release_all")
    handle = EmbeddingHandle.open(bytes.fromhex(owner.ask("put", "last", "1")), boot, FINGERPRINT)  # type: ignore[arg-type]
    owner.kill()
    return _is_refused(lambda: reader.copy(handle, address, stream), EmbeddingGone)  # type: ignore[arg-type]


def _is_refused(act: object, error: type[Exception]) -> bool:
    try:
        act()  # type: ignore[operator]
    except error:
        return True
    return False


def _copy_us(device: CudaDevice, setting: Setting) -> float:
    """One image's features within the GPU, by its own clock."""
    num_bytes = setting.geometry.image_tokens * setting.geometry.width * 2
    stream, start, stop = device.new_stream(), device.new_event(), device.new_event()
    source, target = device.allocate(num_bytes), device.allocate(num_bytes)
    times = []
    for _ in range(NUM_COPIES):
        stream.record(start)
        stream.copy(target.address, source.address, num_bytes)
        stream.record(stop)
        stop.synchronize()
        times.append(stop.seconds_since(start) * 1e6)
    for each in (source, target, start, stop, stream):
        each.close()
    return round(statistics.median(times), 2)


def _staged(device: CudaDevice) -> float:
    memory = device.allocate(NUM_BYTES)
    try:
        return round(_staged_rate(device, memory.address, device, np.zeros(NUM_BYTES, np.uint8)), 2)
    finally:
        memory.close()
