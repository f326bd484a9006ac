"""Asks the chain model for records, and checks every one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpc
from tqdm import tqdm

from benchmarks.triton_process import TritonProcess
from benchmarks.workload import SHAPE, Column, checksum, features, write

BLOCK_CHAINS = 10  # one way, before the next way has its turn

Records = npt.NDArray[np.int64]


class ChecksumMismatch(RuntimeError):
    """A consumer read something else than the producer wrote."""


class ChainClient:
    """A client of a running server; never asks for the same embedding twice."""

    def __init__(self, server: TritonProcess) -> None:
        self._client = grpc.InferenceServerClient(f"{server.ports.host}:{server.ports.grpc}")
        self._features = features()
        self._expected = np.zeros(SHAPE, dtype=np.float16)
        self._next_index = 0

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def run(self, num_chains: int, ways: tuple[str, ...], label: str, row: int | None = None) -> Records:
        """Records (chains, ways, columns), blocks of each way in turn; sums `row`, or one row after the other.

        Raises:
            ChecksumMismatch: a consumer got something else than what the producer wrote.
        """
        blocks = []
        with tqdm(total=num_chains, desc=label, unit="chain", leave=False) as bar:
            for begin in range(0, num_chains, BLOCK_CHAINS):
                size = min(BLOCK_CHAINS, num_chains - begin)
                indices = np.arange(self._next_index, self._next_index + size)
                self._next_index += size
                rows = indices % SHAPE[0] if row is None else np.full(size, row)
                blocks.append(self._call(indices, rows, ways))
                self._verify(indices, rows, blocks[-1])
                bar.update(size)
        return np.concatenate(blocks)

    def _call(self, indices: Records, rows: Records, ways: tuple[str, ...]) -> Records:
        names = np.array([way.encode() for way in ways], dtype=np.object_)
        inputs = []
        for name, array, datatype in (("indices", indices, "INT64"), ("rows", rows, "INT64"), ("ways", names, "BYTES")):
            tensor = grpc.InferInput(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        records = self._client.infer("chain", inputs).as_numpy("records")
        assert records is not None
        return np.asarray(records)

    def _verify(self, indices: Records, rows: Records, records: Records) -> None:
        for index, row, got in zip(indices.tolist(), rows.tolist(), records[:, :, Column.CHECKSUM], strict=True):
            write(self._features, index, self._expected)
            wanted = checksum(self._expected, row)
            if any(value != wanted for value in got):
                raise ChecksumMismatch(f"embedding {index}, row {row}: {wanted} wanted, {got.tolist()} came")
