"""Advice for a person: the verdict, the table behind it, the profile to use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from scheduler.advise.advice import PEAK_SHARE, Advice, Variation, num_servers
from scheduler.advise.goodput import Question
from scheduler.advise.search import Result
from scheduler.fleet import profile_of
from scheduler.profile import Profile
from scheduler.simulate.report import duration, table
from scheduler.topology import Topology


def text(advice: Advice, question: Question, topology: Topology, variations: Sequence[Variation]) -> str:
    """Everything, in the order in which it is asked."""
    sections = [verdict(advice), _shares(advice), _layouts(advice)]
    if variations:
        sections.append(_flips(variations))
    sections.append(["The profile to run:", "", *profile_toml(advice.chosen, topology).rstrip().split("\n")])
    limits = question.limits
    head = (
        f"{topology.source}; first token within {limits.ttft_s:g} s and the others within {limits.tpot_s * 1000:g} ms "
        f"each, for {limits.attainment:.0%} of the requests"
    )
    return "\n\n".join("\n".join(lines) for lines in ([head], *sections))


def verdict(advice: Advice) -> list[str]:
    """What to run and by how much."""
    chosen, split = advice.chosen, advice.split
    words = "Do not split"
    if advice.does_splitting_pay:
        words = "Split" if advice.is_split else "Splitting pays, and deciding per request keeps what it gains"
    lines = [f"{words}: run {chosen.layout.name}, {chosen.mean_per_s:.3g} requests/s within the limits."]
    others = [each for each in advice.results if each is not chosen]
    serial = next((each for each in others if each.layout.policy == "serial"), None)
    for name, other in (("always serial", serial), ("the best split", split if split is not chosen else None)):
        if other is not None:
            sure, of = advice.num_sure(other)
            where = f" ({other.layout.name})" if other.layout.policy != "serial" else ""
            lines.append(f"It serves {advice.gain_over(other):.2f} times {name}{where}; so in {sure} of {of} seeds.")
    return lines


def _shares(advice: Advice) -> list[str]:
    shares = advice.shares
    if not shares.encode_s:
        return ["No request has an image: there is nothing to encode."]
    return [
        f"GPU time of a mean request: encode {duration(shares.encode_s)}, prefill {duration(shares.prefill_s)}, "
        f"decode {duration(shares.decode_s)} (in steps of 32)",
        f"Encode share f = {shares.encode_share:.1%}: a GPU that only encodes is kept busy from "
        f"1/f = {shares.break_even_gpus:.0f} GPUs on.",
    ]


def _layouts(advice: Advice) -> list[str]:
    best = advice.results[0].mean_per_s
    rows = [["LAYOUT", "REQUESTS/S", "OF BEST", "SEEDS FROM", "TO", "CHUNK", "STEP LIMIT", "ENCODE BATCH"]]
    for each in advice.results:
        low, high = min(each.goodput_per_s), max(each.goodput_per_s)
        tuning = each.tuning
        tuned = [str(tuning.step_tokens), f"{tuning.step_limit_ms} ms", str(tuning.max_batch)]
        spread = [f"{low:.2f}", f"{high:.2f}"] if len(each.goodput_per_s) > 1 else ["", ""]
        rows.append([each.layout.name, f"{each.mean_per_s:.2f}", f"{each.mean_per_s / best:.3f}", *spread, *tuned])
    note = [] if all(each.is_tuned for each in advice.results) else ["Without seeds: too far behind to be tuned."]
    return [*table(rows), *note]


def _flips(variations: Sequence[Variation]) -> list[str]:
    rows = [["IF", "ALWAYS SERIAL", "SPLIT", "", "HYBRID", "BETTER OF THE FIRST TWO"]]
    for each in variations:
        numbers = [f"{each.serial_per_s:.2f}", f"{each.split_per_s:.2f}", each.split.name, f"{each.hybrid_per_s:.2f}"]
        rows.append([each.name, *numbers, each.winner])
    return ["When the answer changes (one seed, untuned, requests/s):", *table(rows)]


def profile_toml(result: Result, topology: Topology) -> str:
    """The deployment profile of a layout: what differs from the defaults."""
    profile = profile_of(topology, result.layout, result.tuning)
    told = profile.model_copy(update={"topology": Profile().topology}).model_dump(exclude_defaults=True)
    lines = [f"# {result.layout.name} on {topology.source}: {result.mean_per_s:.3g} requests/s, simulated"]
    for name, values in told.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(_plain(value))}" for key, value in values.items())]
        if name == "model":
            lines.insert(len(lines) - len(values), '# checkpoint = "/path/to/llava-1.5-7b-hf"')
    return "\n".join(lines) + "\n"


def _plain(value: object) -> object:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def helm_values(result: Result, topology: Topology, memory_gib: int, target_per_s: float) -> str:
    """Values of the project's Helm chart that serve a target load."""
    profile = profile_of(topology, result.layout, result.tuning)
    keys = {
        "encode": ("replicas", "max_batch"),
        "decode": ("replicas", "max_sequences", "step_tokens", "step_limit_ms"),
        "schedule": ("policy", "hybrid"),
    }
    count = num_servers(result.mean_per_s, target_per_s)
    lines = [
        f"# {target_per_s:g} requests/s: {count} servers, each at {target_per_s / count:.3g} of the "
        f"{result.mean_per_s:.3g} that it can (at most {PEAK_SHARE:.0%})",
        "gpu:",
        f"  count: {topology.num_gpus}",
        f"  memoryGib: {memory_gib}",
        "server:",
        f"  replicas: {count}",
        "profile:",
    ]
    for name, wanted in keys.items():
        values = getattr(profile, name)
        told = ", ".join(f"{key}: {json.dumps(getattr(values, key))}" for key in wanted)
        lines.append(f"  {name}: {{{told}}}")
    return "\n".join(lines) + "\n"


def to_dict(
    advice: Advice, question: Question, topology: Topology, variations: Sequence[Variation]
) -> dict[str, object]:
    """Plain values, for JSON."""
    shares = advice.shares
    return {
        "machine": topology.source,
        "limits": asdict(question.limits),
        "split": advice.is_split,
        "splitting_pays": advice.does_splitting_pay,
        "run": advice.chosen.layout.name,
        "encode_share": shares.encode_share,
        "break_even_gpus": shares.break_even_gpus if shares.encode_s else None,
        "layouts": [
            {
                "name": each.layout.name,
                **asdict(each.layout),
                "goodput_per_s": list(each.goodput_per_s),
                "tuning": asdict(each.tuning),
                "is_tuned": each.is_tuned,
            }
            for each in advice.results
        ],
        "variations": [{**asdict(each), "winner": each.winner} for each in variations],
        "profile": profile_toml(advice.chosen, topology),
    }
