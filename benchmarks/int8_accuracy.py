"""What bfloat16 and int8 weights cost in answers: the shipped checkpoint on held-out pictures, through the engine.

    python -m benchmarks.int8_accuracy --pictures 200

Every form answers the same questions greedily from the same float32 features. `exact` counts the right answers, `same`
the questions whose tokens are all those of float32, and `logprob` is the mean difference of the log-probability of the
tokens that both gave, from float32's.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch

from benchmarks.provenance import provenance
from demo.evaluate import EVALUATION_SEED, Answerer, Case, picture_cases
from python_backend.decoder.engine import DecodeRequest, Delta, Engine, EngineOptions, ImageEmbedding
from python_backend.request import SamplingParameters

MEASURED = ("python_backend/decoder", "demo/checkpoint", "benchmarks/int8_accuracy.py")
RESULT = Path(__file__).with_name("results") / "int8_accuracy.json"
FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32": {"dtype": "float32", "weights": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "weights": "int8"},
}
MAX_TOKENS = 48


@dataclass(frozen=True)
class Answer:
    """What a form answered to one question."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def requests_of(answerer: Answerer, cases: list[Case]) -> list[DecodeRequest]:
    """The questions with their pictures' features, as the decoder takes them."""
    image_id = answerer.model.config.image_token_id
    found = []
    for index, case in enumerate(cases):
        inputs = answerer.processor(images=[case.image], text=[answerer._prompt(case)], return_tensors="pt")
        with torch.inference_mode():
            rows = answerer.model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output[0]
        expanded = inputs["input_ids"][0].tolist()
        first = expanded.index(image_id)
        ids = (*expanded[: first + 1], *(each for each in expanded[first:] if each != image_id))
        sampling = SamplingParameters(max_tokens=MAX_TOKENS, logprobs=0)
        image = ImageEmbedding(str(index).encode(), rows.clone())
        found.append(DecodeRequest(str(index), ids, (image,), sampling))
    return found


def answers_of(checkpoint: Path, form: dict[str, str], requests: list[DecodeRequest], threads: int) -> list[Answer]:
    """All answers of one engine."""
    options = EngineOptions(num_threads=threads, max_waiting=len(requests), **form)  # type: ignore[arg-type]
    engine = Engine.load(checkpoint, options, time.monotonic)
    deltas: list[list[Delta]] = [[] for _ in requests]
    left = threading.Semaphore(0)

    def receive(index: int, delta: Delta) -> None:
        deltas[index].append(delta)
        if delta.is_final:
            left.release()

    engine.start()
    for index, request in enumerate(requests):
        engine.submit(request, lambda delta, index=index: receive(index, delta))  # type: ignore[misc]
    for _ in requests:
        left.acquire()
    engine.close()
    return [
        Answer(
            "".join(delta.text for delta in each).strip(),
            tuple(token for delta in each for token in delta.token_ids),
            tuple(item.logprob for delta in each for item in delta.logprobs),
        )
        for each in deltas
    ]


def row(found: list[Answer], reference: list[Answer], cases: list[Case]) -> dict[str, float]:
    """One line of the table."""
    differences = [
        abs(mine - theirs)
        for one, other in zip(found, reference, strict=True)
        for mine, theirs, token, wanted in zip(
            one.logprobs, other.logprobs, one.token_ids, other.token_ids, strict=False
        )
        if token == wanted
    ]
    return {
        "asked": len(cases),
        "exact": sum(each.text == case.question.answer for each, case in zip(found, cases, strict=True)),
        "same": sum(one.token_ids == other.token_ids for one, other in zip(found, reference, strict=True)),
        "logprob": mean(differences),
    }


def main() -> None:
    """Measure all forms and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("demo/checkpoint"))
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = picture_cases(arguments.pictures, EVALUATION_SEED)
    requests = requests_of(Answerer(arguments.checkpoint), cases)
    found = {name: answers_of(arguments.checkpoint, form, requests, arguments.threads) for name, form in FORMS.items()}
    rows = {name: row(answers, found["float32"], cases) for name, answers in found.items()}
    print(json.dumps(rows, indent=2))
    report = {"provenance": provenance("benchmarks.int8_accuracy", sys.argv[1:], MEASURED), "rows": rows}
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
