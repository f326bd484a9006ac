"""The simulator against the real server: the same requests on cpu_pools, at light load, near capacity and over it.

`python -m benchmarks.validation` starts the server of deploy/profiles/cpu_pools.toml (two encoders on CPU 0, two
decoders on CPU 1), measures its costs as `vlm-relay profile` does, and sends the requests of a trace, each with a
picture of its own and exactly 32 tokens of answer. Then it simulates the same trace.

On two CPUs the stages are not alone: client, tritonserver and relay use the same ones, and stages that take turns on
one CPU lose time between the turns. What that costs is measured, not fitted to the loads: from requests that find
everything idle, and from a closed loop that keeps everything busy (`reckon`). `--again FILE` simulates a recorded run
anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processor_time import FRONT, STAGES
from benchmarks.provenance import provenance
from benchmarks.real_run import (
    NUM_ALONE,
    NUM_CLOSED,
    NUM_USERS,
    OUTPUT_TOKENS,
    PAUSE_S,
    PROFILE,
    capacity_of,
    pace,
    record_run,
)
from launcher.serve import plan_of
from scheduler.cost import ContentionCost, Costs, parse_costs
from scheduler.output_file import output_file
from scheduler.plan import Plan
from scheduler.pools import costs_of
from scheduler.simulate.desk import FrontCost
from scheduler.simulate.report import table
from scheduler.simulate.run import Options, Run
from scheduler.simulate.simulation import simulate
from scheduler.simulate.workload import Mix, Workload, together

RESULTS = Path(__file__).parent / "results"
NUM_CPUS = 2  # of the profile
TOLERANCE = 0.15
LEAST_SHARE, NUM_HALVINGS = 0.25, 8
SEEDS = range(1, 9)
JITTER_S = 0.002  # about as late as the client sends
HELD = ("ttft_mean_s", "ttft_p90_s", "requests_per_s")  # the other measures are shown only


@dataclass(frozen=True, slots=True)
class Reckoned:
    """What a simulation of the recorded server goes by."""

    plan: Plan
    costs: dict[str, Costs]
    prompt_tokens: int
    front: FrontCost
    idle_share: float  # of the CPUs, that a server without requests uses

    def run(self, workload: Workload) -> Run:
        """Serves a workload. The server reckons with rooflines and corrects them, as the real one of this profile."""
        believed = costs_of(self.plan, None)
        options = Options(front=self.front, stretch=1 / (1 - self.idle_share), believed=believed, learns=True)
        return simulate(self.plan, workload, self.costs, options)

    def keeping(self, share: float) -> Reckoned:
        """The same with another share of its speed that a stage keeps while another computes on its CPU."""
        contention = ContentionCost(encode_speed=share, decode_speed=share)
        turned = {name: each.model_copy(update={"contention": contention}) for name, each in self.costs.items()}
        return replace(self, costs=turned)

    def workload(self, arrived_s: Sequence[float], num_users: int = 0) -> Workload:
        """One picture each, none twice."""
        mix = Mix(images=1, text_tokens=self.prompt_tokens - 576, output_tokens=OUTPUT_TOKENS)
        return mix.draw(np.asarray(arrived_s, dtype=float), np.random.default_rng(1), num_users)


def reckon(record: dict[str, Any]) -> Reckoned:
    """What the stages take, what is in front of them and between their turns, from the requests before the loads.

    - Stages: as measured for costs, scaled to what each took for requests that came alone.
    - Until the first token: what a request alone takes beyond its stages; half of it before it is placed, a quarter
      each from the encoder to the decoder and from there to the client.
    - Each further token: the rest of the CPU time in front in the closed loops, of which there is one before the loads
      and one after them, since the machine's own speed changes by several per cent from minute to minute.
    - Between turns: what makes the simulated closed loop as fast as the real one. It is the one number that is fitted.
    """
    plan, idle, alone = plan_of(PROFILE, None), record["idle"], record["alone"]
    closed = [record["closed"], record["closed_again"]]
    costs = as_seen_alone(parse_costs(json.dumps(record["costs"]), "the recorded run"), alone)
    idle_per_s = {name: used / idle["seconds"] for name, used in idle["cpu"].items()}
    idle_share = sum(idle_per_s[role] for role in (*FRONT, *STAGES)) / NUM_CPUS
    bare = Reckoned(plan, costs, alone["num_input_tokens"], FrontCost(), idle_share)
    told_s = float(np.median([each["ttft_s"] for each in alone["outcomes"]]))
    path_s = max(0.0, told_s - float(bare.run(bare.workload([0.0])).outcomes.ttft_s[0])) * (1 - idle_share)
    front_s = sum(loop["cpu"][role] - idle_per_s[role] * loop["seconds"] for loop in closed for role in FRONT)
    stream_s = max(0.0, front_s / (len(closed) * NUM_CLOSED) - path_s) / (OUTPUT_TOKENS - 1)
    front = FrontCost(path_s / 2, path_s / 4, path_s / 4, stream_s)
    return _with_turns(replace(bare, front=front), float(np.mean([capacity_of(loop) for loop in closed])))


def as_seen_alone(costs: dict[str, Costs], alone: dict[str, Any]) -> dict[str, Costs]:
    """The costs, scaled to what the stages of the server themselves took for requests that came alone.

    They were measured minutes before, and the machine's speed changes by up to a sixth from minute to minute.
    """
    sums, num_tokens = alone["sums"], alone["num_input_tokens"]
    encode_s, prefill_s = _mean(sums, "vlm_relay_encode_seconds"), _mean(sums, "vlm_relay_prefill_seconds")
    step_s = _mean(sums, "vlm_relay_tpot_seconds")
    scaled = {}
    for name, each in costs.items():
        encode, prefill, decode = each.encode, each.prefill, each.decode
        slower = encode_s / encode.seconds(1)
        encode = encode.model_copy(update={"batch_s": encode.batch_s * slower, "image_s": encode.image_s * slower})
        slower = prefill_s / prefill.seconds(num_tokens)
        rates = ("start_s", "token_s", "token_squared_s")
        prefill = prefill.model_copy(update={rate: getattr(prefill, rate) * slower for rate in rates})
        slower = step_s / decode.seconds(1, num_tokens + OUTPUT_TOKENS / 2)
        speeds = {rate: getattr(decode, rate) / slower for rate in ("bytes_per_s", "flop_per_s")}
        decode = decode.model_copy(update={"step_s": decode.step_s * slower, **speeds})
        scaled[name] = each.model_copy(update={"encode": encode, "prefill": prefill, "decode": decode})
    return scaled


def _with_turns(reckoned: Reckoned, per_s: float) -> Reckoned:
    """With the share of its speed that a stage keeps beside another at which a closed loop ends so many requests."""
    least, most = LEAST_SHARE, 0.5
    workload = reckoned.workload(together(NUM_CLOSED).tolist(), NUM_USERS)
    for _ in range(NUM_HALVINGS):
        share = (least + most) / 2
        ended_s = np.sort(reckoned.keeping(share).run(workload).outcomes.ended_s)
        least, most = (share, most) if pace(ended_s) < per_s else (least, share)
    return reckoned.keeping(most)


def of_real(run: dict[str, Any]) -> dict[str, float]:
    """The figures of a real run; nobody is left out but those who were refused."""
    outcomes = run["outcomes"]
    done = [each for each in outcomes if each["error"] is None]
    ttft_s = np.array([each["ttft_s"] + each["late_s"] for each in done])
    latency_s = np.array([each["total_s"] + each["late_s"] for each in done])
    ended_s = max(each["at_s"] + each["late_s"] + each["total_s"] for each in done)
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p90_s": float(np.percentile(ttft_s, 90)),
        "requests_per_s": len(done) / (ended_s - outcomes[0]["at_s"]),
        "tpot_mean_s": _mean(run["sums"], "vlm_relay_tpot_seconds"),
        "latency_mean_s": float(latency_s.mean()),
        "images_per_batch": _mean(run["sums"], "vlm_relay_encode_batch_images"),
        "num_refused": float(len(outcomes) - len(done)),
    }


def of_simulated(reckoned: Reckoned, run: dict[str, Any]) -> dict[str, float]:
    """The same of the simulated server: the mean of several simulations, and the extremes of what is held.

    It has served requests one by one before, as the real one had. Each time requests come a millisecond or two earlier
    or later: near capacity that alone changes which of two equal decoders takes how much, and so times to first token.
    """
    found = [_of_one(reckoned, run, seed) for seed in SEEDS]
    told = {name: float(np.mean([each[name] for each in found])) for name in found[0]}
    for name in HELD:
        told |= {f"{name}_least": min(each[name] for each in found), f"{name}_most": max(each[name] for each in found)}
    return told


def _of_one(reckoned: Reckoned, run: dict[str, Any], seed: int) -> dict[str, float]:
    late_s = np.random.default_rng(seed).uniform(0.0, JITTER_S, len(run["outcomes"]))
    arrived_s = np.sort([each["at_s"] for each in run["outcomes"]] + late_s).tolist()
    num_before, began_s = NUM_ALONE, (NUM_ALONE + 5) * PAUSE_S
    before_s = [index * PAUSE_S for index in range(num_before)]
    whole = reckoned.run(reckoned.workload([*before_s, *[began_s + at_s for at_s in arrived_s]]))
    outcomes = whole.outcomes
    ttft_s, tpot_s = outcomes.ttft_s[num_before:], outcomes.tpot_s[num_before:]
    ended_s, came_s = outcomes.ended_s[num_before:], outcomes.arrived_s[num_before:]
    is_done = ~np.isnan(tpot_s)
    return {
        "ttft_mean_s": float(np.nanmean(ttft_s)),
        "ttft_p90_s": float(np.nanpercentile(ttft_s, 90)),
        "requests_per_s": float(is_done.sum() / (ended_s.max() - came_s[0])),
        "tpot_mean_s": float(np.nanmean(tpot_s)),
        "latency_mean_s": float((ended_s - came_s)[is_done].mean()),
        "images_per_batch": (whole.num_encoded - num_before) / (sum(whole.num_batches.values()) - num_before),
        "num_refused": float((~is_done).sum()),
    }


def _mean(sums: dict[str, float], name: str) -> float:
    return sums[f"{name}_sum"] / max(1.0, sums[f"{name}_count"])


def compare(record: dict[str, Any]) -> tuple[list[list[str]], list[str], dict[str, Any]]:
    """The table, what is outside the tolerance, and the figures."""
    reckoned = reckon(record)
    rows, faults, told = [["LOAD", "", "REAL", "SIMULATED", "OFF BY"]], [], {}
    for name, run in record["runs"].items():
        real, simulated = of_real(run), of_simulated(reckoned, run)
        rate = run["rate_per_s"]
        told[name] = {"rate_per_s": rate, "others_share": run["others_share"], "real": real, "simulated": simulated}
        for measure in [each for each in real if real[each]]:
            error = simulated[measure] / real[measure] - 1
            head = f"{name}, {rate:.1f}/s" if measure == HELD[0] else ""
            rows.append([head, measure, f"{real[measure]:.4g}", f"{simulated[measure]:.4g}", f"{error:+.1%}"])
            if measure in HELD and abs(error) > TOLERANCE:
                faults.append(f"{measure} at {name} is off by {error:+.1%}, allowed: {TOLERANCE:.0%}")
    contention = next(iter(reckoned.costs.values())).contention
    found = {"front": asdict(reckoned.front), "idle_share": reckoned.idle_share, "contention": contention.model_dump()}
    return rows, faults, {"reckoned": found, "loads": told}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, simulates, prints, writes; 1 when a figure is outside the tolerance."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--again", type=Path, metavar="FILE", help="simulate the real run recorded in FILE")
    parser.add_argument("--record", type=output_file, default=RESULTS / "validation_run.json", help="(%(default)s)")
    parser.add_argument("--out", type=output_file, default=RESULTS / "validation.json", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.again is None:
        measured = ("scheduler", "python_backend", "launcher", "benchmarks/real_run.py")
        record = {**provenance("benchmarks.validation", argv, measured), **record_run()}
        arguments.record.write_text(json.dumps(record) + "\n")
    else:
        try:
            record = json.loads(arguments.again.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--again {arguments.again}: {getattr(error, 'strerror', None) or error}")
    rows, faults, told = compare(record)
    print("\n".join(table(rows)))
    print(f"capacity {record['capacity_per_s']:.1f} requests/s; reckoned with {json.dumps(told['reckoned'])}")
    report = {key: record[key] for key in ("command", "date", "commit", "machine", "versions")}
    simulated = provenance("benchmarks.validation", argv, ("scheduler", "benchmarks/validation.py"))["commit"]
    whole = {**report, "simulated_by": simulated, **told, "faults": faults}
    arguments.out.write_text(json.dumps(whole, indent=2) + "\n")
    print("\n".join(f"NOT HELD: {fault}" for fault in faults) or "held")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
