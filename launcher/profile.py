"""`vlm-relay profile`: what encode, prefill, decode and transfer cost on this server, as a file for its profile."""

from __future__ import annotations

import contextlib
import io
import json
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from client import RelayClient
from client.channel import address_from
from launcher.process import ServerFailed
from launcher.serve import Say, running
from launcher.stage_calls import NoOverlap, StageCalls
from python_backend.checkpoint import CheckpointFacts, read_facts, resolve
from scheduler.cost import GIGABYTE, IMAGE_TOKENS, Costs, DecodeCost, EncodeCost, PrefillCost, TransferCost
from scheduler.fit import Geometry, Sample, fit_decode, fit_encode, fit_prefill, mean_error
from scheduler.plan import Plan, Replica
from scheduler.pools import link_between, place_of

REPEATS = 7  # of each point; the median counts
NUM_HOPS = 40
NUM_COPIES = 20
NUM_TOKENS = 128  # generated per sequence of a decode point, if they overlap
MOST_TOKENS = 4 * NUM_TOKENS  # else
NUM_ROUNDS = 3  # of each decode point; the median counts
PICTURE_SIDE = 336
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (16, 64, 128, 256, 512, 768, 1024, 2048, 4096)


@dataclass(slots=True)
class Findings:
    """What was measured, by replica, and how far the fitted functions are from it."""

    encode: dict[str, EncodeCost] = field(default_factory=dict)
    prefill: dict[str, PrefillCost] = field(default_factory=dict)
    decode: dict[str, DecodeCost] = field(default_factory=dict)
    transfer: TransferCost = field(default_factory=TransferCost)
    errors: dict[str, float] = field(default_factory=dict)  # "encode of clip_encoder" -> mean relative error


