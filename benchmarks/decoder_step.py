"""The decoder's steps against transformers' generate: the same weights, prompts and threads, in turns.

    python -m benchmarks.decoder_step --geometry small --dtype bfloat16 --concurrent 1 16

Each side answers the same number of requests together, each of 597 prompt tokens (576 of an image, drawn at
random, so that no prefix is shared). A decode step is the time between the tokens of a request once all run.
Times are taken on the wall and on the processor's clock of the deciding thread (`cpu_s`), which other programs
disturb less but which says all with one thread only. Rounds of both sides alternate and the median is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, models
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.provenance import provenance
from python_backend.decoder.batch import Chunk
from python_backend.decoder.engine import DecodeRequest, Delta, Engine, EngineOptions, ImageEmbedding
from python_backend.decoder.runner import Outcome
from python_backend.request import SamplingParameters

MEASURED = ("python_backend/decoder", "python_backend/weights.py", "benchmarks/decoder_step.py")
RESULTS = Path(__file__).with_name("results")
IMAGE_TOKEN, IMAGE_TOKENS, PROMPT_TOKENS = 3, 576, 597
VOCABULARY = 4096


@dataclass(frozen=True)
class Geometry:
    """A language model's sizes; `width` / 64 heads."""

    width: int
    num_layers: int
    mlp_width: int


GEOMETRIES = {"small": Geometry(512, 8, 1376), "medium": Geometry(1024, 16, 2816)}


@dataclass(frozen=True)
class Times:
    """Of one side in one round; a step's are medians."""

    step_wall_s: float
    step_cpu_s: float
    total_wall_s: float
    total_cpu_s: float
    run_cpu_s: float  # of a step, inside the engine's model runner; 0 for transformers


@dataclass
class Stamps:
    """When each decode step of a round ended, on both clocks, and how long the model ran for it."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    run_cpu_s: list[float] = field(default_factory=list)

    def mark(self, run_cpu_s: float = 0.0) -> None:
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.thread_time())
        self.run_cpu_s.append(run_cpu_s)

    def times(self, total_wall_s: float, total_cpu_s: float) -> Times:
        return Times(_step(self.wall_s), _step(self.cpu_s), total_wall_s, total_cpu_s, median(self.run_cpu_s[1:]))


def _step(stamps_s: list[float]) -> float:
    return median(after - before for before, after in pairwise(stamps_s))


def write_checkpoint(geometry: Geometry, folder: Path) -> LlavaForConditionalGeneration:
    """A LLaVA with random weights, saved with a tokenizer of no use."""
    heads = geometry.width // 64
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=336, patch_size=14
    )
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=geometry.width,
        intermediate_size=geometry.mlp_width,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    vocabulary = {str(index): index for index in range(VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="0")).save(str(folder / "tokenizer.json"))
    return model


class EngineSide:
    """Requests through the engine."""

    def __init__(self, checkpoint: Path, options: EngineOptions, tokens: int) -> None:
        self._engine = Engine.load(checkpoint, options, time.monotonic)
        self._tokens = tokens
        self._run_cpu_s = 0.0  # of the last step
        runner = self._engine._runner
        self._width = runner.config.width
        self._num_rounds = 0
        run = runner.run

        def timed(chunks: list[Chunk]) -> list[Outcome]:
            start_s = time.thread_time()
            outcomes = run(chunks)
            self._run_cpu_s = time.thread_time() - start_s
            return outcomes

        runner.run = timed  # type: ignore[method-assign]
        self._engine.start()

    def round(self, num_requests: int) -> Times:
        """Answer `num_requests` together."""
        self._num_rounds += 1
        stamps, ended = Stamps(), threading.Event()
        counts = [0] * num_requests

        def receiver(index: int) -> Callable[[Delta], None]:
            def receive(delta: Delta) -> None:
                if index == num_requests - 1 and max(counts) < self._tokens:  # all run
                    stamps.mark(self._run_cpu_s)
                counts[index] += len(delta.token_ids)
                if min(counts) == self._tokens:
                    ended.set()

            return receive

        requests = [self._request(index) for index in range(num_requests)]
        start_wall_s, start_cpu_s = time.perf_counter(), self._thread_cpu_s()
        for index, request in enumerate(requests):
            self._engine.submit(request, receiver(index))
        ended.wait()
        return stamps.times(time.perf_counter() - start_wall_s, self._thread_cpu_s() - start_cpu_s)

    def close(self) -> None:
        self._engine.close()

    def _thread_cpu_s(self) -> float:
        ident = self._engine._thread.ident
        assert ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(ident))

    def _request(self, index: int) -> DecodeRequest:
        name = f"{self._num_rounds}/{index}"
        image = ImageEmbedding(name.encode(), torch.randn(IMAGE_TOKENS, self._width))
        ids = (1, IMAGE_TOKEN, *range(10, 10 + PROMPT_TOKENS - IMAGE_TOKENS - 1))
        sampling = SamplingParameters(max_tokens=self._tokens, ignore_eos=True)
        return DecodeRequest(name, ids, (image,), sampling)


class TransformersSide:
    """The same number of prompts as one batch of `generate`, already embedded."""

    def __init__(self, model: LlavaForConditionalGeneration, dtype: torch.dtype, tokens: int) -> None:
        self._model = model.to(dtype)
        self._dtype = dtype
        self._tokens = tokens

    @torch.inference_mode()
    def round(self, num_requests: int) -> Times:
        """Answer `num_requests` together."""
        width = self._model.config.text_config.hidden_size
        inputs = torch.randn(num_requests, PROMPT_TOKENS, width).to(self._dtype)
        stamps = Stamps()

        def mark(input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            stamps.mark()
            return torch.zeros(len(input_ids), dtype=torch.bool)

        start_wall_s, start_cpu_s = time.perf_counter(), time.thread_time()
        self._model.generate(
            inputs_embeds=inputs,
            attention_mask=torch.ones(inputs.shape[:2], dtype=torch.int64),
            do_sample=False,
            max_new_tokens=self._tokens,
            min_new_tokens=self._tokens,
            stopping_criteria=[mark],
        )
        return stamps.times(time.perf_counter() - start_wall_s, time.thread_time() - start_cpu_s)


def read_bytes_per_s(clock: Callable[[], float]) -> float:
    """What one pass over a large array reads with torch's threads: the fastest of five."""
    array = torch.zeros(64_000_000)
    best_s = min(_timed(array.sum, clock) for _ in range(5))
    return array.nbytes / best_s


