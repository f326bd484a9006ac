"""A Triton gRPC service on 127.0.0.1 that answers by script."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
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
        self.shared_memory_key = "right"
        self.regions: dict[str, str] = {}  # registered: name and key
        self.num_registered = 0
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

    def held(self, gate: threading.Event, step: Step) -> Step:
        """`step` once the gate is open."""
        return lambda context, ended: step(context, ended) if gate.wait(30) and not ended.is_set() else None

    def together(self, num_calls: int, step: Step) -> Step:
        """`step` once so many requests are here."""

        def wait(context: grpc.ServicerContext, ended: threading.Event) -> service_pb2.ModelStreamInferResponse | None:
            with self._changed:
                are_here = self._changed.wait_for(lambda: len(self.requests) >= num_calls, 30)
            return step(context, ended) if are_here else context.abort(grpc.StatusCode.ABORTED, "too few requests")

        return wait

    # The service.

    def ModelStreamInfer(
        self, requests: Iterator[service_pb2.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[service_pb2.ModelStreamInferResponse]:
        ended, played = threading.Event(), threading.Event()
        self._count(1)
        if not context.add_callback(lambda: self._note_end(ended, played)):  # it has ended already
            self._note_end(ended, played)
            return
        # Like Triton's stub, which would wait for us at shutdown: the client must have ended its side.
        for request in requests:
            with self._changed:
                self.requests.append(request)
                self._changed.notify_all()
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

    def SystemSharedMemoryRegister(
        self, request: service_pb2.SystemSharedMemoryRegisterRequest, context: grpc.ServicerContext
    ) -> service_pb2.SystemSharedMemoryRegisterResponse:
        if ("triton-grpc-protocol-vlm-relay-shm-key", self.shared_memory_key) not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header '...'")
        if request.name in self.regions:
            message = f"shared memory region '{request.name}' already in manager"
            context.abort(grpc.StatusCode.ALREADY_EXISTS, message)
        self.regions[request.name] = request.key
        self.num_registered += 1
        return service_pb2.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(
        self, request: service_pb2.SystemSharedMemoryUnregisterRequest, context: grpc.ServicerContext
    ) -> service_pb2.SystemSharedMemoryUnregisterResponse:
        del self.regions[request.name]
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    def images(self, call: int = -1) -> list[bytes]:
        """The images of a call, from the message or from shared memory."""
        request = self.requests[call]
        given = next(each for each in request.inputs if each.name == "image")
        if "shared_memory_region" in given.parameters:
            path = "/dev/shm" + self.regions[given.parameters["shared_memory_region"].string_param]
            at = given.parameters["shared_memory_offset"].int64_param
            raw = Path(path).read_bytes()[at : at + given.parameters["shared_memory_byte_size"].int64_param]
        else:
            raw = request.raw_input_contents[1]
        images = []
        while raw:
            (size,) = struct.unpack("<I", raw[:4])
            images.append(raw[4 : 4 + size])
            raw = raw[4 + size :]
        return images

    def _note_end(self, ended: threading.Event, played: threading.Event) -> None:
        if not played.is_set():
            self.cancelled.set()
        ended.set()
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self._num_open += change
            self._changed.notify_all()

    def all_calls_ended(self, within_s: float = 30.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, within_s)


@contextlib.contextmanager
def running(scripted: ScriptedServer) -> Iterator[ScriptedServer]:
    """Serves by script on a free port of 127.0.0.1; at the end no call may be open."""
    serving = grpc.server(ThreadPoolExecutor(32))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(scripted, serving)
    scripted.address = f"127.0.0.1:{serving.add_insecure_port('127.0.0.1:0')}"
    serving.start()
    yield scripted
    ended = scripted.all_calls_ended()
    serving.stop(0).wait()
    assert ended, "a call was left open"