class Profiler:
    """Measures the replicas of a plan on the server at `address` (gRPC), which should have nothing else to do."""

    def __init__(self, plan: Plan, facts: CheckpointFacts, address: str, seed: int = 0) -> None:
        self._plan = plan
        self._facts = facts
        self._address = address
        self._chance = random.Random(seed)
        self._config = json.loads((facts.path / "config.json").read_text())["text_config"]
        self._noise = np.random.default_rng(seed)

    def run(self) -> Findings:
        """Measures every replica, the links between them and the hop to an encoder.

        Raises:
            ServerFailed: a stage refused, or does not answer.
        """
        findings = Findings()
        calls = StageCalls(self._address)
        try:
            for encoder in self._plan.encoders:
                self._measure_encoder(encoder, calls, findings)
            for decoder in self._plan.decoders:
                self._measure_decoder(decoder, calls, findings)
            findings.transfer = self._measure_transfer(calls)
        finally:
            calls.close()
        return findings

    # -- the stages ---------------------------------------------------------------------------------------

    def _measure_encoder(self, encoder: Replica, calls: StageCalls, findings: Findings) -> None:
        """Batches of pictures that were never seen; Triton joins what is sent at once."""
        max_batch = self._plan.encode.max_batch
        units = self._facts.image_tokens / IMAGE_TOKENS
        self._encode_s(calls, encoder, self._pictures(max_batch))  # warm
        hop_s = self._hop_s(encoder, calls)
        samples = []
        for size in tqdm([size for size in BATCHES if size <= max_batch], f"encode on {encoder.name}"):
            times = [self._encode_s(calls, encoder, self._pictures(size)) for _ in range(REPEATS)]
            samples.append(Sample(size * units, max(statistics.median(times) - hop_s, 1e-6)))
        cost = fit_encode(samples, max_batch)
        findings.encode[encoder.name] = cost
        predicted = [cost.seconds(each.size) for each in samples]
        findings.errors[f"encode on {encoder.name}"] = mean_error(predicted, samples)

    def _hop_s(self, encoder: Replica, calls: StageCalls) -> float:
        """To an encoder and back by gRPC, when it has the picture."""
        picture = self._pictures(1)
        self._encode_s(calls, encoder, picture)
        return statistics.median(self._encode_s(calls, encoder, picture) for _ in range(NUM_HOPS))

    def _encode_s(self, calls: StageCalls, encoder: Replica, pictures: list[bytes]) -> float:
        """How long they take; the leases are given back at once, or the store would fill up."""
        seconds, handles = calls.encode(encoder.name, pictures)
        calls.release(self._plan.decoders[0].name, handles)
        return seconds

    def _measure_decoder(self, decoder: Replica, calls: StageCalls, findings: Findings) -> None:
        longest = self._facts.context_tokens - 2 * MOST_TOKENS
        prefills = self._prefill_samples(decoder, calls, longest)
        prefill = findings.prefill[decoder.name] = fit_prefill(prefills)
        error = mean_error([prefill.seconds(each.size) for each in prefills], prefills)
        findings.errors[f"prefill on {decoder.name}"] = error
        decodes = self._decode_samples(decoder, calls, longest)
        decode = findings.decode[decoder.name] = fit_decode(decodes, self._geometry())
        error = mean_error([decode.seconds(each.size, each.tokens) for each in decodes], decodes)
        findings.errors[f"decode on {decoder.name}"] = error

    def _prefill_samples(self, decoder: Replica, calls: StageCalls, longest: int) -> list[Sample]:
        """Prompts that no cache knows, one at a time; their first token."""
        calls.prefill(decoder.name, self._prompt(PROMPTS[0]))  # warm
        samples = []
        for size in tqdm([size for size in PROMPTS if size <= longest], f"prefill on {decoder.name}"):
            times = [calls.prefill(decoder.name, self._prompt(size))[0] for _ in range(REPEATS)]
            samples.append(Sample(size, statistics.median(times)))
        return samples

    def _decode_samples(self, decoder: Replica, calls: StageCalls, longest: int) -> list[Sample]:
        """Batches of sequences with short and with long contexts, whose prompts are in the prefix cache already.

        So all begin at once. What does not fit into the KV cache together is left out.
        """
        room = (self._plan.decode.kv_cache_mib << 20) / self._geometry().kv_bytes_per_token
        sizes = [size for size in BATCHES if size <= self._plan.decode.max_sequences]
        points = [(size, length) for length in (32, longest // 2) for size in sizes]
        points = [(size, length) for size, length in points if size * (length + MOST_TOKENS) < room]
        samples = []
        for size, length in tqdm(points, f"decode on {decoder.name}"):
            prompts = [self._prompt(length) for _ in range(size)]
            for prompt in prompts:
                calls.prefill(decoder.name, prompt)
            step_s, num_tokens = self._step_s(decoder, calls, prompts)
            samples.append(Sample(size, step_s, size * (length + num_tokens / 2)))
        return samples

    def _step_s(self, decoder: Replica, calls: StageCalls, prompts: list[list[int]]) -> tuple[float, int]:
        """Of these prompts together, and how long the answers were: as long as it takes for all to overlap.

        A fast decoder is done with a short answer before the last prompt has reached it.
        """
        for num_tokens in (NUM_TOKENS, 2 * NUM_TOKENS):
            with contextlib.suppress(NoOverlap):
                return self._median_step_s(decoder, calls, prompts, num_tokens), num_tokens
        return self._median_step_s(decoder, calls, prompts, MOST_TOKENS), MOST_TOKENS

    @staticmethod
    def _median_step_s(decoder: Replica, calls: StageCalls, prompts: list[list[int]], num_tokens: int) -> float:
        return statistics.median(calls.decode(decoder.name, prompts, num_tokens) for _ in range(NUM_ROUNDS))

    def _geometry(self) -> Geometry:
        """Of the language model, from its configuration in Hugging Face format."""
        config = self._config
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_width = (config.get("num_key_value_heads") or heads) * head_dim
        attention = hidden * (2 * heads * head_dim + 2 * kv_width)
        parameters = layers * (attention + 3 * hidden * config["intermediate_size"]) + hidden * config["vocab_size"]
        item_bytes = 4 if self._plan.decode.dtype == "float32" else 2
        return Geometry(parameters * item_bytes, 2 * layers * kv_width * item_bytes, 2 * parameters)

    # -- between them -------------------------------------------------------------------------------------

    def _measure_transfer(self, calls: StageCalls) -> TransferCost:
        """The hop as the scheduler pays it, and the copy over each class of link."""
        embedding_bytes = 0.0
        rates: dict[str, list[float]] = {}
        links = {frozenset((link.first, link.second)): link for link in self._plan.links}
        pairs = [(encoder, decoder) for encoder in self._plan.encoders for decoder in self._plan.decoders]
        image_id = self._facts.image_token_id
        for encoder, decoder in tqdm(pairs, "transfer"):
            picture = self._pictures(1)
            times = []
            for _ in range(NUM_COPIES):
                _, handles = calls.encode(encoder.name, picture)
                _, report = calls.prefill(decoder.name, [*self._prompt(4), image_id, *self._prompt(4)], handles)
                times.append(float(report["transfer_s"]))
                embedding_bytes = float(report["transfer_bytes"])
            link = link_between(links, encoder, decoder)
            if link is not None:
                rates.setdefault(link.link, []).append(embedding_bytes / max(statistics.median(times), 1e-9))
        units = self._facts.image_tokens / IMAGE_TOKENS
        return TransferCost(
            hop_s=self._relay_hop_s(),
            setup_s=0.0,  # within the rate: both are of one embedding
            staged_setup_s=0.0,
            embedding_bytes=embedding_bytes / units,
            gigabytes_per_s={name: statistics.median(each) / GIGABYTE for name, each in sorted(rates.items())},
        )

    def _relay_hop_s(self) -> float:
        """From the scheduler to an encoder that has the picture, and back."""
        (picture,) = self._pictures(1)
        times = []
        with RelayClient(self._address) as client:
            for _ in tqdm(range(NUM_HOPS), "hop"):
                answer = client.ask("?", images=[picture], max_tokens=1, return_decision=True)
                times.append(_observed(answer.decision)["encode_s"])
        return statistics.median(times[1:])

    # -- what is sent -------------------------------------------------------------------------------------

    def _pictures(self, count: int) -> list[bytes]:
        """JPEG files of coarse noise, each new: no cache knows them."""
        files = []
        for _ in range(count):
            coarse = Image.fromarray(self._noise.integers(0, 256, (12, 12, 3), dtype=np.uint8))
            file = io.BytesIO()
            coarse.resize((PICTURE_SIDE, PICTURE_SIDE)).save(file, "JPEG")
            files.append(file.getvalue())
        return files

    def _prompt(self, num_tokens: int) -> list[int]:
        """Token ids at random, no image among them."""
        image_id = self._facts.image_token_id
        ids = [token_id for token_id in range(4, min(1000, self._config["vocab_size"])) if token_id != image_id]
        return self._chance.choices(ids, k=num_tokens)


def _observed(decision: Any) -> dict[str, float]:
    if not isinstance(decision, dict) or "observed" not in decision:
        raise ServerFailed("the server does not tell what it observed: it is of another version")
    return dict(decision["observed"])


def costs_from(findings: Findings, plan: Plan, source: str) -> dict[str, Costs]:
    """The findings by place of the plan. A place without a stage takes that stage's cost from another place."""
    any_encode = next(iter(findings.encode.values()))
    any_decoder = next(iter(findings.decode))
    costs: dict[str, Costs] = {}
    for replica in (*plan.encoders, *plan.decoders):
        place = place_of(replica)
        encode = next((findings.encode[each.name] for each in plan.encoders if place_of(each) == place), any_encode)
        decoder = next((each.name for each in plan.decoders if place_of(each) == place), any_decoder)
        costs[place] = Costs(
            encode=encode,
            prefill=findings.prefill[decoder],
            decode=findings.decode[decoder],
            transfer=findings.transfer,
            source=source,
        )
    return costs


def to_json(costs: dict[str, Costs]) -> str:
    """The file that `scheduler.cost.parse_costs` reads."""
    return json.dumps({"devices": {name: each.model_dump() for name, each in costs.items()}}, indent=2) + "\n"


def summary(findings: Findings) -> str:
    """What was found, for a person: one line per stage and replica."""
    lines = []
    for name, encode in findings.encode.items():
        error = findings.errors[f"encode on {name}"]
        lines.append(
            f"{name:16} encode   {encode.batch_s * 1e3:.2f} ms + {encode.image_s * 1e3:.2f} ms per image "
            f"of {IMAGE_TOKENS} tokens  (off by {error:.0%})"
        )
    for name, prefill in findings.prefill.items():
        error = findings.errors[f"prefill on {name}"]
        for_512 = prefill.seconds(512)
        lines.append(f"{name:16} prefill  {for_512 * 1e3:.2f} ms for 512 tokens  (off by {error:.0%})")
    for name, decode in findings.decode.items():
        error = findings.errors[f"decode on {name}"]
        one, many = decode.seconds(1, 512), decode.seconds(16, 16 * 512)
        lines.append(
            f"{name:16} decode   {one * 1e3:.2f} ms for 1 sequence of 512 tokens, {many * 1e3:.2f} ms for 16  "
            f"(off by {error:.0%})"
        )
    transfer = findings.transfer
    rates = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in transfer.gigabytes_per_s.items())
    lines.append(f"{'transfer':16} hop {transfer.hop_s * 1e3:.2f} ms; {rates or 'nothing is copied between devices'}")
    return "\n".join(lines)


def profile(plan: Plan, url: str | None, out: Path, variables: Mapping[str, str], say: Say) -> str:
    """Measures the idle server at `url`, or one started for it, and writes `out`; what it found, for a person.

    Raises:
        ServerFailed: the server cannot start, or a stage refused or does not answer.
        OSError: `out` cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = read_facts(resolve(plan.checkpoint))
    if url is not None:
        findings = Profiler(plan, facts, address_from(url)).run()
    else:
        log_path = out.with_suffix(".log")
        with (
            log_path.open("w") as log,
            running(plan, ("127.0.0.1", 0, 0, 0), variables, say, log) as server,
        ):
            findings = Profiler(plan, facts, f"127.0.0.1:{server.ports.grpc}").run()
    out.write_text(to_json(costs_from(findings, plan, f"measured with {plan.checkpoint}")))
    say(f'wrote {out}; a profile names it in [schedule]: costs = "{out}"')
    return summary(findings)
