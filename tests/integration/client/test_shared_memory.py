"""Large images by shared memory, read by the real server, and closed to who has no key."""

from __future__ import annotations

import http.client
import json
import random
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client import RelayClient
from client.load_plan import picture
from client.shared_memory import HEADER
from launcher.server import Server
from launcher.triton import SHARED_MEMORY_HEADER
from tests.integration.conftest import SHARED_MEMORY_KEY
from tests.integration.observe import PICTURE, QUESTION, assert_idle

pytestmark = pytest.mark.server


def _regions(server: Server) -> list[str]:
    with grpc.insecure_channel(f"127.0.0.1:{server.ports.grpc}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        status = stub.SystemSharedMemoryStatus(
            service_pb2.SystemSharedMemoryStatusRequest(), metadata=((HEADER, SHARED_MEMORY_KEY),)
        )
        return list(status.regions)


def test_the_answer_is_that_to_the_same_image_in_the_message(server: Server, client: RelayClient) -> None:
    # A JPEG with much behind its end: large, and decoded as the picture that it is.
    image = PICTURE.read_bytes() + random.Random(1).randbytes(1 << 20)
    expected = client.ask(QUESTION, images=[image, image], max_tokens=8)

    with RelayClient(f"127.0.0.1:{server.ports.grpc}", shared_memory_key=SHARED_MEMORY_KEY) as beside:
        answers = [beside.ask(QUESTION, images=[image, image], max_tokens=8).text for _ in range(3)]
        assert len(_regions(server)) == 1

    assert answers == [expected.text] * 3
    assert _regions(server) == []
    assert list(Path("/dev/shm").glob("vlm_relay_client_*")) == []
    assert_idle(server)


def test_a_stream_that_is_left_gives_its_piece_back(server: Server) -> None:
    image = picture(1024, 1024, random.Random(1)) + bytes(1 << 20)
    with RelayClient(f"127.0.0.1:{server.ports.grpc}", shared_memory_key=SHARED_MEMORY_KEY) as beside:
        for _ in range(70):  # more than the region would hold
            with beside.stream(QUESTION, images=[image], max_tokens=500, ignore_eos=True) as stream:
                pass
            assert stream.answer.text == ""
        assert beside.ask(QUESTION, images=[image], max_tokens=2).num_output_tokens
    assert_idle(server)


def test_nobody_registers_memory_without_the_key(server: Server) -> None:
    request = service_pb2.SystemSharedMemoryRegisterRequest(name="x", key=f"/{server.region}", byte_size=1)
    with grpc.insecure_channel(f"127.0.0.1:{server.ports.grpc}") as channel, pytest.raises(grpc.RpcError) as refused:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).SystemSharedMemoryRegister(request)
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=10)
    body = json.dumps({"key": f"/{server.region}", "offset": 0, "byte_size": 1})
    connection.request("POST", "/v2/systemsharedmemory/region/x/register", body, {SHARED_MEMORY_HEADER: "wrong"})
    status = connection.getresponse().status
    connection.close()

    assert "restricted" in (refused.value.details() or "")
    assert status == 403
