from __future__ import annotations

import json
import struct

import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from client.answer import Alternative, Chunk
from client.errors import Overloaded, ServerError
from client.request import request_from
from client.wire import Reply, message_from, reply_from


def _inputs(message: service_pb2.ModelInferRequest) -> dict[str, tuple[str, list[int], bytes]]:
    pairs = zip(message.inputs, message.raw_input_contents, strict=True)
    return {tensor.name: (tensor.datatype, list(tensor.shape), raw) for tensor, raw in pairs}


def _response(**outputs: str | int) -> service_pb2.ModelStreamInferResponse:
    response = service_pb2.ModelStreamInferResponse()
    for name, value in outputs.items():
        raw = struct.pack("<I", value) if isinstance(value, int) else value.encode()
        datatype = "UINT32" if isinstance(value, int) else "BYTES"
        response.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
        content = raw if isinstance(value, int) else struct.pack("<I", len(raw)) + raw
        response.infer_response.raw_output_contents.append(content)
    return response


def test_a_question_is_sent_streamed_with_its_counts_and_a_final_response() -> None:
    message = message_from(request_from("Größe?", None, [], raw=True, request_id="r1"), "llava")

    assert (message.model_name, message.id) == ("llava", "r1")
    assert message.parameters["triton_enable_empty_final_response"].bool_param
    assert _inputs(message) == {
        "text_input": ("BYTES", [1], b"\x08\0\0\0Gr\xc3\xb6\xc3\x9fe?"),
        "sampling_parameters": ("BYTES", [1], b"\x02\0\0\0{}"),
        "stream": ("BOOL", [1], b"\x01"),
        "exclude_input_in_output": ("BOOL", [1], b"\x01"),
        "return_finish_reason": ("BOOL", [1], b"\x01"),
        "return_num_input_tokens": ("BOOL", [1], b"\x01"),
        "return_num_output_tokens": ("BOOL", [1], b"\x01"),
    }


def test_a_question_without_an_image_is_sent_as_a_message_so_that_the_chat_template_wraps_it() -> None:
    inputs = _inputs(message_from(request_from("Who?", None, []), "llava"))

    assert "text_input" not in inputs
    assert json.loads(inputs["messages"][2][4:]) == [{"role": "user", "content": "Who?"}]


def test_images_are_the_elements_of_one_tensor_byte_for_byte() -> None:
    message = message_from(request_from("What?", None, [b"first\0\0", b"\0second"]), "llava")

    datatype, shape, raw = _inputs(message)["image"]
    assert (datatype, shape) == ("BYTES", [2])
    assert list(deserialize_bytes_tensor(raw)) == [b"first\0\0", b"\0second"]


def test_messages_are_sent_as_json_in_place_of_the_question() -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]

    inputs = _inputs(message_from(request_from(None, messages, [b"image"]), "llava"))

    assert "text_input" not in inputs
    assert json.loads(inputs["messages"][2][4:]) == messages


def test_priority_deadline_decision_and_logprobs_are_sent_when_set() -> None:
    request = request_from(
        "What?", None, [], priority=-2, deadline_s=1.5, return_decision=True, logprobs=0, max_tokens=4
    )

    inputs = _inputs(message_from(request, "llava"))

    assert inputs["priority"] == ("INT32", [1], struct.pack("<i", -2))
    assert inputs["deadline_ms"] == ("UINT32", [1], struct.pack("<I", 1500))
    assert inputs["return_decision"] == ("BOOL", [1], b"\x01")
    assert inputs["return_logprobs"] == ("BOOL", [1], b"\x01")
    assert inputs["sampling_parameters"][2][4:] == b'{"logprobs":0,"max_tokens":4}'


def test_a_deadline_under_a_millisecond_is_not_sent_as_none() -> None:
    inputs = _inputs(message_from(request_from("What?", None, [], deadline_s=1e-6), "llava"))

    assert inputs["deadline_ms"][2] == struct.pack("<I", 1)


def test_a_response_becomes_a_chunk_with_its_counts_and_decision() -> None:
    response = _response(
        text_output="a cät",
        finish_reason="length",
        num_input_tokens=580,
        num_output_tokens=2,
        decision='{"mode":"split"}',
        logprobs='[{"5":{"logprob":-0.5,"rank":1,"decoded_token":"a"}}]',
    )

    assert reply_from(response) == Reply(
        chunk=Chunk("a cät", "length", 2, ((Alternative(5, "a", -0.5, 1),),)),
        is_final=False,
        num_input_tokens=580,
        decision={"mode": "split"},
    )


@pytest.mark.parametrize("reason", ["None", ""])
def test_an_answer_that_goes_on_has_no_finish_reason(reason: str) -> None:
    reply = reply_from(_response(text_output="a", finish_reason=reason, logprobs="null"))

    assert reply.chunk == Chunk("a", None, 0)


def test_the_empty_final_response_has_no_chunk() -> None:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = True

    assert reply_from(response) == Reply(None, True, None, None)


def test_an_error_response_is_raised_by_its_code() -> None:
    with pytest.raises(Overloaded, match="full"):
        reply_from(service_pb2.ModelStreamInferResponse(error_message="[UNAVAILABLE] full; retry after 3 s"))


@pytest.mark.parametrize("output", [{"logprobs": "[3]"}, {"decision": "{"}, {"logprobs": '[{"x":{}}]'}])
def test_a_response_that_breaks_the_contract_is_the_servers_fault(output: dict[str, str]) -> None:
    with pytest.raises(ServerError, match="breaks the contract"):
        reply_from(_response(text_output="a", **output))
