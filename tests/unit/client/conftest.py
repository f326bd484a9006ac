"""A Triton gRPC service on 127.0.0.1 that answers by script."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

Step = Callable[[grpc.ServicerContext, threading.Event], service_pb2.ModelStreamInferResponse | None]


class ScriptedServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Plays one script per call, the last one for all further calls; notes what came and how calls ended.

    A script is a list of steps, made by the methods below. Every response goes out as Triton sends it: text
    tensors with their length in front, the final mark as a parameter.
    """

    def __init__(self) -> None:
        self.address = ""
        self.scripts: list[list[Step]] = [[self.final()]]
        self.requests: list[service_pb2.ModelInferRequest] = []
        self.cancelled = threading.Event()  # a call ended before its script did
        self.is_model_ready = True
        self._num_open = 0
        self._changed = threading.Condition()

    def play(self, *scripts: list[Step]) -> None:
        """Answer the next calls by these scripts."""
        self.scripts = list(scripts)

    # The steps of a script.

    def chunk(self, text: str = "", finish_reason: str = "None", is_final: bool = False, **more: str) -> Step:
        """A response with one output token; three input tokens; `more` are further text outputs."""
        response = service_pb2.ModelStreamInferResponse()
        message = response.infer_response
        texts = {"text_output": text, "finish_reason": finish_reason, **more}
        for name, value in texts.items():
            raw = value.encode()
            message.outputs.add(name=name, datatype="BYTES", shape=[1])
            message.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
        for name, count in {"num_input_tokens": 3, "num_output_tokens": 1}.items():
            message.outputs.add(name=name, datatype="UINT32", shape=[1])
            message.raw_output_contents.append(struct.pack("<I", count))
        message.parameters["triton_final_response"].bool_param = is_final
        return lambda context, ended: response

    def final(self) -> Step:
        """The empty response with the final mark."""
        response = service_pb2.ModelStreamInferResponse()
        response.infer_response.parameters["triton_final_response"].bool_param = True
        return lambda context, ended: response

    def fail(self, message: str) -> Step:
        """An error response, as Triton streams it: a message, no status."""
        response = service_pb2.ModelStreamInferResponse(error_message=message)
        return lambda context, ended: response

    def abort(self, status: grpc.StatusCode, details: str) -> Step:
        """The end of the call, with a status."""
        return lambda context, ended: context.abort(status, details)

    def silence(self) -> Step:
        """Nothing more until the client goes away."""
        return lambda context, ended: None if ended.wait(30) else context.abort(grpc.StatusCode.ABORTED, "")

    def late(self, step: Step) -> Step:
        """`step` after a moment, in which a hasty client would have cancelled."""
        return lambda context, ended: None if ended.wait(0.05) else step(context, ended)

    # The service.

    def ModelStreamInfer(
        self, requests: Iterator[service_pb2.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[service_pb2.ModelStreamInferResponse]:
        ended, played = threading.Event(), threading.Event()
        self._count(1)
        context.add_callback(lambda: self._note_end(ended, played))
        # Like Triton's stub, which would wait for us at shutdown: the client must have ended its side.
        self.requests.extend(requests)
        for step in self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]:
            response = step(context, ended)
            if ended.is_set():
                return
            yield response
        played.set()

    def ModelReady(
        self, request: service_pb2.ModelReadyRequest, context: grpc.ServicerContext
    ) -> service_pb2.ModelReadyResponse:
        return service_pb2.ModelReadyResponse(ready=self.is_model_ready)

    def _note_end(self, ended: threading.Event, played: threading.Event) -> None:
        if not played.is_set():
            self.cancelled.set()
        ended.set()
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self._num_open += change
            self._changed.notify_all()

    def all_calls_ended(self, within_s: float = 5.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, within_s)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A running scripted server; at the end of the test no call may be open."""
    scripted = ScriptedServer()
    running = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(scripted, running)
    scripted.address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
    running.start()
    yield scripted
    ended = scripted.all_calls_ended()
    running.stop(0).wait()
    assert ended, "a call was left open"
