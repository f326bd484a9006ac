"""The shipped image, built and run: 'make image-test'.

Minutes long, needs root, buildah, podman, runc and mmdebstrap, and so stands outside `make test`.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import RelayClient, RelayClientError
from tests.image.container import IMAGE, ROOT, build_base, build_image, container, is_possible, logs, podman, state

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs root, buildah, podman, runc and mmdebstrap")

PICTURE = ROOT / "demo" / "picture.jpg"
QUESTION = "What is in the picture?"
START_S, STOP_S = 240.0, 90.0


@pytest.fixture(scope="session")
def image() -> str:
    build_base()
    build_image()
    return IMAGE


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def served(image: str) -> Iterator[tuple[str, str]]:
    """A container that serves, and its gRPC address."""
    http, grpc, metrics = free_ports(3)
    words = ["serve", "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    with container("vlm-relay-test", *words) as name:
        until = time.monotonic() + START_S
        while "ready after" not in logs(name):
            assert state(name)["status"] == "running", logs(name)
            assert time.monotonic() < until, logs(name)
            time.sleep(1)
        yield name, f"127.0.0.1:{grpc}"


def test_the_dockerfile_and_the_entrypoint_pass_their_linters() -> None:
    hadolint = ROOT / ".venv" / "bin" / "hadolint"
    subprocess.run([str(hadolint), str(ROOT / "docker" / "Dockerfile")], check=True)
    subprocess.run(["sh", "-n", str(ROOT / "docker" / "entrypoint.sh")], check=True)


def test_a_stranger_on_a_read_only_root_answers_and_drains_on_sigterm(served: tuple[str, str]) -> None:
    name, address = served
    options = {"max_tokens": 200, "ignore_eos": True}
    with RelayClient(address) as client:
        assert client.ask(QUESTION, images=[str(PICTURE)]).text.strip()
        wanted = client.ask(QUESTION, images=[str(PICTURE)], **options).text
        pieces: list[str] = []
        with client.stream(QUESTION, images=[str(PICTURE)], **options) as stream:
            for chunk in stream:
                pieces.append(chunk.text)
                if len(pieces) == 1:
                    stopping = threading.Thread(target=podman, args=("stop", "--time", "60", name))
                    stopping.start()
                    time.sleep(0.2)
    stopping.join(STOP_S)
    assert "".join(pieces) == wanted  # the stream that ran lost nothing
    assert state(name) == {"status": "exited", "exit_code": 0}, logs(name)
    assert "some requests did not finish" not in logs(name)
    with pytest.raises(RelayClientError), RelayClient(address) as client:
        client.ask(QUESTION)


def test_nothing_was_written_into_the_image(served: tuple[str, str]) -> None:
    name, _ = served

    changed = podman("diff", name).stdout.split("\n")

    # Mount points of the runtime are made, and nothing else.
    allowed = ("/etc", "/run", "/tmp", "/dev", "/proc", "/sys", "/var/tmp", "/var")
    assert [line for line in changed if line and not line[2:].startswith(allowed)] == []
    assert "12345" in podman("exec", name, "id").stdout
    held = podman("exec", name, "sh", "-c", "du -sm /dev/shm | cut -f1").stdout
    assert int(held) < 256


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"VLM_RELAY_PROFILE": "/missing.toml"}, "entrypoint: VLM_RELAY_PROFILE: /missing.toml is not a file"),
        ({"VLM_RELAY_STATE": "/opt"}, "entrypoint: VLM_RELAY_STATE: /opt cannot be written by user 12345"),
        ({"VLM_RELAY_CHECKPOINT": "/missing"}, "vlm-relay: checkpoint /missing: no config.json there"),
    ],
)
def test_what_is_wrong_is_one_clear_line(image: str, variables: dict[str, str], told: str, tmp_path: Path) -> None:
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    with container("vlm-relay-wrong", "serve", *ports, **variables) as name:
        podman("wait", name)

        assert state(name) == {"status": "exited", "exit_code": 2}
        assert logs(name).strip().splitlines()[-1] == told
