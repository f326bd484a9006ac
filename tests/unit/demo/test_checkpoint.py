"""The shipped checkpoint: loads whole, stays small, and answers right."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlavaForConditionalGeneration

from demo.evaluate import Answerer, Case, Result, picture_cases, text_cases
from demo.pictures import from_jpeg
from demo.questions import CAPTION_WORDINGS, Question, caption
from demo.shipped_picture import SCENE

DEMO = Path(__file__).parents[3] / "demo"
CHECKPOINT = DEMO / "checkpoint"
SAMPLE_SEED = 3_000_017
HUB_NAMES = re.compile(
    r"vision_tower\.vision_model\.|language_model\.(model|lm_head)\.|multi_modal_projector\.linear_[12]\."
)


@pytest.fixture(scope="module")
def answerer() -> Iterator[Answerer]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Answerer(CHECKPOINT)
    torch.set_num_threads(threads)


def _right(results: list[Result]) -> int:
    return sum(result.is_right for result in results)


def test_it_loads_with_no_missing_and_no_unexpected_names() -> None:
    _, info = LlavaForConditionalGeneration.from_pretrained(CHECKPOINT, output_loading_info=True)

    assert {name: list(found) for name, found in info.items()} == {
        "missing_keys": [],
        "unexpected_keys": [],
        "mismatched_keys": [],
        "error_msgs": [],
    }


def test_the_folder_is_at_most_12_mb() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 12_000_000


def test_weights_are_float16_under_the_hubs_names() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        dtypes = {weights.get_tensor(name).dtype for name in names}

    assert [name for name in names if not HUB_NAMES.match(name)] == []
    assert dtypes == {torch.float16}


def test_its_geometry_is_llava_1_5s() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())

    assert config["vision_config"]["image_size"] == 336
    assert config["vision_config"]["patch_size"] == 14
    assert config["image_seq_length"] == 576
    assert config["vision_feature_layer"] == -2
    assert config["vision_feature_select_strategy"] == "default"
    assert config["projector_hidden_act"] == "gelu"


@pytest.mark.parametrize("text", ["Zürich, 北京 42\n\tok", "<b>&amp;</b> 🙂", " leading and trailing ", "x" * 50])
def test_any_text_has_tokens_that_give_it_back(answerer: Answerer, text: str) -> None:
    tokenizer = answerer.processor.tokenizer

    tokens = tokenizer.encode(text)

    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_an_image_becomes_576_tokens(answerer: Answerer) -> None:
    image = from_jpeg((DEMO / "picture.jpg").read_bytes())

    inputs = answerer.processor(images=image, text="USER: <image>\nWhat? ASSISTANT:", return_tensors="pt")

    assert int((inputs["input_ids"] == 3).sum()) == 576
    assert tuple(inputs["pixel_values"].shape) == (1, 3, 336, 336)


IMAGE = {"type": "image"}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CONVERSATIONS = [
    ([{"role": "user", "content": "Who are you?"}], "USER: Who are you? ASSISTANT:"),
    (
        [{"role": "user", "content": [_text("What is it?"), IMAGE]}],
        "USER: <image>\nWhat is it? ASSISTANT:",
    ),
    (
        [{"role": "user", "content": [IMAGE, IMAGE, _text("Same?")]}],
        "USER: <image>\n<image>\nSame? ASSISTANT:",
    ),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [IMAGE, _text("What is it?")]},
            {"role": "assistant", "content": [_text("a red circle")]},
            {"role": "user", "content": "Where?"},
        ],
        "Be brief. USER: <image>\nWhat is it? ASSISTANT: a red circle</s>USER: Where? ASSISTANT:",
    ),
]


@pytest.mark.parametrize(("messages", "prompt"), CONVERSATIONS)
def test_the_chat_template_renders(answerer: Answerer, messages: list[dict[str, object]], prompt: str) -> None:
    assert answerer.processor.apply_chat_template(messages, add_generation_prompt=True) == prompt
    assert (
        answerer.processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == prompt
    )


def test_it_answers_the_shipped_picture_right(answerer: Answerer) -> None:
    image = from_jpeg((DEMO / "picture.jpg").read_bytes())
    cases = [Case(Question("caption", text, caption(SCENE)), image) for text in CAPTION_WORDINGS]

    results = answerer.answer(cases)

    assert [result.answer for result in results] == ["a red circle to the left of a blue square"] * 3


def test_it_answers_held_out_pictures_right(answerer: Answerer) -> None:
    cases = picture_cases(8, SAMPLE_SEED)[:24]

    results = [result for i in (0, 8, 16) for result in answerer.answer(cases[i : i + 8])]

    assert len(results) == 24
    assert _right(results) >= 0.95 * len(results)


def test_it_answers_questions_without_a_picture_right(answerer: Answerer) -> None:
    results = answerer.answer(text_cases())

    assert [result.answer for result in results] == [result.question.answer for result in results]
