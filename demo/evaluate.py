"""Measures a checkpoint: `python -m demo.evaluate --checkpoint demo/checkpoint --pictures 200`."""

import argparse
import logging
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoProcessor, LlavaForConditionalGeneration, ProcessorMixin

from demo.architecture import load_model
from demo.pictures import draw_scene, photograph
from demo.questions import PICTURE_KINDS, TEXT_KIND, Question, ask, text_questions

EVALUATION_SEED = 2_000_003  # no seed of the training's
LONGEST_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Case:
    """A question about a picture, or about none."""

    question: Question
    image: Image.Image | None


@dataclass(frozen=True, slots=True)
class Result:
    """What the model answered."""

    question: Question
    answer: str

    @property
    def is_right(self) -> bool:
        """Whether the answer is exactly the expected one."""
        return self.answer == self.question.answer


class Answerer:
    """A checkpoint that answers greedily in float32, with every image token."""

    def __init__(self, checkpoint: Path) -> None:
        """Loads the model and its processor from a folder."""
        self.model: LlavaForConditionalGeneration = load_model(checkpoint)
        self.processor: ProcessorMixin = AutoProcessor.from_pretrained(checkpoint)
        self.processor.tokenizer.padding_side = "left"

    def _prompt(self, case: Case) -> str:
        parts = [{"type": "text", "text": case.question.text}]
        if case.image is not None:
            parts.insert(0, {"type": "image"})
        message = [{"role": "user", "content": parts}]
        return str(self.processor.apply_chat_template(message, add_generation_prompt=True))

    @torch.inference_mode()
    def answer(self, cases: list[Case]) -> list[Result]:
        """One result per case; either every case has a picture or none has."""
        images = [case.image for case in cases if case.image is not None]
        if images and len(images) != len(cases):
            raise ValueError(f"{len(images)} pictures for {len(cases)} questions: all must have one, or none")
        inputs = self.processor(
            images=images or None,
            text=[self._prompt(case) for case in cases],
            padding=True,
            return_tensors="pt",
        )
        tokens = self.model.generate(**inputs, max_new_tokens=LONGEST_ANSWER_TOKENS, do_sample=False)
        answers = self.processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [Result(case.question, answer.strip()) for case, answer in zip(cases, answers, strict=True)]


def picture_cases(num_pictures: int, seed: int) -> list[Case]:
    """Held-out pictures as JPEG files show them, with one question of each kind they allow."""
    chance = random.Random(seed)
    cases = []
    for _ in range(num_pictures):
        scene = draw_scene(chance)
        image = photograph(scene, chance)
        cases += [Case(question, image) for question in ask(scene, chance)]
    return cases


def text_cases() -> list[Case]:
    """Every question that needs no picture."""
    return [Case(question, None) for question in text_questions()]


def table(results: list[Result]) -> str:
    """Exact answers by kind of question, one line each."""
    asked = Counter(result.question.kind for result in results)
    right = Counter(result.question.kind for result in results if result.is_right)
    on_pictures = [result for result in results if result.question.kind != TEXT_KIND]
    lines = [f"{'kind':<16} {'asked':>6} {'right':>6} {'exact':>6}"]
    rows = [(kind, asked[kind], right[kind]) for kind in (*PICTURE_KINDS, TEXT_KIND) if asked[kind]]
    rows.append(("all on pictures", len(on_pictures), sum(result.is_right for result in on_pictures)))
    rows.append(("all", len(results), sum(result.is_right for result in results)))
    lines += [f"{name:<16} {total:>6} {good:>6} {good / max(1, total):>6.3f}" for name, total, good in rows]
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("demo/checkpoint"))
    parser.add_argument("--pictures", type=int, default=200, help="held-out pictures; each is asked 4 to 6 times")
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED)
    parser.add_argument("--batch", type=int, default=16, help="questions at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-wrong", action="store_true", help="log every wrong answer")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    answerer = Answerer(args.checkpoint)
    results: list[Result] = []
    for cases in (picture_cases(args.pictures, args.seed), text_cases()):
        for start in tqdm(range(0, len(cases), args.batch), desc="answering"):
            results += answerer.answer(cases[start : start + args.batch])
    for result in results:
        if args.show_wrong and not result.is_right:
            logging.info("%s -> %r, not %r", result.question.text, result.answer, result.question.answer)
    print(table(results))


if __name__ == "__main__":
    main()
