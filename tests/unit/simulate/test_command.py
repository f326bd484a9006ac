"""`vlm-relay simulate`: tables, JSON, pictures, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.simulate.__main__ import main

ROOT = Path(__file__).resolve().parents[3]
EIGHT = (
    str(ROOT / "deploy/profiles/eight_gpu.toml"),
    *("--topology", str(ROOT / "tests/golden/topologies/eight_gpu.txt"), "--gpu-name", "H100"),
)


def test_it_tells_what_clients_and_devices_would_see(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EIGHT, "--requests", "300", "--rate", "20"]) == 0

    told = capsys.readouterr().out
    assert "270 done" in told
    assert "time to first token" in told
    assert told.count("cuda:") == 8
    assert "decisions: " in told


def test_json_has_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EIGHT, "--requests", "300", "--azure", "--json", "-"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["figures"]["num_by_outcome"] == {"done": 270}
    assert set(told["figures"]["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert sum(told["decisions"]["by_mode"].values()) == 300


def test_one_seed_gives_one_log_file(tmp_path: Path) -> None:
    logs = []
    for name in ("one", "two"):
        assert main([*EIGHT, "--requests", "100", "--seed", "3", "--log", str(tmp_path / name)]) == 0
        logs.append((tmp_path / name).read_text())

    assert logs[0] == logs[1]
    assert logs[0].count("\tdone\t") == 100


def test_pictures_are_drawn(tmp_path: Path) -> None:
    files = [tmp_path / "timeline.png", tmp_path / "curves.svg"]

    assert main([*EIGHT, "--requests", "60", "--timeline", str(files[0]), "--curves", str(files[1])]) == 0

    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files[1].read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "-1"), "rate -1 per second; allowed: above 0"),
        (("--requests", "0"), "--requests 0; allowed: 1 to 100000000"),
        (("--text-tokens", "1" + "0" * 30), f"--text-tokens 1{'0' * 30}; allowed: 1 to 100000000"),
        (("--spread", "nan"), "--spread nan; allowed: 0 or more"),
        (("--think", "inf"), "--think inf; allowed: 0 or more"),
        (("--ttft", "inf"), "--ttft inf; allowed: above 0"),
        (("--images", "9"), "a request has 9 images; limits.max_images allows 8"),
        (("--trace", "/nowhere.csv"), "trace /nowhere.csv: No such file or directory"),
        (("--costs", "/nowhere.json"), "costs /nowhere.json: No such file or directory"),
        (("--outage", "cuda:0"), "--outage 'cuda:0'; allowed: NAME:AT or NAME:AT:UNTIL|outage of 'cuda', which"),
        (("--outage", "cuda:0:5:3"), "--outage 'cuda:0:5:3'; allowed: AT of 0 or more, before UNTIL"),
        (("--arrivals", "closed", "--curves", "/tmp/x.png"), "--curves needs arrivals at a rate"),
        (("--in-flight", "0"), "--in-flight 0; allowed: 1 or more"),
        (("--attainment", "2"), "--attainment 2; allowed: above 0, at most 1"),
        (("--output-tokens", "999999"), "decode.kv_cache_mib 57344 holds 114688 tokens, and a request needs 1000639"),
    ],
)
def test_what_cannot_be_gets_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    count = () if "--requests" in arguments else ("--requests", "10")
    assert main([*EIGHT, *count, *arguments]) == 2

    told = capsys.readouterr().err
    assert any(told.startswith(f"simulate: {each}") for each in message.split("|"))
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timeline", "/tmp/x.jpg"), "--timeline: '/tmp/x.jpg': allowed endings are .png, .svg, .pdf"),
        (("--curves", "/nowhere/x.png"), "--curves: cannot write '/nowhere/x.png': the folder does not exist"),
        (("--json", "/nowhere/x.json"), "--json: cannot write '/nowhere/x.json': the folder does not exist"),
        (("--log", "/tmp"), "--log: cannot write '/tmp': Is a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*EIGHT, "--requests", "10", *arguments])

    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", f"python -m scheduler.simulate: error: argument {message}")


def test_curves_of_a_closed_loop_are_refused_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EIGHT, "--requests", "10", "--arrivals", "closed", "--curves", "/tmp/x.png"]) == 2

    assert capsys.readouterr().out == ""


def test_costs_that_are_no_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.json"
    costs.write_bytes(b"\xff\x00")

    assert main([*EIGHT, "--costs", str(costs)]) == 2

    assert capsys.readouterr().err.startswith(f"simulate: costs {costs}: not UTF-8")


def test_a_trace_whose_requests_come_at_once_has_no_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("time_s,images,prompt_tokens,output_tokens\n1,1,700,9\n")

    assert main([*EIGHT, "--trace", str(trace)]) == 0

    assert capsys.readouterr().out.startswith("all at once: 1 done")


def test_what_a_trace_says_itself_is_not_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("time_s,images,prompt_tokens,output_tokens\n1,1,700,9\n")

    assert main([*EIGHT, "--trace", str(trace), "--rate", "20", "--azure", "--text-tokens", "9", "--seed", "3"]) == 2

    assert capsys.readouterr().err == (
        "simulate: --rate, --azure, --text-tokens beside --trace, which says itself what is asked and when; "
        "allowed: without\n"
    )
