"""Workloads have the rate and the shape that was asked for, and what makes no sense is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scheduler.simulate.azure import azure, day
from scheduler.simulate.trace import parse_trace, read_trace, to_csv
from scheduler.simulate.workload import Mix, WorkloadRefused, bursts, poisson

HEADER = "time_s,images,prompt_tokens,output_tokens\n"
WITH_DEADLINE = HEADER.replace("\n", ",deadline_s\n")


def chance() -> np.random.Generator:
    return np.random.default_rng(7)


def test_arrivals_come_at_their_rate() -> None:
    even, uneven = poisson(50_000, 20, chance()), bursts(50_000, 20, chance())

    assert len(even) / even[-1] == pytest.approx(20, rel=0.02)
    assert len(uneven) / uneven[-1] == pytest.approx(20, rel=0.05)
    per_s = np.bincount(uneven.astype(int))
    assert np.percentile(per_s, 99) > 6 * np.median(per_s)
    assert np.percentile(np.bincount(even.astype(int)), 99) < 2 * 20


def test_a_day_has_the_traces_busy_hour() -> None:
    arrived_s = day(1_000_000, 10, chance())

    hours = np.bincount((arrived_s[arrived_s < 86_400] / 3600).astype(int))

    assert hours.argmax() == 8
    assert hours.max() / hours.min() == pytest.approx(55_329 / 31_610, rel=0.1)


def test_the_production_like_mix_keeps_the_figures_it_was_read_from() -> None:
    workload = azure(poisson(100_000, 20, chance()), chance())
    has_images = workload.num_images > 0

    assert has_images.mean() == pytest.approx(0.5, abs=0.01)
    assert (workload.num_images[has_images] == 1).mean() == pytest.approx(0.661, abs=0.01)
    assert np.median(workload.output_tokens[has_images]) == pytest.approx(80, abs=3)
    assert np.median(workload.output_tokens[~has_images]) == pytest.approx(146, abs=6)
    assert np.median(workload.prompt_tokens[~has_images]) == pytest.approx(788, abs=15)
    assert (workload.prompt_tokens + workload.output_tokens).max() <= 4096


def test_a_mix_is_drawn_around_its_means() -> None:
    workload = Mix(images=2, image_share=0.3, text_tokens=50, output_tokens=100, spread=0.5).draw(
        poisson(50_000, 1, chance()), chance()
    )

    assert (workload.num_images > 0).mean() == pytest.approx(0.3, abs=0.01)
    assert workload.output_tokens.mean() == pytest.approx(100, rel=0.02)
    assert (workload.prompt_tokens - 576 * workload.num_images).mean() == pytest.approx(50, rel=0.02)


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    workload = Mix(spread=0.5, max_tokens=300).draw(poisson(50, 1, chance()), chance())
    path = tmp_path / "trace.csv"
    path.write_text(to_csv(workload))

    again = read_trace(path)

    assert again.arrived_s == pytest.approx(workload.arrived_s - workload.arrived_s[0], abs=1e-5)
    for name in ("num_images", "prompt_tokens", "output_tokens", "max_tokens"):
        assert (getattr(again, name) == getattr(workload, name)).all()


def test_the_columns_of_azures_trace_are_read() -> None:
    text = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-10-15 00:00:01.500000,1,700,50\n2024-10-15 00:00:02.000000,0,100,8\n"
    )

    workload = parse_trace(text, "azure.csv")

    assert workload.arrived_s.tolist() == [0.0, 0.5]
    assert workload.num_images.tolist() == [1, 0]


def test_what_a_row_leaves_open_does_not_count() -> None:
    text = "time_s,images,prompt_tokens,output_tokens,deadline_s,cancel_s\n0,1,700,50,,2.5\n1,0,10,50,3,\n"

    workload = parse_trace(text, "t.csv")

    assert workload.deadline_s is not None
    assert workload.cancel_s is not None
    assert workload.deadline_s.tolist() == [np.inf, 3.0]
    assert workload.cancel_s.tolist() == [2.5, np.inf]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace t.csv: empty; a header line and a row per request are needed"),
        (HEADER, "trace t.csv: no rows below the header; at least 1 request is needed"),
        ("time_s,images\n1,2\n", "trace t.csv: no column prompt_tokens, output_tokens; the columns are time_s, images"),
        (HEADER.replace("images", "pictures"), "trace t.csv: no column images"),
        ("size," + HEADER + "1,1,1,1,1\n", "trace t.csv: unknown column size; allowed: max_tokens"),
        (HEADER + "0,1,700,x\n", "trace t.csv, line 2: output_tokens is 'x'; a number is needed"),
        (HEADER + "0,1.5,700,9\n", "trace t.csv, line 2: images is '1.5'; a whole number is needed"),
        (HEADER + "-3,1,700,9\n", "trace t.csv: request 0: arrived_s is -3; allowed: 0 or more"),
        (HEADER + "0,1,700,9\n0,-1,700,9\n", "trace t.csv: request 1: num_images is -1; allowed: 0 or more"),
        (HEADER + "0,1,700,0\n", "trace t.csv: request 0: output_tokens is 0; allowed: 1 or more"),
        (
            HEADER + "5,1,700,9\n4,1,700,9\n",
            "trace t.csv: request 1 arrives at 4 s, after one at 5 s; times must not go back",
        ),
        (HEADER + "nan,1,700,9\n", "trace t.csv: request 0: arrived_s is nan; allowed: 0 or more"),
        (HEADER + "2026-13-01,1,700,9\n", "trace t.csv, line 2: time_s is '2026-13-01'; seconds or a date are needed"),
        (HEADER + "0,1,1e30,9\n", "trace t.csv, line 2: prompt_tokens is '1e30'; a whole number is needed"),
        (HEADER + "0,1,700," + "9" * 200_000, "trace t.csv: no CSV: field larger than field limit"),
        (WITH_DEADLINE + "0,1,700,9,-5\n", "trace t.csv: request 0: deadline_s is -5; allowed: 0 or more"),
        (
            WITH_DEADLINE + "0,1,700,9,1\n1,1,700,9,nan\n",
            "trace t.csv: request 1: deadline_s is nan; allowed: 0 or more",
        ),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(WorkloadRefused) as refused:
        parse_trace(text, "t.csv")

    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(WorkloadRefused, match="rate 0 per second; allowed: above 0"):
        poisson(10, 0, chance())


def test_a_trace_that_a_spreadsheet_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeff" + HEADER + "0,1,700,9\n")

    assert len(read_trace(path)) == 1
