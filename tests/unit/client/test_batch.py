from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from client.batch import BatchRefused, Tally, configure, run
from tests.unit.client.scripted import ScriptedServer

ROOT = Path(__file__).parents[3]
Json = dict[str, object]


def _write(path: Path, *lines: Json) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _read(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _batch(server: ScriptedServer, given: Path, out: Path, *options: str) -> Tally:
    parser = argparse.ArgumentParser()
    configure(parser)
    return run(parser.parse_args([str(given), str(out), "--url", server.address, *options]), {})


def test_each_line_gets_one_answer_under_its_id(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"A")
    server.play([server.chunk("a "), server.chunk("car", "stop"), server.final()])
    given = _write(
        tmp_path / "in.jsonl",
        {"custom_id": "first", "question": "What?", "images": ["a.png"], "max_tokens": 5},
        {"question": "And?"},
    )

    tally = _batch(server, given, tmp_path / "out.jsonl")

    said = {"text": "a car", "finish_reason": "stop", "num_input_tokens": 3, "num_output_tokens": 2, "error": None}
    answers = sorted(_read(tmp_path / "out.jsonl"), key=lambda line: str(line["custom_id"]))
    assert answers == [{"custom_id": "first", **said}, {"custom_id": "line-2", **said}]
    assert (tally.num_answered, tally.num_failed, tally.num_left) == (2, 0, 0)
    assert any(b"A" in raw for request in server.requests for raw in request.raw_input_contents)


def test_openais_lines_are_answered_in_openais_form(server: ScriptedServer, tmp_path: Path) -> None:
    server.play([server.chunk("a car", "stop"), server.final()])
    body = {"model": "llava", "messages": [{"role": "user", "content": "What?"}], "max_tokens": 5}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}

    _batch(server, _write(tmp_path / "in.jsonl", line), tmp_path / "out.jsonl")

    (answer,) = _read(tmp_path / "out.jsonl")
    response = answer["response"]
    assert isinstance(response, dict)
    assert (answer["custom_id"], answer["error"], response["status_code"]) == ("1", None, 200)
    assert response["body"]["choices"][0]["message"]["content"] == "a car"


def test_what_is_done_is_not_asked_again_and_a_torn_line_is_cut_off(server: ScriptedServer, tmp_path: Path) -> None:
    server.play([server.chunk("new", "stop"), server.final()])
    given = _write(tmp_path / "in.jsonl", *[{"custom_id": str(n), "question": "What?"} for n in range(3)])
    out = tmp_path / "out.jsonl"
    out.write_text('{"custom_id":"1","text":"old"}\n{"custom_id":"0","te')

    tally = _batch(server, given, out)

    answers = _read(out)
    assert {str(line["custom_id"]): line["text"] for line in answers} == {"1": "old", "0": "new", "2": "new"}
    assert len(answers) == 3
    assert (tally.num_before, tally.num_answered, len(server.requests)) == (1, 2, 2)


def test_a_full_server_is_asked_again(server: ScriptedServer, tmp_path: Path) -> None:
    full = [server.fail("[UNAVAILABLE] full; retry after 0.01 s"), server.final()]
    server.play(full, full, [server.chunk("yes", "stop"), server.final()])

    tally = _batch(server, _write(tmp_path / "in.jsonl", {"question": "What?"}), tmp_path / "out.jsonl")

    assert (tally.num_answered, len(server.requests)) == (1, 3)


