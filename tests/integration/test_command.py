"""The `vlm-relay` command as a user runs it: it starts, says what is wrong, drains, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import Overloaded, RelayClient, RelayClientError
from python_backend.transport.boot import process_start
from tests.integration.observe import PICTURE, QUESTION, SHARED_MEMORY, wait_until
from tests.process import Process

COMMAND = str(Path(sys.executable).with_name("vlm-relay"))
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
READY = r"ready after .* gRPC (\S+), HTTP"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Process]:
    """A server of its own for a test that stops it; killed if the test did not."""
    started = Process(tmp_path / "serve.log", [COMMAND, "serve", *FREE_PORTS])
    yield started
    started.end()


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests(serving: Process) -> None:
    address = serving.wait_for(READY)[1]
    pid = serving.child("tritonserver")
    with RelayClient(address) as client:
        with client.stream(QUESTION, images=[PICTURE], max_tokens=1000, ignore_eos=True) as stream:
            chunks = iter(stream)
            next(chunks)
            serving.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: "stopping" in serving.said())
            refused: RelayClientError | None = None
            try:
                client.ask("Who are you?", max_tokens=1)
            except RelayClientError as error:
                refused = error
            for _ in chunks:
                pass
        assert isinstance(refused, Overloaded), refused
        assert refused.retry_after_s == 5.0
        assert stream.answer.finish_reason == "length"
        assert stream.answer.num_output_tokens == 1000
    assert serving.process.wait(60) == 0
    _assert_clean(serving, pid, "stopped")


def test_ctrl_c_while_loading_stops_at_once_and_leaves_nothing(serving: Process) -> None:
    serving.wait_for("starting tritonserver")
    assert wait_until(lambda: _has_child(serving), 30)
    pid = serving.child("tritonserver")
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(30) == 0
    assert "Traceback" not in serving.said()
    assert wait_until(lambda: _leftovers(pid) == []), _leftovers(pid)


def test_a_second_ctrl_c_does_not_wait_for_running_streams_and_leaves_nothing(serving: Process) -> None:
    address = serving.wait_for(READY)[1]
    pid = serving.child("tritonserver")
    with RelayClient(address) as client, client.stream(QUESTION, max_tokens=1000, ignore_eos=True) as stream:
        next(iter(stream))
        serving.process.send_signal(signal.SIGINT)
        serving.wait_for("stopping")
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(30) == 130
    _assert_clean(serving, pid, "stopped\nvlm-relay: interrupted")


def test_ctrl_c_while_a_lost_server_is_started_anew_stops_at_once(serving: Process) -> None:
    serving.wait_for(READY)
    os.kill(serving.child("tritonserver"), signal.SIGKILL)
    serving.wait_for("started anew")
    assert wait_until(lambda: _has_child(serving), 30)
    pid = serving.child("tritonserver")
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(15) == 0
    _assert_clean(serving, pid, "stopped")


def test_a_killed_launcher_takes_its_server_with_it(serving: Process) -> None:
    serving.wait_for(READY)
    pid = serving.child("tritonserver")
    serving.process.kill()
    serving.process.wait()
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60)
    assert not [path.name for path in SHARED_MEMORY.glob(f"vlm_relay.{pid}-*")]


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = _run("serve", *FREE_PORTS[:2], "--grpc-port", str(port), "--metrics-port", "0")
    assert done.returncode == 1
    assert _one_line(done) == (
        f"vlm-relay: grpc port {port} on 127.0.0.1: Address already in use; "
        "give another with --grpc-port, or 0 for a free one"
    )


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    done = _run("serve", *FREE_PORTS, "--checkpoint", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert _one_line(done) == f"vlm-relay: checkpoint {tmp_path}/nothing: no config.json there"


def test_a_checkpoint_with_broken_weights_stops_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree("demo/checkpoint", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    profile = tmp_path / "profile.toml"
    profile.write_text(f'[model]\ncheckpoint = "{broken}"\nartifacts = "{tmp_path}/artifacts"\n')
    done = _run("serve", *FREE_PORTS, "--profile", str(profile))
    assert done.returncode == 2
    assert _one_line(done).startswith(f"vlm-relay: checkpoint {weights}: damaged or cut short")


def test_a_wrong_profile_is_named(tmp_path: Path) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text("[decode]\nthreads = 0\n")
    done = _run("serve", "--profile", str(profile))
    assert done.returncode == 2
    assert _one_line(done) == (
        f"vlm-relay: profile {profile}: decode.threads: input should be greater than or equal to 1 (given 0)"
    )


def test_ask_without_a_server_says_how_to_start_one() -> None:
    began = time.monotonic()
    done = _run("ask", "--url", "127.0.0.1:9", str(PICTURE), QUESTION)
    assert done.returncode == 1
    assert "127.0.0.1:9" in _one_line(done)
    assert "vlm-relay serve" in _one_line(done)
    assert time.monotonic() - began < 20


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=dict(os.environ))


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def _assert_clean(serving: Process, pid: int, last_words: str) -> None:
    assert "Traceback" not in serving.said()
    assert serving.said().rstrip().endswith(last_words)
    assert _leftovers(pid) == []


def _has_child(serving: Process) -> bool:
    try:
        return bool(serving.child("tritonserver"))
    except (StopIteration, OSError):
        return False


def _leftovers(pid: int) -> list[str]:
    """Processes of the server's session and files of its boot."""
    files = [path.name for path in SHARED_MEMORY.glob(f"vlm_relay.*{pid}-*")]
    processes = subprocess.run(["pgrep", "-s", str(pid)], capture_output=True, text=True).stdout.split()
    return files + [process for process in processes if process_start(int(process)) is not None]  # no zombies
