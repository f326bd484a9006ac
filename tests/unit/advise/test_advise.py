"""The adviser finds the rate that a plan can keep, prefers what is safe, and says in one line what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scheduler.advise.__main__ import main
from scheduler.advise.advice import Advice, choose, num_servers
from scheduler.advise.goodput import Question, find_goodput, look
from scheduler.advise.report import verdict
from scheduler.advise.search import Result, hybrids
from scheduler.advise.share import guess_per_s, shares_of
from scheduler.fleet import FleetRefused, Layout, Tuning, describe_machine, hybrid, plan_of, profile_of, serial, splits
from scheduler.placement import place
from scheduler.profile import parse_profile
from scheduler.roofline import roofline
from scheduler.simulate.outcome import Limits
from scheduler.simulate.workload import Mix, Workload, poisson

ROOT = Path(__file__).resolve().parents[3]
TWO = describe_machine(2, "A100")
COSTS = roofline("A100")


def make(count: int, rate_per_s: float, seed: int) -> Workload:
    chance = np.random.default_rng(seed)
    return Mix().draw(poisson(count, rate_per_s, chance), chance)


def result(layout: Layout, *goodput_per_s: float) -> Result:
    return Result(layout, Tuning(), goodput_per_s)


def test_a_goodput_can_be_kept_and_a_little_more_cannot() -> None:
    question = Question(make, Limits(1.0, 0.1), COSTS, horizon_s=20.0)
    plan = plan_of(TWO, serial(2))

    found = find_goodput(question, plan, 10.0, seed=1)

    assert look(question, plan, found, 1).attainment >= 0.9
    assert look(question, plan, found * 1.05, 1).attainment < 0.9
    assert found == pytest.approx(guess_per_s(shares_of(make(100, 1.0, 1), COSTS), 2, 2, True), rel=0.5)


def test_limits_that_cannot_be_kept_are_no_goodput() -> None:
    assert find_goodput(Question(make, Limits(0.001, 0.1), COSTS), plan_of(TWO, serial(2)), 10.0, seed=1) == 0


def test_encode_shares_are_those_of_the_roofline() -> None:
    shares = shares_of(make(100, 1.0, 1), COSTS)

    assert shares.encode_s == pytest.approx(2.54e-3, rel=0.01)
    assert shares.prefill_s == pytest.approx(44.9e-3, rel=0.01)
    assert shares.encode_share == pytest.approx(0.026, abs=0.001)
    assert shares.break_even_gpus == pytest.approx(38, abs=1)


@pytest.mark.parametrize(
    ("shared", "split", "chosen"),
    [
        ([("serial", 100), ("hybrid", 99)], 100.9, "hybrid"),  # too little to gain
        ([("serial", 100), ("hybrid", 95)], 90, "serial"),
        ([("hybrid", 100), ("serial", 60)], 103, "split"),
        ([("hybrid", 100), ("serial", 60)], None, "hybrid"),
        ([], 50, "split"),
    ],
)
def test_a_split_must_be_noticeably_better(shared: list[tuple[str, float]], split: float | None, chosen: str) -> None:
    layouts = {"serial": serial(4), "hybrid": hybrid(4), "split": splits(4)[0]}

    found = choose(
        [result(layouts[name], rate) for name, rate in shared],
        None if split is None else result(layouts["split"], split),
    )

    assert found.layout == layouts[chosen]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"serial": 100, "hybrid": 101, "split": 90}, "Do not split: run hybrid, all encode, 101 requests/s"),
        ({"serial": 100, "hybrid": 99, "split": 101.9}, "Do not split: run hybrid, all encode"),  # too little to gain
        (
            {"serial": 100, "hybrid": 119, "split": 120},
            "Splitting pays, and deciding per request keeps what it gains: ",
        ),
        ({"serial": 100, "hybrid": 110, "split": 120}, "Split: run split 1 + 3, 120 requests/s"),
        ({"split": 120}, "Split: run split 1 + 3"),
    ],
)
def test_the_verdict_says_whether_splitting_pays(rates: dict[str, float], said: str) -> None:
    layouts = {"serial": serial(4), "hybrid": hybrid(4), "split": splits(4)[0]}
    results = sorted((result(layouts[name], rate) for name, rate in rates.items()), key=lambda each: -each.mean_per_s)
    split = next(each for each in results if not each.layout.is_hybrid)
    chosen = choose([each for each in results if each.layout.is_hybrid], split)

    lines = verdict(Advice(tuple(results), shares_of(make(10, 1.0, 1), COSTS), chosen, split))

    assert lines[0].startswith(said)


def test_servers_are_not_asked_for_all_they_can() -> None:
    assert num_servers(50.0, 100.0) == 3
    assert num_servers(50.0, 1.0) == 1


def test_hybrids_are_tried_with_as_many_encoders_as_the_best_split() -> None:
    names = [layout.name for layout in hybrids(8, 5)]

    assert names == [f"hybrid, {count} encode" for count in ("all", "4 of 8", "5 of 8", "1 of 8")]
    assert len(hybrids(2, 1)) == 2
    assert hybrids(1, 1) == []


@pytest.mark.parametrize("layout", [serial(4), *splits(4), *hybrids(4, 3)], ids=lambda each: each.name)
def test_a_layout_is_placed_as_it_says(layout: Layout) -> None:
    plan = place(profile_of(describe_machine(4, "H100"), layout, Tuning()), describe_machine(4, "H100"))

    encoders, decoders = {each.device for each in plan.encoders}, {each.device for each in plan.decoders}
    assert (len(encoders), len(decoders)) == (layout.num_encoders, layout.num_decoders)
    assert encoders.isdisjoint(decoders) != layout.is_hybrid
    assert plan.tier == ("nvlink" if encoders < decoders or encoders.isdisjoint(decoders) else "device")


@pytest.mark.parametrize(
    ("count", "gpu", "link", "message"),
    [
        (0, "A100", "nvlink", "0 GPUs; allowed: 1 or more"),
        (2, "Voodoo 2", "nvlink", "GPU 'Voodoo 2' is not known; allowed: A10, A100, A100 40GB"),
        (2, "RTX 4090", "nvlink", "RTX 4090 has no NVLink; allowed: pcie, none"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(count: int, gpu: str, link: str, message: str) -> None:
    with pytest.raises(FleetRefused, match=message):
        describe_machine(count, gpu, link)  # type: ignore[arg-type]


def test_advice_ends_in_a_profile_that_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "advised.toml"
    quick = ["--seeds", "1", "--horizon", "3", "--quick"]

    assert main(["--gpus", "2", *quick, "--json", "-", "--out", str(path)]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["split"] is False
    assert told["break_even_gpus"] == pytest.approx(38, abs=1)
    rates = {each["name"]: sum(each["goodput_per_s"]) for each in told["layouts"]}
    assert rates["split 1 + 1"] < 0.7 * rates["serial"]
    plan = place(parse_profile(path.read_text(), "advised"), TWO)
    assert len(plan.decoders) == 2


def test_a_target_is_told_in_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "1", "--seeds", "1", "--horizon", "3", "--quick", "--target", "100"]) == 0

    told = capsys.readouterr().out
    assert "Do not split: run serial" in told
    assert "server:\n  replicas: " in told


def test_with_a_dear_encoder_splitting_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--gpus", "4", "--encode-ms", "640", "--ttft", "5", "--seeds", "1", "--horizon", "20"]

    assert main([*machine, "--quick", "--json", str(tmp_path / "advice.json")]) == 0

    assert capsys.readouterr().out.split("\n")[2].startswith(("Split: run split ", "Splitting pays, "))
    told = json.loads((tmp_path / "advice.json").read_text())
    rates = {each["name"]: sum(each["goodput_per_s"]) for each in told["layouts"]}
    assert rates["split 3 + 1"] > 1.15 * rates["serial"]
    assert rates[told["run"]] >= 0.98 * rates["split 3 + 1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "Voodoo"), "GPU 'Voodoo' is not known; allowed: A10, "),
        (("--gpus", "0"), "0 GPUs; allowed: 1 or more"),
        (("--gpu", "T4", "--link", "pcie"), "T4 has 14 GiB to use, and LLaVA-1.5-7B needs 14 and a cache"),
        (("--seeds", "0"), "--seeds 0, --horizon 30; allowed: 1 or more, above 0"),
        (("--target", "0"), "--target 0; allowed: above 0"),
        (("--target", "inf"), "--target inf; allowed: above 0"),
        (("--horizon", "nan"), "--seeds 3, --horizon nan; allowed: 1 or more, above 0"),
        (("--in-flight", "0"), "--in-flight 0; allowed: 1 or more"),
        (("--encode-ms", "-1"), "--encode-ms -1; allowed: above 0"),
        (("--arrivals", "closed"), "--arrivals closed has no rate to be searched; allowed: poisson, bursts"),
        (("--trace", "/nowhere.csv"), "trace /nowhere.csv: No such file or directory"),
        (("--topology", "/nowhere.txt"), "topology /nowhere.txt: No such file or directory"),
        (("--tpot", "0"), "--tpot 0; allowed: above 0"),
        (("--gpus", "2", "--ttft", "0.00001"), "no layout keeps the limits at any rate"),
    ],
)
def test_what_cannot_be_gets_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", *arguments]) == 2

    told = capsys.readouterr().err
    assert told.startswith(f"advise: {message}")
    assert told.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--out"])
def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--quick", option, "/nowhere/x"])

    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith(f"argument {option}: cannot write '/nowhere/x': the folder does not exist")


def test_a_trace_too_short_to_fill_a_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("time_s,images,prompt_tokens,output_tokens\n0,1,600,20\n1,1,600,20\n")

    assert main(["--quick", "--gpus", "1", "--trace", str(trace)]) == 2

    assert capsys.readouterr().err.startswith("advise: the limits are kept however fast requests come")
