"""A gateway on 127.0.0.1 in front of a scripted Triton."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from client.gateway.app import create_app
from client.gateway.listening import GatewayServer, bind
from client.gateway.settings import Settings
from tests.unit.client.scripted import ScriptedServer, running

Json = dict[str, object]

# The parts of a server's plan that are drawn, and some that are not.
PLAN = json.dumps(
    {
        "checkpoint": "somewhere",
        "encoders": [{"name": "clip_encoder", "device": "cuda:0", "cpus": []}],
        "decoders": [{"name": "llava_decoder", "device": "cuda:1", "place": "cuda:1"}],
        "encode": {"slots": 64, "threads": 1},
        "decode": {"max_sequences": 32},
        "limits": {"max_in_flight": 128, "max_waiting": 512},
        "devices": [{"name": "cuda:0", "roles": ["encode"], "model": "NVIDIA L40S"}],
        "links": [{"first": "cuda:0", "second": "cuda:1", "link": "NV4", "gigabytes_per_s": 100.0, "path": "nvlink"}],
    }
)


class Upstream(ScriptedServer):
    """A scripted Triton that also notes the metadata of its calls, and reads requests as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata: list[dict[str, str]] = []

    def ModelStreamInfer(
        self, requests: Iterator[service_pb2.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[service_pb2.ModelStreamInferResponse]:
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        yield from super().ModelStreamInfer(requests, context)

    def answers(self, *texts: str, finish_reason: str = "stop") -> None:
        """Play an answer in these chunks, for all further calls."""
        *before, last = texts
        self.play([*map(self.chunk, before), self.chunk(last, finish_reason), self.final()])

    def tensors(self, call: int = -1) -> dict[str, bytes]:
        """The raw inputs of a call."""
        request = self.requests[call]
        names = [tensor.name for tensor in request.inputs]
        return dict(zip(names, request.raw_input_contents, strict=True))

    def sampling(self, call: int = -1) -> Json:
        """The sampling parameters of a call."""
        parsed: Json = json.loads(self.tensors(call)["sampling_parameters"][4:])
        return parsed

    def messages(self, call: int = -1) -> list[Json]:
        """The messages of a call."""
        parsed: list[Json] = json.loads(self.tensors(call)["messages"][4:])
        return parsed


class Gateway:
    """A running gateway with an HTTP client for it."""

    def __init__(self, settings: Settings) -> None:
        self.app = create_app(settings)
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.server = GatewayServer(self.app, drain_s=5)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self._listener])))
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def close(self) -> None:
        self.http.close()
        if not self.server.should_exit:
            self.server.stop()
        self._thread.join(10)
        self._listener.close()
        assert not self._thread.is_alive()

    def chat(self, content: object = "What?", **more: object) -> httpx.Response:
        """A chat completion with one message."""
        body = {"model": "llava", "messages": [{"role": "user", "content": content}], **more}
        return self.http.post("/v1/chat/completions", json=body)

    def metric(self, sample: str) -> float:
        """The value of one sample, by name and labels as written; 0 when it is not there."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == sample), 0.0)

    def is_idle(self) -> bool:
        """Whether, after a moment, no completion is in flight."""
        until = time.monotonic() + 30
        while self.metric("vlm_relay_gateway_in_flight_requests") and time.monotonic() < until:
            time.sleep(0.01)
        return self.metric("vlm_relay_gateway_in_flight_requests") == 0


Start = Callable[..., Gateway]


@contextlib.contextmanager
def running_upstream() -> Iterator[Upstream]:
    """A running scripted Triton; at the end no call may be open."""
    scripted = Upstream()
    with running(scripted):
        yield scripted


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    """A scripted Triton of the test's own."""
    with running_upstream() as scripted:
        yield scripted


@pytest.fixture
def start(upstream: Upstream) -> Iterator[Start]:
    """Starts gateways by their settings; stops them all, and none may have a completion left."""
    started: list[Gateway] = []

    def start_one(**settings: object) -> Gateway:
        started.append(Gateway(Settings(**{"url": upstream.address, **settings})))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    idle = [gateway.server.should_exit or gateway.is_idle() for gateway in started]
    for gateway in started:
        gateway.close()
    assert all(idle)


@pytest.fixture
def gateway(start: Start) -> Gateway:
    """A gateway with the default settings."""
    return start()


def events_of(response: httpx.Response) -> list[Json]:
    """The objects of an SSE answer; the last must be `[DONE]`, which is left out."""
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    assert parts[-2] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def image_part(image: bytes, kind: str = "jpeg") -> Json:
    """A chat content part with an image."""
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(image).decode()}"}}
