from __future__ import annotations

import argparse
import io
import random
import sys
from pathlib import Path

import pytest
from PIL import Image

from client.errors import InvalidRequest
from client.load import configure, run
from client.load_plan import Arrival, picture, poisson, size_from, trace
from client.load_report import Failed, Outcome, Report, page, percentile, report_from
from scheduler.simulate.trace import parse_trace, to_csv
from tests.unit.client.scripted import ScriptedServer


def _load(server: ScriptedServer, *options: str) -> Report:
    parser = argparse.ArgumentParser()
    configure(parser)
    return run(parser.parse_args(["--url", server.address, *options]), {"VLM_RELAY_SHM_KEY": "right"})


def _outcome(**more: object) -> Outcome:
    given: dict[str, object] = {
        "at_s": 0.0,
        "late_s": 0.0,
        "ttft_s": 0.1,
        "total_s": 0.5,
        "num_input_tokens": 3,
        "num_output_tokens": 5,
        "tokens_per_s": 10.0,
        "error": None,
    }
    return Outcome(**{**given, **more})  # type: ignore[arg-type]


def test_poisson_arrivals_come_at_their_rate_and_the_same_each_time() -> None:
    times = [arrival.at_s for arrival in poisson(50.0, 5000, random.Random(1))]

    assert times == sorted(times)
    assert times == [arrival.at_s for arrival in poisson(50.0, 5000, random.Random(1))]
    assert times[-1] == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize("size", [(1, 1), (336, 336), (1024, 20)])
def test_a_picture_is_a_png_of_its_size_and_no_two_are_alike(size: tuple[int, int]) -> None:
    chance = random.Random(1)

    first, second = picture(*size, chance), picture(*size, chance)

    assert first != second
    with Image.open(io.BytesIO(first)) as opened:
        opened.load()
        assert (opened.size, opened.format) == (size, "PNG")


def test_a_pictures_file_is_as_large_as_a_photographs() -> None:
    assert len(picture(1024, 1024, random.Random(1))) / 1024**2 == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("text", ["336", "x", "0x5", "-1x5", "336x", "99999x1", "a×b"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="WIDTHxHEIGHT"):
        size_from(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1", "neither JSON Lines"),
        ("", "neither JSON Lines"),
        ("{}", ":1"),
        ('{"at_s": 1}\n1', ":2"),
        ('{"at_s": 1}\n{"at_s": 0.5}', ":2.*before"),
        ('{"at_s": "nan"}', ":1: nan is no time"),
        ("time_s\n0\ninf\n", ":3: inf is no time"),
        ("time_s\n" + "9" * 200_000, "no CSV: field larger"),
        ('{"at_s": 1, "images": -1}', ":1.*at least 0"),
        ("time_s\n", "no request"),
        ("time_s\nsoon\n", ":2.*soon"),
        ("time_s,output_tokens\n5,1\n6,0\n", ":3.*at least 1"),
        ("time_s\n5\n4\n", ":3.*before"),
    ],
)
def test_a_trace_that_is_none_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)

    with pytest.raises(InvalidRequest, match=words):
        trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    "text",
    [
        '{"at_s": 0, "images": 2, "max_tokens": 7}\n{"at_s": 1.5}\n',
        "time_s,images,prompt_tokens,output_tokens\n100,2,600,7\n101.5,,,\n",
        "\ufefftime_s,images,prompt_tokens,output_tokens\n100,2,600,7\n101.5,,,\n",
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2025-03-01 12:00:00.000000+00:00,2,600,7\n2025-03-01 12:00:01.500000+00:00,,,\n",
    ],
)
def test_a_trace_is_json_lines_or_the_simulators_csv(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text)

    assert trace(tmp_path / "trace") == [Arrival(0.0, 2, 7), Arrival(1.5)]


def test_what_the_simulator_writes_is_read(tmp_path: Path) -> None:
    workload = parse_trace("time_s,images,prompt_tokens,output_tokens\n3,1,600,7\n3.25,0,9,20\n", "a test")
    (tmp_path / "trace.csv").write_text(to_csv(workload))

    assert trace(tmp_path / "trace.csv") == [Arrival(0.0, 1, 7), Arrival(0.25, 0, 20)]


def test_each_request_of_a_trace_has_its_own_images_and_length(server: ScriptedServer, tmp_path: Path) -> None:
    server.play([server.chunk("yes", "stop"), server.final()])
    (tmp_path / "trace.csv").write_text("time_s,images,output_tokens\n0,2,7\n0.1,0,9\n")

    report = _load(server, "--trace", str(tmp_path / "trace.csv"), "--images", "8x8", "--images", "9x9", "--exactly")

    first, second = server.requests
    assert report.num_answered == 2
    assert sum(raw.count(b"PNG") for raw in first.raw_input_contents) == 2
    assert any(b'"max_tokens":7' in raw and b'"min_tokens":7' in raw for raw in first.raw_input_contents)
    assert sum(raw.count(b"PNG") for raw in second.raw_input_contents) == 0
    assert any(b'"max_tokens":9' in raw for raw in second.raw_input_contents)


