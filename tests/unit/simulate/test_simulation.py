"""A simulated server: every request ends once, one seed gives one log, and what dies costs no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.cost import ContentionCost
from scheduler.plan import Plan, Replica
from scheduler.profile import DecodeTable, LimitsTable
from scheduler.simulate.desk import FrontCost
from scheduler.simulate.outcome import CANCELLED, DONE, LATE, REFUSED, Limits, check, figures
from scheduler.simulate.run import Options, Outage, Run, SimulationRefused
from scheduler.simulate.simulation import simulate
from scheduler.simulate.workload import Mix, Workload, poisson, together
from tests.unit.decisions.worlds import COSTS, plan

HYBRID = ("cuda:0", "cuda:1")


def world(encoders: tuple[str, ...] = HYBRID, decoders: tuple[str, ...] = HYBRID, **limits: int) -> Plan:
    """Two GPUs that do both, unless told otherwise."""
    placed = plan(encoders, decoders, decode=DecodeTable(kv_cache_mib=8192))
    return placed.model_copy(update={"limits": LimitsTable(**limits)})


def load(count: int = 200, rate_per_s: float = 8.0, seed: int = 1, **mix: object) -> Workload:
    """Questions with an image each."""
    chance = np.random.default_rng(seed)
    return Mix(**mix).draw(poisson(count, rate_per_s, chance), chance)  # type: ignore[arg-type]


def served(workload: Workload, placed: Plan | None = None, **options: object) -> Run:
    run = simulate(placed or world(), workload, COSTS, Options(**options))  # type: ignore[arg-type]
    check(run.outcomes, workload)
    return run


def test_one_request_takes_the_sum_of_its_parts() -> None:
    placed = plan(["cuda:1"], ["cuda:0"], decode=DecodeTable(kv_cache_mib=8192))

    run = served(load(1), placed)

    delay_s, encode_s, copy_s, prefill_s = 0.002, 0.0025, 0.0003, 0.001 + 640 * 70e-6
    steps_s = sum(COSTS.decode.seconds(1, 641 + index) for index in range(127))
    assert run.outcomes.ttft_s[0] == pytest.approx(delay_s + encode_s + copy_s + prefill_s)
    assert run.outcomes.ended_s[0] - run.outcomes.first_s[0] == pytest.approx(steps_s)
    assert run.tally.link_bytes == {"NV12": 4_718_592}
    assert run.tally.modes == {"split": 1}


def test_one_seed_gives_one_log() -> None:
    logs: list[list[tuple[float, int, str, str]]] = [[], []]
    for log in logs:
        served(load(rate_per_s=20, image_share=0.5, spread=0.5), log=lambda *entry, log=log: log.append(entry))

    assert logs[0] == logs[1]
    assert len(logs[0]) > 600


def test_more_than_fits_is_refused_at_once() -> None:
    run = served(replace(load(100), arrived_s=together(100)), world(max_in_flight=4, max_waiting=10))

    refused = run.outcomes.outcome == REFUSED
    assert refused.sum() == 86
    assert (run.outcomes.ended_s == run.outcomes.arrived_s)[refused].all()


def test_a_deadline_holds_in_the_queue_and_in_every_stage() -> None:
    workload = replace(load(60), arrived_s=together(60), deadline_s=np.full(60, 1.5))

    run = served(workload, world(max_in_flight=16))

    late = run.outcomes.outcome == LATE
    assert 20 < late.sum() < 50
    assert run.outcomes.ended_s[late] == pytest.approx(1.5)
    assert (run.outcomes.num_given[late] > 0).any()
    assert np.isnan(run.outcomes.first_s[late]).any()


def test_a_client_that_leaves_frees_its_place() -> None:
    leaves_s = np.where(np.arange(60) % 2, 0.5, np.inf)

    run = served(replace(load(60), arrived_s=together(60), cancel_s=leaves_s), world(max_in_flight=16))

    assert (run.outcomes.outcome == np.where(np.arange(60) % 2, CANCELLED, DONE)).all()


def test_users_of_a_closed_loop_wait_for_their_answers() -> None:
    chance = np.random.default_rng(1)
    workload = Mix().draw(together(40), chance, num_users=4, think_s=0.1)

    run = served(workload)

    ended, arrived = np.sort(run.outcomes.ended_s), np.sort(run.outcomes.arrived_s)
    assert (arrived[:4] == 0).all()
    assert arrived[4:] == pytest.approx(ended[:-4] + 0.1)


@pytest.mark.parametrize("name", ["e0", "d0", "cuda:0"])
def test_what_dies_costs_no_answer(name: str) -> None:
    workload = load(rate_per_s=20)

    run = served(workload, outages=[Outage(name, 2.0, 6.0)])

    assert (run.outcomes.outcome == DONE).all()
    assert run.tally.num_retries > 0


def test_with_no_decoder_left_requests_are_refused_until_one_is_back() -> None:
    placed = world(("cuda:1",), ("cuda:0",))

    run = served(load(), placed, outages=[Outage("d0", 2.0, 6.0)])

    refused = run.outcomes.arrived_s[run.outcomes.outcome == REFUSED]
    assert len(refused) > 20
    assert refused.min() > 0.5  # those that ran when it died are told so, too
    assert refused.max() < 6.0


def test_an_encoder_that_has_an_image_is_asked_again() -> None:
    run = served(load(image_share=1.0, num_distinct=10))

    assert run.num_encoded == 10
    assert run.num_cached == 190
    assert run.tally.reasons["cached"] > 150


def test_work_on_one_device_is_never_more_than_its_time() -> None:
    run = served(load(rate_per_s=60, images=4))

    for stages in run.device_busy.values():
        assert 0.5 < sum(stages.values()) <= 1.0 + 1e-9


def test_figures_count_those_who_got_nothing() -> None:
    run = served(replace(load(100), arrived_s=together(100)), world(max_in_flight=4, max_waiting=10))

    told = figures(run.outcomes, Limits(ttft_s=100, tpot_s=100), warm_up=0.0)

    assert told.attainment == pytest.approx(0.14)
    assert told.num_by_outcome == {"done": 14, "refused": 86}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"prompt_tokens": np.full(200, 20_000)}, Options(), "decode.kv_cache_mib 8192 holds 16384 tokens, and a"),
        ({"num_images": np.full(200, 9)}, Options(), "a request has 9 images; limits.max_images allows 8"),
        ({}, Options(outages=[Outage("e7", 1.0)]), "outage of 'e7', which is not there; allowed: a device or one of"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], options: Options, message: str) -> None:
    with pytest.raises(SimulationRefused, match=message):
        simulate(world(), replace(load(), **change), COSTS, options)  # type: ignore[arg-type]


def test_work_in_front_takes_the_cpus_time_from_the_stages() -> None:
    placed = world(("cuda:1",), ("cuda:0",))
    free, fronted = (
        served(load(), placed, front=FrontCost(before_s, stream_s=after_s))
        for before_s, after_s in ((0, 0), (0.02, 0.01))
    )

    alone = served(load(1), placed, front=FrontCost(0.02, stream_s=0.01))
    assert alone.outcomes.ttft_s[0] == pytest.approx(0.02 + served(load(1), placed).outcomes.ttft_s[0])
    assert fronted.outcomes.ttft_s.mean() > free.outcomes.ttft_s.mean() + 0.02
    assert np.nanmean(fronted.outcomes.tpot_s) > np.nanmean(free.outcomes.tpot_s)


def test_stages_that_take_turns_on_one_cpu_lose_time_between_them() -> None:
    replicas = [Replica(name=name, device="cpu", cpus=(0,)) for name in ("clip_encoder_0", "llava_decoder_0")]
    placed = world().model_copy(update={"encoders": (replicas[0],), "decoders": (replicas[1],), "links": ()})

    ends_s = []
    for speed in (0.5, 0.25):
        costs = COSTS.model_copy(update={"contention": ContentionCost(encode_speed=speed, decode_speed=speed)})
        run = simulate(placed, replace(load(20), arrived_s=together(20)), costs, Options())
        ends_s.append(run.outcomes.ended_s)
    assert (ends_s[1] >= ends_s[0]).all()
    assert ends_s[1][0] > ends_s[0][0]  # while another is encoded


def test_who_learns_leaves_a_stage_that_is_slower_than_believed() -> None:
    slow = COSTS.model_copy(update={"encode": COSTS.encode.model_copy(update={"image_s": 0.05})})
    workload, costs = load(rate_per_s=5), {"cuda:0": slow, "cuda:1": COSTS}

    runs = [
        simulate(world(), workload, costs, Options(policy="cost", believed=COSTS, learns=learns))
        for learns in (False, True)
    ]

    trusting, learning = (next(iter(run.num_batches.values())) / run.num_encoded for run in runs)
    assert learning < 0.5 * trusting


def test_a_device_that_others_use_too_takes_so_much_longer() -> None:
    once, twice = (served(load(1), stretch=stretch).outcomes for stretch in (1.0, 2.0))

    assert twice.ended_s[0] - twice.first_s[0] == pytest.approx(2 * (once.ended_s[0] - once.first_s[0]))
