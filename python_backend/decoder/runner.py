"""One step on the model: chunks packed into tensors, logits, the tokens chosen from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

import torch

from python_backend.decoder.batch import Chunk
from python_backend.decoder.decode_steps import DecodeSteps, record_graph
from python_backend.decoder.device_memory import check_fit, weight_bytes, working_bytes
from python_backend.decoder.kernels import Kernels, choose_kernels
from python_backend.decoder.kv_cache import KeyValueCache, block_bytes
from python_backend.decoder.memory import keep_freed_memory
from python_backend.decoder.model import DecodeGroup, LlamaModel, PackedStep, PromptSpan
from python_backend.decoder.operators import TorchOperators
from python_backend.decoder.options import EngineOptions
from python_backend.decoder.sampling import Choice, Ranked, choose_tokens, is_plain
from python_backend.errors import InternalError
from python_backend.weights import DecoderConfig, read_config, read_weights

Outcome = Choice | InternalError | None  # of one chunk; None when its last token is not the newest


class ModelRunner:
    """The model with its cache. Used by the engine thread alone, after it is built.

    `context_tokens` is the longest sequence, prompt and answer together, that model and cache can hold.
    """

    def __init__(self, checkpoint: Path, options: EngineOptions) -> None:
        self.config: DecoderConfig = read_config(checkpoint)
        device = torch.device(options.device)
        dtype = options.torch_dtype
        self._block_tokens = options.block_tokens
        self.num_blocks = options.num_blocks or max(
            1, options.kv_cache_bytes // block_bytes(self.config, options.block_tokens, dtype)
        )
        limits = [self.config.max_position_tokens, self.num_blocks * options.block_tokens]
        self.context_tokens = min([*limits, options.context_tokens or limits[0]])
        self._device = device
        self._check_memory(options)
        if device.type == "cpu":
            keep_freed_memory()
        weights = read_weights(checkpoint, self.config, dtype, device)
        kernels = choose_kernels(self.config, self.context_tokens, options)
        self._model = LlamaModel(self.config, weights, kernels)
        self._cache = KeyValueCache(self.config, self.num_blocks, options.block_tokens, dtype, device)
        self._steps = self._make_steps(kernels, options)

    @property
    def num_ahead(self) -> int:
        """For how many tokens beyond its newest one a sequence should hold blocks: 1 where steps run ahead."""
        return 0 if self._steps is None else 1

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> list[Outcome]:
        """What each chunk gave: a choice, None if it ends before the newest token, or its error.

        Writes the keys and values of the chunks; doing the same chunk again changes nothing.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of the calling thread
        if self._steps is not None:
            if all(is_generated(chunk) for chunk in chunks):
                return self._run_steps(self._steps, chunks)
            self._steps.forget()
        ordered = order(chunks)
        logits = self._model.forward(self._pack(ordered), self._cache)
        giving = [chunk.sequence for chunk in ordered if chunk.gives_token]
        outcomes: dict[int, Outcome] = {}
        for sequence, choice in zip(giving, choose_tokens(logits, giving, self.config.eos_ids), strict=True):
            outcomes[sequence.serial] = choice or InternalError("the model's logits are not finite")
        return [outcomes.get(chunk.sequence.serial) for chunk in chunks]

    def _run_steps(self, steps: DecodeSteps, chunks: list[Chunk]) -> list[Outcome]:
        """As `run`, when every chunk is a generated token."""
        sequences = [chunk.sequence for chunk in chunks]
        is_greedy = all(is_plain(each) and each.sampling.logprobs is None for each in sequences)
        tokens, logits = steps.run(chunks, goes_on=is_greedy)
        if logits is not None:
            choices = choose_tokens(logits, sequences, self.config.eos_ids)
            return [choice or InternalError("the model's logits are not finite") for choice in choices]
        return [
            InternalError("the model's logits are not finite")
            if logprob is None
            else Choice(Ranked(token_id, logprob, 0), ())
            for token_id, logprob in zip(tokens.token_ids, tokens.logprobs, strict=True)
        ]

    def _check_memory(self, options: EngineOptions) -> None:
        """Raises `MemoryRefused` when a GPU has no room for all of it."""
        if self._device.type != "cuda":
            return
        dtype = options.torch_dtype
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        check_fit(
            options.device,
            free_bytes,
            weight_bytes(self.config, dtype),
            self.num_blocks * block_bytes(self.config, options.block_tokens, dtype),
            working_bytes(self.config, dtype, options.max_step_tokens, options.max_sequences),
        )

    @torch.inference_mode()
    def _make_steps(self, kernels: Kernels, options: EngineOptions) -> DecodeSteps | None:
        """Decode steps in fixed memory where they are wanted: recorded on a GPU whose kernels allow it."""
        is_gpu = self._device.type == "cuda"
        can_record = is_gpu and type(kernels.operators) is not TorchOperators
        wanted = can_record if options.runs_ahead is None else options.runs_ahead
        if not wanted:
            return None
        if is_gpu:
            torch.cuda.set_device(self._device)
        record = record_graph(self._device) if can_record and options.graphs else None
        context_tokens, device = self.context_tokens, self._device
        return DecodeSteps(self._model, self._cache, options.max_sequences, context_tokens, device, record)

    @torch.inference_mode()
    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that may hold values that are not finite."""
        if blocks:
            self._cache.clear(blocks)

    def _pack(self, ordered: list[Chunk]) -> PackedStep:
        size = self._block_tokens
        positions = [position for chunk in ordered for position in range(chunk.start, chunk.end)]
        blocks = [
            chunk.sequence.blocks[position // size] for chunk in ordered for position in range(chunk.start, chunk.end)
        ]
        ends = _running_sum(chunk.num_tokens for chunk in ordered)
        return PackedStep(
            inputs=self._inputs(ordered),
            positions=self._integers(positions),
            blocks=self._integers(blocks),
            decode=self._decode_group([chunk for chunk in ordered if is_decode(chunk)]),
            prompts=tuple(self._spans(ordered)),
            logit_rows=self._integers([end - 1 for chunk, end in zip(ordered, ends, strict=True) if chunk.gives_token]),
        )

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _inputs(self, ordered: list[Chunk]) -> torch.Tensor:
        token_ids = [token_id for chunk in ordered for token_id in chunk.sequence.token_ids[chunk.start : chunk.end]]
        inputs = self._model.embed(self._integers(token_ids))
        row = 0
        for chunk in ordered:
            for span in chunk.sequence.spans:
                first, last = max(chunk.start, span.start), min(chunk.end, span.end)
                if first < last:
                    features = span.image.features[first - span.start : last - span.start]
                    inputs[row + first - chunk.start : row + last - chunk.start] = features.to(inputs)
            row += chunk.num_tokens
        return inputs

    def _decode_group(self, decodes: list[Chunk]) -> DecodeGroup | None:
        if not decodes:
            return None
        padding = self._cache.padding_block
        rows = zip_longest(*(chunk.sequence.blocks for chunk in decodes), fillvalue=padding)
        tables = torch.tensor(list(zip(*rows, strict=True)), device=self._device)
        return DecodeGroup(tables, self._integers([chunk.end for chunk in decodes]))

    def _spans(self, ordered: list[Chunk]) -> Iterator[PromptSpan]:
        row = 0
        for chunk in ordered:
            if not is_decode(chunk):
                table = chunk.sequence.blocks[: -(-chunk.end // self._block_tokens)]
                last = row + chunk.num_tokens
                yield PromptSpan(row, last, chunk.start, self._integers(table))
            row += chunk.num_tokens


def is_decode(chunk: Chunk) -> bool:
    """Whether the chunk is a single token with others before it."""
    return chunk.num_tokens == 1 and chunk.start > 0


def is_generated(chunk: Chunk) -> bool:
    """Whether the chunk is the newest token of an answer."""
    return chunk.num_tokens == 1 and chunk.gives_token and chunk.start >= chunk.sequence.num_prompt_tokens


def order(chunks: list[Chunk]) -> list[Chunk]:
    """Single tokens first, as `PackedStep` wants them."""
    return sorted(chunks, key=lambda chunk: not is_decode(chunk))


def _running_sum(sizes: Iterable[int]) -> list[int]:
    total = 0
    sums = []
    for size in sizes:
        total += size
        sums.append(total)
    return sums
