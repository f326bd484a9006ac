from __future__ import annotations

import argparse
import json
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from client.__main__ import configure, main, run
from tests.unit.client.scripted import ScriptedServer

ROOT = Path(__file__).parents[3]


def _start(server: ScriptedServer, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "client", "ask", "--url", server.address, *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_answer_goes_to_stdout_with_one_newline_at_its_end(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.play([server.chunk("a "), server.chunk("car", "stop"), server.final()])

    status = main(["ask", "--url", server.address, "What?"])

    assert (status, *capsys.readouterr()) == (0, "a car\n", "")


def test_the_last_argument_is_the_question_and_all_before_are_images(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"A")
    (tmp_path / "b.jpg").write_bytes(b"B")

    status = main(["ask", str(tmp_path / "a.jpg"), str(tmp_path / "b.jpg"), "What?", "--url", server.address])

    raws = {
        tensor.name: raw
        for tensor, raw in zip(server.requests[0].inputs, server.requests[0].raw_input_contents, strict=True)
    }
    assert status == 0
    assert raws["text_input"][4:] == b"What?"
    assert raws["image"] == b"\1\0\0\0A\1\0\0\0B"


def test_options_become_the_request(server: ScriptedServer) -> None:
    options = "--max-tokens 5 --temperature 0.5 --seed 7 --stop . --stop ! --priority -3 --deadline-s 9"

    main(["ask", "What?", "--url", server.address, *options.split()])

    raws = {
        tensor.name: raw
        for tensor, raw in zip(server.requests[0].inputs, server.requests[0].raw_input_contents, strict=True)
    }
    sampling = {"max_tokens": 5, "temperature": 0.5, "seed": 7, "stop": [".", "!"]}
    assert json.loads(raws["sampling_parameters"][4:]) == sampling
    assert raws["priority"] == struct.pack("<i", -3)
    assert raws["deadline_ms"] == struct.pack("<I", 9000)


def test_json_prints_one_object_and_nothing_else(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.play([server.chunk("a "), server.chunk("car", "stop", decision='{"mode":"split"}'), server.final()])

    main(["ask", "--json", "--url", server.address, "What?"])

    printed = json.loads(capsys.readouterr().out)
    assert (printed["text"], printed["finish_reason"], printed["num_output_tokens"]) == ("a car", "stop", 2)
    assert printed["decision"] == {"mode": "split"}


def test_stats_are_one_line_on_stderr(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.play([server.chunk("a car", "stop", decision='{"mode":"split"}'), server.final()])

    main(["ask", "--stats", "--url", server.address, "What?"])

    out, error = capsys.readouterr()
    assert out == "a car\n"
    assert error.count("\n") == 1
    assert "3 tokens in | 1 tokens out" in error
    assert 'ended by stop | decision {"mode": "split"}' in error


def test_a_server_error_is_one_line_and_status_1(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.play([server.chunk("a "), server.fail("[INTERNAL] the decoder broke"), server.final()])

    status = main(["ask", "--url", server.address, "What?"])

    assert (status, *capsys.readouterr()) == (1, "a \n", "vlm-relay: the decoder broke\n")


def test_an_unreachable_server_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["ask", "--url", "127.0.0.1:1", "What?"])

    out, error = capsys.readouterr()
    assert (status, out, error.count("\n")) == (1, "", 1)
    assert error.startswith("vlm-relay: no server answers at 127.0.0.1:1; start one with")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such.jpg", "What?"], "'no-such.jpg' does not exist"),
        ([__file__], "the question is missing"),
        (["What?", "--url", "http://localhost:8000"], "must be host:port"),
        (["What?", "--priority", "1000"], "priority must be"),
        (["What?", "--deadline-s", "0"], "deadline_s must be"),
        (["What?", "--temperature", "nan"], "temperature must be a finite number, not nan"),
        (["What?", "--max-tokens", "many"], "invalid int value"),
        ([], "required: QUESTION"),
    ],
)
def test_wrong_usage_is_status_2_and_says_what_is_wrong(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["ask", *arguments])

    assert status == 2
    assert words in capsys.readouterr().err


def test_the_command_mounts_as_a_subcommand_of_another_parser(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.play([server.chunk("a car", "stop"), server.final()])
    parser = argparse.ArgumentParser()
    configure(parser.add_subparsers().add_parser("ask"))

    status = run(parser.parse_args(["ask", "--url", server.address, "What?"]))

    assert (status, capsys.readouterr().out) == (0, "a car\n")


def test_an_interrupt_cancels_on_the_server_and_prints_no_traceback(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.silence()])
    process = _start(server, "What?")
    assert process.stdout is not None
    first = process.stdout.read(2)

    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=10)

    assert (process.returncode, first + out, error) == (130, "a \n", "")
    assert server.cancelled.wait(30)


def test_a_reader_that_goes_away_cancels_on_the_server_and_prints_no_traceback(
    server: ScriptedServer,
) -> None:
    server.play([server.chunk("a "), *[server.chunk("car ") for _ in range(20)], server.silence()])
    process = _start(server, "What?")
    assert process.stdout is not None
    assert process.stderr is not None

    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()

    assert (process.wait(10), error) == (1, "")
    assert server.cancelled.wait(30)
