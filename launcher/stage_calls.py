"""Timed calls of single stages, past the scheduler: what `vlm-relay profile` measures with."""

from __future__ import annotations

import functools
import itertools
import json
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tritonclient import grpc

from launcher.process import ServerFailed

TIMEOUT_S = 120.0
MIN_STEPS = 8  # that a decode step's time is taken from


class NoOverlap(ServerFailed):
    """Some answers were over before others had begun: longer ones are needed."""


class Marks(NamedTuple):
    """When the first and the last token of an answer came, by the engine's clock and by its count of steps."""

    first_token_s: float
    first_step: int
    last_token_s: float
    last_step: int


class StageCalls:
    """Calls encoders and decoders of a running server. Close it. One thread."""

    def __init__(self, address: str) -> None:
        self._client = grpc.InferenceServerClient(address)
        self._answers: queue.Queue[tuple[float, Any, Any]] = queue.Queue()
        self._serials = itertools.count()
        self._client.start_stream(self._note)

    def close(self) -> None:
        """Ends the connection."""
        self._client.stop_stream()
        self._client.close()

    def encode(self, encoder: str, images: Sequence[bytes]) -> tuple[float, list[bytes]]:
        """Seconds until all images, sent at once, are encoded; and their handles, with leases.

        Raises:
            ServerFailed: the encoder refused, or does not answer.
        """
        began = time.perf_counter()
        for index, image in enumerate(images):
            callback = functools.partial(self._note_one, index)
            inputs = [_all_bytes("image", [image], 1)]
            self._client.async_infer(encoder, inputs, callback, client_timeout=TIMEOUT_S)
        handles = [b""] * len(images)
        ended = began
        for _ in images:
            ended, answer, error = self._next(encoder)
            if error is not None:  # of this call, or of the stream, when the server is gone
                raise ServerFailed(f"{encoder}: {error}")
            index, result = answer
            handles[index] = bytes(result.as_numpy("handle").reshape(-1)[0])
        return ended - began, handles

    def prefill(
        self, decoder: str, token_ids: Sequence[int], handles: Sequence[bytes] = ()
    ) -> tuple[float, dict[str, Any]]:
        """Seconds of the prompt until its one token, and the decoder's report of it.

        By the engine's own clock, without the way there and back; by ours where the engine does not tell.

        Raises:
            ServerFailed: the decoder refused, or does not answer.
        """
        began = time.perf_counter()
        self._submit(decoder, token_ids, handles, num_tokens=1)
        report: dict[str, Any] = {}
        while True:
            at, _, outputs, is_final = self._chunk(decoder)
            if "report" in outputs:
                report = json.loads(outputs["report"].reshape(-1)[0] or b"{}")
                ended = at
            if is_final:
                times = report.get("times", {})
                if "started_s" in times and "first_token_s" in times:
                    return times["first_token_s"] - times["started_s"], report
                return ended - began, report

    def release(self, decoder: str, handles: Sequence[bytes]) -> None:
        """Gives leases back.

        Raises:
            ServerFailed: the decoder refused, or does not answer.
        """
        self._client.async_stream_infer(decoder, [_all_bytes("handles", handles)], enable_empty_final_response=True)
        self._chunk(decoder)

    def decode(self, decoder: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds per decode step while the answers to all prompts, each of `num_tokens`, are generated together.

        By the engine's own clock and count of steps; by when tokens come here where it does not tell.

        Raises:
            ServerFailed: the decoder refused, does not answer, or is done with some before others begin.
        """
        names = [self._submit(decoder, prompt, (), num_tokens) for prompt in prompts]
        times: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
        marks: list[Marks] = []
        num_open = len(names)
        while num_open:
            at, name, outputs, is_final = self._chunk(decoder)
            if "token_ids" in outputs and name in times:
                times[name].append((at, outputs["token_ids"].size))
            if "report" in outputs:
                marks += _marks(json.loads(outputs["report"].reshape(-1)[0] or b"{}").get("times", {}))
            num_open -= is_final
        return _step_s(marks) if len(marks) == len(names) else _token_s(list(times.values()))

    def _submit(self, decoder: str, token_ids: Sequence[int], handles: Sequence[bytes], num_tokens: int) -> str:
        name = f"profile-{id(self):x}-{next(self._serials)}"
        ids = grpc.InferInput("token_ids", [len(token_ids)], "INT32")
        ids.set_data_from_numpy(np.array(token_ids, dtype=np.int32))
        sampling = json.dumps({"max_tokens": num_tokens, "ignore_eos": True})
        inputs = [_bytes("request_id", name.encode()), ids, _bytes("sampling_parameters", sampling.encode())]
        if handles:
            inputs.append(_all_bytes("handles", handles))
        self._client.async_stream_infer(decoder, inputs, request_id=name, enable_empty_final_response=True)
        return name

    def _chunk(self, decoder: str) -> tuple[float, str, dict[str, Any], bool]:
        """The next response of the stream: when, of which request, its outputs, and whether it is the last."""
        at, result, error = self._next(decoder)
        if error is not None:
            raise ServerFailed(f"{decoder}: {error}")
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        is_final = response.parameters["triton_final_response"].bool_param
        if "finish_reason" in outputs and outputs["finish_reason"][0] == b"error":
            raise ServerFailed(f"{decoder}: {json.loads(outputs['report'][0])['error']}")
        return at, response.id, outputs, is_final

    def _next(self, stage: str) -> tuple[float, Any, Any]:
        try:
            return self._answers.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise ServerFailed(f"{stage} gave no answer within {TIMEOUT_S:g} s") from None

    def _note(self, result: Any, error: Any) -> None:
        self._answers.put((time.perf_counter(), result, error))

    def _note_one(self, index: int, result: Any, error: Any) -> None:
        self._answers.put((time.perf_counter(), (index, result), error))


def _bytes(name: str, value: bytes) -> Any:
    return _all_bytes(name, [value])


def _all_bytes(name: str, values: Sequence[bytes], *more: int) -> Any:
    """An input of shape (number of values, *more) of BYTES."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = list(values)
    shape = [len(values), *more]
    return grpc.InferInput(name, shape, "BYTES").set_data_from_numpy(array.reshape(shape))


def _marks(times: Mapping[str, float]) -> list[Marks]:
    """Of an answer that is whole and whose engine counts steps; else none."""
    names = ("first_token_s", "first_step", "last_token_s", "last_step")
    if not times.keys() >= set(names):
        return []
    first_s, first_step, last_s, last_step = (times[name] for name in names)
    return [Marks(first_s, int(first_step), last_s, int(last_step))]


def _step_s(marks: Sequence[Marks]) -> float:
    """Seconds per step from when the last has begun until the first ends."""
    begin = max(marks, key=lambda each: each.first_step)
    end = min(marks, key=lambda each: each.last_step)
    num_steps = end.last_step - begin.first_step
    if num_steps < MIN_STEPS:
        raise NoOverlap(f"the answers overlap in {max(0, num_steps)} steps: too few tokens for so many sequences")
    return (end.last_token_s - begin.first_token_s) / num_steps


def _token_s(times: Sequence[Sequence[tuple[float, int]]]) -> float:
    """Seconds per token of each sequence, from when the last has begun until the first ends.

    `times` has per sequence when its chunks came and how many tokens each held.
    """
    begin = max(sequence[0][0] for sequence in times)
    end = min(sequence[-1][0] for sequence in times)
    counts = [sum(count for at, count in sequence if begin < at <= end) for sequence in times]
    mean = sum(counts) / len(counts)
    if mean < MIN_STEPS:
        raise NoOverlap(f"the answers overlap in {mean:.1f} tokens: too few tokens for so many sequences")
    return (end - begin) / mean