def _timed(act: Callable[[], object], clock: Callable[[], float]) -> float:
    start_s = clock()
    act()
    return clock() - start_s


def middle(rounds: list[Times]) -> dict[str, float]:
    """The median of each time over the rounds."""
    return {name: median(asdict(each)[name] for each in rounds) for name in asdict(rounds[0])}


def main() -> None:
    """Run the comparison and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", choices=("plain", "int8"), default="plain")
    parser.add_argument("--torch-operators", action="store_true", help="without the compiled operators")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options = EngineOptions(
        dtype=arguments.dtype,
        weights=arguments.weights,
        num_threads=arguments.threads,
        compile=not arguments.torch_operators,
        kv_cache_bytes=2**31,
        prefix_cache=False,
        step_limit_s=3600,  # prompts whole, so that all requests soon decode together
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(GEOMETRIES[arguments.geometry], Path(folder))
        engine = EngineSide(Path(folder), options, arguments.tokens)
    transformers = TransformersSide(model, options.torch_dtype, arguments.tokens)
    # The output head is read in a step, the embedding, of the same size, is not.
    weight_bytes = sum(each.nbytes for each in model.model.language_model.parameters())
    rows: list[dict[str, object]] = []
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    for concurrent in arguments.concurrent:
        engine.round(concurrent)
        sides: tuple[list[Times], list[Times]] = ([], [])
        bandwidth: list[float] = []
        for _ in range(arguments.rounds):
            sides[0].append(engine.round(concurrent))
            sides[1].append(transformers.round(concurrent))
            bandwidth.append(read_bytes_per_s(clock))
        ours, theirs = middle(sides[0]), middle(sides[1])
        step = "step_cpu_s" if clock is time.thread_time else "step_wall_s"
        # Both move with the machine's other tenants: each round is compared with the reading next to it.
        over_read = median(
            getattr(times, step) / (weight_bytes / rate) for times, rate in zip(sides[0], bandwidth, strict=True)
        )
        rows.append(row(concurrent, ours, theirs, over_read))
        rows[-1]["step_over_batch_1"] = ours[step] / rows[0]["engine"][step]  # type: ignore[index]
        print(json.dumps(rows[-1]), flush=True)
    engine.close()
    form = arguments.dtype if arguments.weights == "plain" else arguments.weights
    name = f"decoder_step_{arguments.geometry}_{form}_{arguments.threads}t.json"
    report = {
        "provenance": provenance("benchmarks.decoder_step", sys.argv[1:], MEASURED),
        "arguments": vars(arguments),
        "rows": rows,
    }
    (RESULTS / name).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def row(concurrent: int, ours: dict[str, float], theirs: dict[str, float], over_read: float) -> dict[str, object]:
    """One line of the table."""
    return {
        "concurrent": concurrent,
        "engine": ours,
        "transformers": theirs,
        "step_ratio_wall": theirs["step_wall_s"] / ours["step_wall_s"],
        "step_ratio_cpu": theirs["step_cpu_s"] / ours["step_cpu_s"],
        "total_ratio_wall": theirs["total_wall_s"] / ours["total_wall_s"],
        "total_ratio_cpu": theirs["total_cpu_s"] / ours["total_cpu_s"],
        "overhead_outside_model": 1 - ours["run_cpu_s"] / ours["step_cpu_s"],
        "step_over_weight_read": over_read,
    }


if __name__ == "__main__":
    main()
