"""The `vlm-relay` command: what it refuses, in how many words, and with which exit code."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import launcher.__main__ as command
from launcher import serve
from launcher.__main__ import main
from launcher.process import ServerFailed
from launcher.serve import DEFAULT_PROFILE, plan_of
from launcher.triton import TritonMissing

COMMANDS = ("serve", "ask", "build", "render", "demo")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "vlm-relay: error: the following arguments are required: COMMAND"),
        (["fly"], "vlm-relay: error: argument COMMAND: invalid choice: 'fly' (choose from "),
        (["serve", "--fast"], "vlm-relay: error: unrecognized arguments: --fast"),
        (
            ["serve", "--http-port", "65536"],
            "vlm-relay serve: error: argument --http-port: 65536 is not a port: 0 to 65535",
        ),
        (["serve", "--grpc-port", "-1"], "vlm-relay serve: error: argument --grpc-port: -1 is not a port: 0 to 65535"),
        (["serve", "--grpc-port", "x"], "vlm-relay serve: error: argument --grpc-port: x is not a port: 0 to 65535"),
        (["up", "--port", "65536"], "vlm-relay up: error: argument --port: 65536 is not a port: 0 to 65535"),
        (["serve", "--metrics-port"], "vlm-relay serve: error: argument --metrics-port: expected one argument"),
        (["render"], "vlm-relay render: error: the following arguments are required: profile"),
        (
            ["profile", "--out", "/nowhere/costs.json"],
            "vlm-relay profile: error: argument --out: cannot write '/nowhere/costs.json': the folder does not exist",
        ),
    ],
)
def test_a_wrong_word_is_told_in_one_line_after_the_usage(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("usage: vlm-relay")
    assert err.splitlines()[-1].startswith(told)


@pytest.mark.parametrize("words", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_every_command_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert out.startswith(f"usage: vlm-relay {words[0] if len(words) == 2 else '[-h] COMMAND'}")


@pytest.mark.parametrize("command", ["serve", "build", "demo"])
def test_a_missing_profile_is_told_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.toml"

    assert main([command, "--profile", str(missing)]) == 2

    assert capsys.readouterr() == ("", f"vlm-relay: profile {missing}: No such file or directory\n")


def test_a_wrong_profile_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text("[decode]\nreplica = 2\n")

    assert main(["serve", "--profile", str(profile)]) == 2

    assert capsys.readouterr() == ("", f"vlm-relay: profile {profile}: unknown key decode.replica\n")


def test_what_is_no_address_of_redis_is_told_in_one_line_without_its_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--redis-url", "host:6379/?password=secret"]) == 2

    told = "vlm-relay: an address of Redis begins with redis://, rediss://, unix://\n"
    assert capsys.readouterr() == ("", told)


def test_a_missing_checkpoint_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--checkpoint", str(tmp_path)]) == 2

    assert capsys.readouterr() == ("", f"vlm-relay: checkpoint {tmp_path}: no config.json there\n")


def test_a_busy_port_is_told_in_one_line_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        code = main(["serve", "--http-port", str(port), "--checkpoint", str(tmp_path)])

    assert code == 1
    assert capsys.readouterr() == (
        "",
        f"vlm-relay: http port {port} on 127.0.0.1: Address already in use; "
        "give another with --http-port, or 0 for a free one\n",
    )


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ServerFailed("tritonserver stopped"), 1, "vlm-relay: tritonserver stopped\n"),
        (TritonMissing("no tritonserver"), 1, "vlm-relay: no tritonserver\n"),
        (OSError(28, "No space left on device"), 1, "vlm-relay: [Errno 28] No space left on device\n"),
        (OSError(21, "Is a directory", "/tmp"), 1, "vlm-relay: /tmp: Is a directory\n"),
        (KeyboardInterrupt(), 130, "vlm-relay: interrupted\n"),
    ],
)
def test_what_a_user_can_mend_is_told_without_a_traceback(
    error: BaseException,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: object) -> int:
        raise error

    monkeypatch.setattr(serve, "serve", broken)

    assert main(["serve"]) == code

    assert capsys.readouterr() == ("", told)


def test_a_checkpoint_on_the_command_line_replaces_the_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert plan_of(DEFAULT_PROFILE, "mine").checkpoint == str(tmp_path / "mine")  # as the user's shell sees it
    assert plan_of(DEFAULT_PROFILE, None).checkpoint == "demo/checkpoint"


def test_an_interrupt_while_the_commands_are_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_parser", interrupted)

    assert main([]) == 130

    assert capsys.readouterr() == ("", "vlm-relay: interrupted\n")
