"""Steps in which every sequence decodes one token: at padded batch sizes, in memory that stays, one ahead of the host.

    host    choose ─ launch n ──── text of n-1 ───── choose ─ take n, launch n+1 ── text of n ───
    device           ── step n ─ its tokens ─▶ step n+1 begins with them ──────────▶ step n+2 ...

When step n is taken and all its sequences go on greedily, step n+1 is launched on the device's own tokens before the
host looks at them. If the host then asks for something else (a sequence ended, a new one came), the step that ran ahead
is forgotten: it wrote only to the place of each sequence's next token, which nobody reads before it is written again.

Each batch size is a program over the same tensors, so that on a GPU it can be recorded as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from python_backend.decoder.batch import Chunk
from python_backend.decoder.kv_cache import KeyValueCache
from python_backend.decoder.model import DecodeGroup, LlamaModel, PackedStep

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NUM_WARM_UPS = 2  # a kernel's first call compiles it and may allocate, which must not be recorded


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a step chose, on the host: per sequence the likeliest token and its log-probability; None if not finite."""

    token_ids: list[int]
    logprobs: list[float | None]


class DecodeSteps:
    """The decode steps of one model. Owned by the engine thread."""

    def __init__(
        self,
        model: LlamaModel,
        cache: KeyValueCache,
        max_sequences: int,
        context_tokens: int,
        device: torch.device,
        record: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        """Prepares every batch size; `record` turns a program into one that is replayed (None: plain calls)."""
        self._model = model
        self._cache = cache
        self._device = device
        self._context_tokens = context_tokens
        self._batches = batches_up_to(max_sequences)
        largest, num_blocks = self._batches[-1], -(-context_tokens // cache.block_tokens)
        self._token_ids, self._positions, self._is_used, self._chosen = torch.zeros(
            (4, largest), dtype=torch.int64, device=device
        )
        self._tables = torch.full((largest, num_blocks), cache.padding_block, dtype=torch.int64, device=device)
        self._numbers = torch.zeros((2, largest), dtype=torch.float64, device=device)  # token, log-probability
        self._logits: dict[int, torch.Tensor] = {}
        self._host = torch.zeros((2, largest), dtype=torch.float64, pin_memory=device.type == "cuda")
        self._tables_of: list[tuple[int, ...]] = []  # the blocks in each row of the tables, to send only what changed
        self._ahead: dict[tuple[int, int], int] | None = None  # (serial, position) to row, of the step that runs ahead
        self._batch = self._batches[0]  # of the newest step
        self._all_rows = torch.arange(largest, device=device)
        self._is_copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # The largest first: what it takes of a common pool of memory suffices for the others.
        self._programs = {batch: self._program(batch, record) for batch in reversed(self._batches)}

    @property
    def max_sequences(self) -> int:
        """The largest batch."""
        return self._batches[-1]

    def run(self, chunks: Sequence[Chunk], goes_on: bool) -> tuple[Tokens, torch.Tensor | None]:
        """The likeliest next token of each chunk's sequence, and the logits (sequences, vocab), float32.

        With `goes_on` the next step may start on these tokens, and there are no logits.
        """
        rows = self._rows_ahead(chunks)
        if rows is None:
            self._batch = next(size for size in self._batches if size >= len(chunks))
            self._load(chunks)
            self._programs[self._batch]()
            self._copy_out()
            rows = list(range(len(chunks)))
        self._ahead = None
        launches = goes_on and rows == list(range(len(self._tables_of))) and self._has_room(chunks)
        if launches:
            self._advance(chunks)
        tokens = self._take(rows)
        if launches:
            self._copy_out()
        return tokens, None if goes_on else self._logits[self._batch][rows]

    def forget(self) -> None:
        """What runs ahead is not wanted: something else will be computed."""
        self._ahead = None

    def _rows_ahead(self, chunks: Sequence[Chunk]) -> list[int] | None:
        """The rows of these chunks in the step that runs ahead; None if it does not have all of them."""
        if self._ahead is None:
            return None
        rows = [self._ahead.get((chunk.sequence.serial, chunk.start)) for chunk in chunks]
        found = [row for row in rows if row is not None]
        return found if len(found) == len(rows) else None

    def _has_room(self, chunks: Sequence[Chunk]) -> bool:
        """Whether every sequence holds the block of the token that this step gives."""
        size = self._cache.block_tokens
        return all(chunk.end < min(len(chunk.sequence.blocks) * size, self._context_tokens) for chunk in chunks)

    def _advance(self, chunks: Sequence[Chunk]) -> None:
        """Launches the step after the one whose tokens are on their way, on those tokens."""
        self._sync_tables(chunks)
        self._token_ids.copy_(self._chosen)
        self._positions += self._is_used
        self._programs[self._batch]()
        self._ahead = {(chunk.sequence.serial, chunk.end): row for row, chunk in enumerate(chunks)}

    def _take(self, rows: list[int]) -> Tokens:
        """The tokens that were copied out, once they are here."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        token_ids, logprobs = self._host[:, rows].tolist()
        return Tokens(
            [int(token_id) for token_id in token_ids],
            [logprob if math.isfinite(logprob) else None for logprob in logprobs],
        )

    def _copy_out(self) -> None:
        """Sends the chosen tokens to the host."""
        self._host.copy_(self._numbers, non_blocking=True)
        if self._is_copied is not None:
            self._is_copied.record()

    def _load(self, chunks: Sequence[Chunk]) -> None:
        """The step's inputs; rows beyond its sequences read and write the padding block."""
        size, largest = len(chunks), self._batches[-1]
        columns = [
            [chunk.sequence.token_ids[chunk.start] for chunk in chunks],
            [chunk.start for chunk in chunks],
            [1] * size,
        ]
        values = torch.tensor([column + [0] * (largest - size) for column in columns], dtype=torch.int64)
        for target, source in zip((self._token_ids, self._positions, self._is_used), values, strict=True):
            target.copy_(source)
        self._sync_tables(chunks)

    def _sync_tables(self, chunks: Sequence[Chunk]) -> None:
        """Brings the block tables up to date, row by row where they changed."""
        padding, width = self._cache.padding_block, self._tables.shape[1]
        rows = [tuple(chunk.sequence.blocks) for chunk in chunks]
        changed = [
            index for index, row in enumerate(rows) if index >= len(self._tables_of) or self._tables_of[index] != row
        ]
        unused = range(len(rows), len(self._tables_of))
        if changed:
            full = [[*rows[index], *[padding] * (width - len(rows[index]))] for index in changed]
            self._tables[torch.tensor(changed, device=self._device)] = torch.tensor(full, device=self._device)
        if unused:
            self._tables[unused.start : unused.stop] = padding
        self._tables_of = rows

    def _program(
        self, batch: int, record: Callable[[Callable[[], None]], Callable[[], None]] | None
    ) -> Callable[[], None]:
        def run() -> None:
            positions, tables = self._positions[:batch], self._tables[:batch]
            blocks = tables.gather(1, (positions // self._cache.block_tokens)[:, None])[:, 0]
            step = PackedStep(
                inputs=self._model.embed(self._token_ids[:batch]),
                positions=positions,
                blocks=blocks,
                decode=DecodeGroup(tables, positions + 1),
                prompts=(),
                logit_rows=self._all_rows[:batch],
            )
            logits = self._model.forward(step, self._cache)
            values, chosen = logits.max(dim=1)
            self._logits[batch] = logits
            self._chosen[:batch] = chosen
            self._numbers[0, :batch] = chosen
            self._numbers[1, :batch] = values - torch.logsumexp(logits, dim=1)

        if record is None:
            return run
        for _ in range(NUM_WARM_UPS):
            run()
        return record(run)


def batches_up_to(max_sequences: int) -> tuple[int, ...]:
    """The batch sizes to prepare; the last holds `max_sequences`."""
    below = tuple(batch for batch in BATCHES if batch < max_sequences)
    return (*below, max_sequences)


def record_graph(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Records a program on a GPU; all share one pool of memory, since only one runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], None]) -> Callable[[], None]:
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph.replay

    return record