def test_what_finds_no_room_at_all_is_left_for_another_run(server: ScriptedServer, tmp_path: Path) -> None:
    server.play([server.fail("[UNAVAILABLE] full; retry after 0.01 s"), server.final()])

    given = _write(tmp_path / "in.jsonl", {"question": "What?"})
    tally = _batch(server, given, tmp_path / "out.jsonl", "--retries", "1")

    assert (tally.num_left, (tmp_path / "out.jsonl").read_text()) == (1, "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"question": "What?", "images": ["no-such.png"]}, "does not exist"),
        ({"question": "What?", "max_token": 5}, "unknown name 'max_token'"),
        ({"question": 5}, "must be a string"),
        ({"body": {"messages": []}}, "messages: "),
        ({"body": {"messages": [{"role": "user", "content": "a"}], "n": 2}}, "n must be 1"),
        ({"body": 5}, "body"),
    ],
)
def test_a_wrong_line_gets_an_error_in_its_place(
    server: ScriptedServer, tmp_path: Path, line: Json, words: str
) -> None:
    server.play([server.chunk("yes", "stop"), server.final()])
    given = _write(tmp_path / "in.jsonl", {"custom_id": "bad", **line}, {"custom_id": "good", "question": "What?"})

    tally = _batch(server, given, tmp_path / "out.jsonl")

    errors = {line["custom_id"]: line["error"] for line in _read(tmp_path / "out.jsonl")}
    assert errors["good"] is None
    assert words in str(errors["bad"])
    assert (tally.num_answered, tally.num_failed) == (1, 1)


@pytest.mark.parametrize(
    ("given", "done", "words"),
    [
        ("{", "", "in.jsonl:1: not JSON"),
        ("[1]", "", "in.jsonl:1: must be a JSON object"),
        ('{"custom_id": 5}', "", "custom_id must be a string"),
        ('{"custom_id": "a"}\n\n{"custom_id": "a"}', "", "in.jsonl:3: custom_id 'a' stands in line 1 too"),
        ('{"custom_id": "a"}', '{"custom_id":"b"}\n', "out.jsonl:1: 'b' is not of this batch"),
        ('{"custom_id": "a"}', "no\n", "out.jsonl:1: not JSON"),
        (None, "", "No such file"),
    ],
)
def test_files_that_cannot_be_right_are_refused_before_anything_is_asked(
    server: ScriptedServer, tmp_path: Path, given: str | None, done: str, words: str
) -> None:
    if given is not None:
        (tmp_path / "in.jsonl").write_text(given)
    (tmp_path / "out.jsonl").write_text(done)

    with pytest.raises(BatchRefused, match=words):
        _batch(server, tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    assert server.requests == []
    assert (tmp_path / "out.jsonl").read_text() == done


def test_answers_never_go_into_the_questions_file(server: ScriptedServer, tmp_path: Path) -> None:
    questions = tmp_path / "in.jsonl"
    questions.write_text('{"custom_id": "a", "question": "What?"}\n')

    with pytest.raises(BatchRefused, match="the answers cannot go into the questions' file"):
        _batch(server, questions, questions)


def test_killed_in_the_middle_and_run_again_nothing_is_lost_and_nothing_twice(
    server: ScriptedServer, tmp_path: Path
) -> None:
    num_lines, concurrency = 60, 4
    server.play([server.late(server.chunk("a car", "stop")), server.final()])
    given = _write(tmp_path / "in.jsonl", *[{"custom_id": f"q{n}", "question": "What?"} for n in range(num_lines)])
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "launcher", "batch", str(given), str(out), "--url", server.address]
    command += ["--concurrency", str(concurrency)]

    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (out.exists() and out.read_bytes().count(b"\n") >= 10) and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    num_before = len(server.requests)
    rest = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    ids = [line["custom_id"] for line in _read(out)]
    assert 10 <= num_before < num_lines
    assert rest.returncode == 0, rest.stderr
    assert sorted(map(str, ids)) == sorted(f"q{n}" for n in range(num_lines))
    assert len(server.requests) <= num_lines + concurrency  # asked twice: at most what was in flight


def test_two_batches_never_write_one_file(server: ScriptedServer, tmp_path: Path) -> None:
    server.play([server.silence()])
    given = _write(tmp_path / "in.jsonl", {"question": "What?"})
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "launcher", "batch", str(given), str(out), "--url", server.address]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not server.requests and time.monotonic() < until:
        time.sleep(0.01)

    with pytest.raises(BatchRefused, match="another batch is writing it"):
        _batch(server, given, out)

    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert server.cancelled.wait(30)


def test_a_server_that_comes_back_is_found_again(server: ScriptedServer, tmp_path: Path) -> None:
    server.play(
        [server.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")], [server.chunk("yes", "stop"), server.final()]
    )

    tally = _batch(server, _write(tmp_path / "in.jsonl", {"question": "What?"}), tmp_path / "out.jsonl")

    assert tally.num_answered == 1