def test_a_closed_loop_sends_as_many_as_told_each_with_its_pictures(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.chunk("car", "stop"), server.final()])

    report = _load(server, "--concurrency", "3", "--requests", "10", "--images", "8x8", "--images", "9x4")

    assert (report.num_requests, report.num_answered, len(server.requests)) == (10, 10, 10)
    assert all(request.raw_input_contents[1].count(b"PNG") == 2 for request in server.requests)
    assert len({request.raw_input_contents[1] for request in server.requests}) == 10


@pytest.mark.parametrize("kind", ["rate", "trace"])
def test_an_open_loop_does_not_wait_for_answers(server: ScriptedServer, tmp_path: Path, kind: str) -> None:
    server.play([server.together(8, server.chunk("a car", "stop")), server.final()])
    (tmp_path / "trace.jsonl").write_text('{"at_s": 0.01}\n' * 8)
    how = ["--rate", "1000", "--requests", "8"] if kind == "rate" else ["--trace", str(tmp_path / "trace.jsonl")]

    report = _load(server, *how)

    assert report.num_answered == 8


def test_refusals_are_counted_by_their_code(server: ScriptedServer) -> None:
    full = [server.fail("[UNAVAILABLE] full; retry after 1 s"), server.final()]
    server.play(full, full, [server.chunk("yes", "stop"), server.final()])

    report = _load(server, "--concurrency", "1", "--requests", "3")

    assert (report.num_answered, report.errors) == (1, (Failed("unavailable", 2, "full; retry after 1 s"),))
    assert "2 x unavailable: full; retry after 1 s" in report.text()


@pytest.mark.parametrize(
    "options",
    [["--rate", "0"], ["--requests", "0"], ["--concurrency", "0"], ["--images", "1"], ["--deadline-s", "nan"]],
)
def test_arguments_out_of_range_are_refused(server: ScriptedServer, options: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        _load(server, *options)


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (90, 4.0), (99, 4.0), (25, 1.0)])
def test_a_percentile_is_a_value_that_was_seen(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == value


def test_the_report_counts_answers_only_but_all_lateness() -> None:
    report = report_from([_outcome(), _outcome(error="unavailable", ttft_s=None, late_s=0.2)], 2.0)

    spreads = {spread.name: spread.values for spread in report.spreads}
    assert (report.requests_per_s, report.output_tokens_per_s) == (0.5, 2.5)
    assert spreads["time to first token"] == (100.0, 100.0, 100.0)
    assert spreads["time per output token"] == (100.0, 100.0, 100.0)
    assert spreads["sent late"] == (0.0, 200.0, 200.0)


def test_the_page_shows_the_figures_and_escapes_what_it_is_told(server: ScriptedServer, tmp_path: Path) -> None:
    server.play([server.chunk("a "), server.chunk("car", "stop"), server.final()])

    _load(server, "--requests", "4", "--html", str(tmp_path / "report.html"))

    written = (tmp_path / "report.html").read_text()
    assert "4 of 4 answered" in written
    assert written.count("<circle") == 8  # two charts
    assert "&lt;b&gt;" in page(report_from([], 1.0), [], "<b>")


def test_images_go_through_shared_memory_when_told_so(server: ScriptedServer) -> None:
    server.play([server.chunk("yes", "stop"), server.final()])

    report = _load(server, "--requests", "1", "--images", "2048x1024", "--shared-memory")

    assert report.num_answered == 1
    assert server.num_registered == 1
    assert not any(b"PNG" in raw for raw in server.requests[0].raw_input_contents)


def test_the_report_is_a_picture_too(server: ScriptedServer, tmp_path: Path) -> None:
    full = [server.fail("[UNAVAILABLE] full; retry after 1 s"), server.final()]
    server.play(full, [server.chunk("a "), server.chunk("car", "stop"), server.final()])

    _load(server, "--requests", "4", "--png", str(tmp_path / "report.png"))

    with Image.open(tmp_path / "report.png") as opened:
        opened.load()
        assert (opened.format, opened.size) == ("PNG", (1320, 780))


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_a_report_that_cannot_be_written_is_refused_before_the_load(
    server: ScriptedServer, tmp_path: Path, option: str
) -> None:
    with pytest.raises(FileNotFoundError):
        _load(server, option, str(tmp_path / "missing" / "report"))

    assert server.requests == []


def test_a_picture_is_a_png_whatever_its_name(server: ScriptedServer, tmp_path: Path) -> None:
    server.play([server.chunk("a", "stop"), server.final()])

    _load(server, "--requests", "1", "--png", str(tmp_path / "report"))

    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert (tmp_path / "report").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch, server: ScriptedServer, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)

    with pytest.raises(InvalidRequest, match=r"vlm-relay\[plots\]"):
        _load(server, "--png", str(tmp_path / "report.png"))

    assert server.requests == []


def test_failed_requests_are_crosses_on_the_page() -> None:
    outcomes = [_outcome(), _outcome(at_s=1.0), _outcome(at_s=2.0, error="unavailable", ttft_s=None, tokens_per_s=None)]

    written = page(report_from(outcomes, 2.0), outcomes, "a load")

    assert written.count("<path d=") == 2
    assert "1 failed" in written
