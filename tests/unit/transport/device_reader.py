"""A process that reads embeddings on cuda:1 of the stand-in driver: a sealed handle a line in, what came out."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

from python_backend.errors import RelayError
from python_backend.transport.boot import boot_key
from python_backend.transport.cuda import Driver
from python_backend.transport.device import DeviceReader
from python_backend.transport.handle import EmbeddingHandle, fingerprint_of
from python_backend.transport.reader import EmbeddingReader

directory = Path(sys.argv[1])
boot = boot_key(int(sys.argv[2]), directory)
device = Driver.load().device(1)
reader, stream, memory = DeviceReader(EmbeddingReader(directory), device), device.new_stream(), device.allocate(64)
for line in sys.stdin:
    handle = EmbeddingHandle.open(bytes.fromhex(line), boot, fingerprint_of("a model", "its preprocessing"))
    try:
        copied = reader.copy(handle, memory.address, stream)
    except RelayError as error:
        print(type(error).__name__, error, flush=True)
        continue
    values = np.zeros(handle.shape, np.float16)
    stream.copy_out(values.ctypes.data, memory.address, values.nbytes)
    stream.synchronize()
    print(copied.path, hashlib.sha256(values.tobytes()).hexdigest(), flush=True)
