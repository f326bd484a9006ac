"""Requests and responses as Triton's gRPC messages; the contract is `model_repository/README.md`. No I/O."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from tritonclient.grpc import InferResult, service_pb2

from client.answer import Alternative, Chunk, Progress
from client.errors import ServerError, from_message
from client.request import Request
from client.shared_memory import Piece

# Always asked for: they cost a few bytes and an `Answer` tells them.
_ALWAYS = (
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
)


@dataclass(frozen=True, slots=True)
class Reply:
    """One response: a chunk, the final mark, or both; counts and decision where the response has them."""

    chunk: Chunk | None
    is_final: bool
    num_input_tokens: int | None
    decision: Mapping[str, object] | None
    progress: Progress | None = None


def message_from(request: Request, model: str, piece: Piece | None = None) -> service_pb2.ModelInferRequest:
    """The request for `model`, streamed, with an empty final response to end it; its images are in `piece`, if any."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request.request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    if request.text is not None:
        _add_bytes(message, "text_input", request.text.encode())
    if request.messages is not None:
        _add_bytes(message, "messages", request.messages.encode())
    if piece is not None:
        _add_piece(message, "image", piece, len(request.images))
    elif request.images:
        _add_bytes(message, "image", *request.images)
    _add_bytes(message, "sampling_parameters", request.sampling.encode())
    for name in _ALWAYS:
        _add(message, name, "BOOL", b"\x01")
    if request.has_logprobs:
        _add(message, "return_logprobs", "BOOL", b"\x01")
    if request.return_decision:
        _add(message, "return_decision", "BOOL", b"\x01")
    if request.return_progress:
        _add(message, "return_progress", "BOOL", b"\x01")
    if request.priority:
        _add(message, "priority", "INT32", struct.pack("<i", request.priority))
    if request.deadline_s is not None:
        _add(message, "deadline_ms", "UINT32", struct.pack("<I", max(1, round(request.deadline_s * 1000))))
    return message


def reply_from(response: service_pb2.ModelStreamInferResponse) -> Reply:
    """What a response says.

    Raises:
        RelayClientError: the response is an error; which one, its `[CODE]` decides.
        ServerError: the response breaks the contract.
    """
    if response.error_message:
        raise from_message(response.error_message)
    message = response.infer_response
    is_final = bool(message.parameters["triton_final_response"].bool_param)
    if not message.outputs:
        return Reply(None, is_final, None, None)
    try:
        return _reply(InferResult(message), is_final)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise ServerError(f"a response that breaks the contract: {error!r}") from error


def _reply(result: InferResult, is_final: bool) -> Reply:
    stage, told = _text(result, "progress"), _text(result, "decision")
    decision = json.loads(told) if told else None
    if stage is not None:
        return Reply(None, is_final, None, decision, Progress(stage, decision))
    reason = _text(result, "finish_reason")
    chunk = Chunk(
        text=_text(result, "text_output") or "",
        finish_reason=None if reason in (None, "", "None") else reason,
        num_output_tokens=_number(result, "num_output_tokens") or 0,
        logprobs=_logprobs(_text(result, "logprobs")),
    )
    return Reply(chunk, is_final, _number(result, "num_input_tokens"), decision)


def _logprobs(text: str | None) -> tuple[tuple[Alternative, ...], ...]:
    tokens = json.loads(text) if text else None
    return tuple(
        tuple(
            Alternative(int(token_id), told.get("decoded_token") or "", float(told["logprob"]), int(told["rank"]))
            for token_id, told in token.items()
        )
        for token in tokens or ()
    )


def _text(result: InferResult, name: str) -> str | None:
    values = result.as_numpy(name)
    if values is None or values.size == 0:
        return None
    value: bytes = values.flat[0]
    return value.decode()


def _number(result: InferResult, name: str) -> int | None:
    values = result.as_numpy(name)
    return None if values is None or values.size == 0 else int(values.flat[0])


def _add(message: service_pb2.ModelInferRequest, name: str, datatype: str, raw: bytes, length: int = 1) -> None:
    message.inputs.add(name=name, datatype=datatype, shape=[length])
    message.raw_input_contents.append(raw)


def _add_piece(message: service_pb2.ModelInferRequest, name: str, piece: Piece, length: int) -> None:
    """BYTES elements that lie in shared memory; they have no part in the raw contents."""
    given = message.inputs.add(name=name, datatype="BYTES", shape=[length])
    given.parameters["shared_memory_region"].string_param = piece.region
    given.parameters["shared_memory_byte_size"].int64_param = piece.num_bytes
    given.parameters["shared_memory_offset"].int64_param = piece.offset


def _add_bytes(message: service_pb2.ModelInferRequest, name: str, *elements: bytes) -> None:
    """BYTES elements, each behind its length in four little-endian bytes."""
    raw = b"".join(part for element in elements for part in (struct.pack("<I", len(element)), element))
    _add(message, name, "BYTES", raw, len(elements))
