"""Prompts are the very tokens that transformers' own processor makes, and what cannot be one is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoProcessor

from python_backend.checkpoint import CheckpointFacts, CheckpointRefused
from python_backend.errors import InvalidPrompt
from python_backend.prompt import Prompt, PromptBuilder, parse_messages

BOS, IMAGE = 1, 3
IMAGE_TOKENS = 576  # (336 / 14) ** 2


@pytest.fixture(scope="module")
def builder(facts: CheckpointFacts) -> PromptBuilder:
    return PromptBuilder(facts)


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> AutoProcessor:
    return AutoProcessor.from_pretrained(checkpoint, local_files_only=True)


def expanded(prompt: Prompt) -> list[int]:
    """The tokens as the decoder sees them."""
    return [each for token in prompt.token_ids for each in [token] * (IMAGE_TOKENS if token == IMAGE else 1)]


def by_transformers(processor: AutoProcessor, text: str, num_images: int) -> list[int]:
    """The tokens that transformers' processor makes of a prompt and its images."""
    images = [Image.new("RGB", (40, 30))] * num_images or None
    return processor(images=images, text=text)["input_ids"][0]


@pytest.mark.parametrize(
    ("text", "num_images"),
    [
        ("USER: <image>\nWhat is in the picture? ASSISTANT:", 1),
        ("<image><image> two", 2),
        ("no picture at all", 0),
        ("  spaces   and\nlines\t ", 0),
        ("Zürich 北京 🙂", 0),
    ],
)
def test_a_raw_prompt_is_taken_word_for_word(
    builder: PromptBuilder, processor: AutoProcessor, text: str, num_images: int
) -> None:
    prompt = builder.build(text, None, [IMAGE_TOKENS] * num_images)

    assert prompt.text == text
    assert expanded(prompt) == by_transformers(processor, text, num_images)


@pytest.mark.parametrize("num_images", [1, 2])
def test_a_question_is_wrapped_by_the_chat_template(
    builder: PromptBuilder, processor: AutoProcessor, num_images: int
) -> None:
    content = [{"type": "image"}] * num_images + [{"type": "text", "text": "What is it?"}]
    wanted = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)

    prompt = builder.build("What is it?", None, [IMAGE_TOKENS] * num_images)

    assert prompt.text == wanted
    assert expanded(prompt) == by_transformers(processor, wanted, num_images)


CONVERSATIONS: list[tuple[list[dict[str, object]], int]] = [
    ([{"role": "user", "content": "Hello"}], 0),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], 0),
    (
        [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": "A dog."},
            {"role": "user", "content": [{"type": "text", "text": "And this?"}, {"type": "image"}]},
        ],
        2,
    ),
]


@pytest.mark.parametrize(("messages", "num_images"), CONVERSATIONS)
def test_messages_become_what_transformers_makes_of_them(
    builder: PromptBuilder, processor: AutoProcessor, messages: list[dict[str, object]], num_images: int
) -> None:
    wanted = processor.apply_chat_template(messages, add_generation_prompt=True)

    prompt = builder.build(None, json.dumps(messages), [IMAGE_TOKENS] * num_images)

    assert prompt.text == wanted
    assert expanded(prompt) == by_transformers(processor, wanted, num_images)


@pytest.mark.parametrize("text", ["hello", "<s>hello", "USER: <s> hello"])
def test_a_prompt_begins_with_one_bos(builder: PromptBuilder, text: str) -> None:
    prompt = builder.build(text, None, [])

    assert prompt.token_ids[0] == BOS
    assert prompt.token_ids[1] != BOS


def test_every_image_counts_with_all_its_tokens(builder: PromptBuilder) -> None:
    prompt = builder.build("<image> a <image>", None, [IMAGE_TOKENS] * 2)

    assert prompt.token_ids.count(IMAGE) == 2
    assert prompt.num_tokens == len(expanded(prompt)) == len(prompt.token_ids) + 2 * (IMAGE_TOKENS - 1)


NEITHER = "text_input is missing or empty; give text_input or messages"
MARKS = "the prompt has {} <image> mark(s) and the request has {} image(s); they must be as many"


@pytest.mark.parametrize(
    ("text", "messages", "num_images", "told"),
    [
        (None, None, 0, NEITHER),
        ("", None, 0, NEITHER),
        (" \n", None, 1, NEITHER),
        ("a", '[{"role": "user", "content": "a"}]', 0, "text_input and messages are both given; give one of them"),
        ("<image>", None, 0, MARKS.format(1, 0)),
        ("<image><image>", None, 1, MARKS.format(2, 1)),
        ("<image>", None, 2, MARKS.format(1, 2)),
        (None, '[{"role": "user", "content": "a"}]', 1, MARKS.format(0, 1)),
        (None, '[{"role": "user", "content": [{"type": "image"}]}]', 0, MARKS.format(1, 0)),
        (None, '[{"role": "user", "content": "say <image>"}]', 0, MARKS.format(1, 0)),
    ],
)
def test_texts_and_images_that_do_not_match_are_refused(
    builder: PromptBuilder, text: str | None, messages: str | None, num_images: int, told: str
) -> None:
    with pytest.raises(InvalidPrompt) as refused:
        builder.build(text, messages, [IMAGE_TOKENS] * num_images)
    assert refused.value.text == told


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(facts: CheckpointFacts) -> None:
    prompt = PromptBuilder(facts).build("<image> hello", None, [IMAGE_TOKENS])

    fits = PromptBuilder(replace(facts, context_tokens=prompt.num_tokens + 1))
    assert fits.build("<image> hello", None, [IMAGE_TOKENS]) == prompt
    full = PromptBuilder(replace(facts, context_tokens=prompt.num_tokens))
    with pytest.raises(InvalidPrompt) as refused:
        full.build("<image> hello", None, [IMAGE_TOKENS])
    assert refused.value.text == (
        f"the prompt has {prompt.num_tokens} tokens (576 of 1 image(s)); "
        f"the context holds {prompt.num_tokens}, at least one of them for the answer"
    )


PART = '{} must be {{"type": "text", "text": ...}} or {{"type": "image"}}'
ROLE = "messages[0].role is {}; allowed: system, user, assistant"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("{", "messages is not JSON: "),
        ("[" * 50_000, "messages is not JSON: "),
        ("{}", "messages must be a list of at least one message"),
        ("[]", "messages must be a list of at least one message"),
        ('"hello"', "messages must be a list of at least one message"),
        ('["hello"]', "messages[0] must be an object with role and content"),
        ("[null]", "messages[0] must be an object with role and content"),
        ('[{"content": "a"}]', ROLE.format("None")),
        ('[{"role": "tool", "content": "a"}]', ROLE.format("'tool'")),
        ('[{"role": ["user"], "content": "a"}]', ROLE.format("['user']")),
        ('[{"role": "user"}]', "messages[0].content must be a string or a list of parts"),
        ('[{"role": "user", "content": {}}]', "messages[0].content must be a string or a list of parts"),
        ('[{"role": "user", "content": ["a"]}]', PART.format("messages[0].content[0]")),
        ('[{"role": "user", "content": [{"type": "audio"}]}]', PART.format("messages[0].content[0]")),
        ('[{"role": "user", "content": [{"type": "text"}]}]', PART.format("messages[0].content[0]")),
        ('[{"role": "user", "content": [{"type": "text", "text": 3}]}]', PART.format("messages[0].content[0]")),
        (
            '[{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image"}, {"type": "x"}]}]',
            PART.format("messages[1].content[1]"),
        ),
    ],
)
def test_messages_of_another_form_are_refused_with_their_place(messages: str, told: str) -> None:
    with pytest.raises(InvalidPrompt) as refused:
        parse_messages(messages)
    assert refused.value.text.startswith(told)


def test_parts_lose_what_the_template_must_not_see() -> None:
    messages = '[{"role": "user", "name": "x", "content": [{"type": "image", "url": "http://x"}]}]'

    assert parse_messages(messages) == [{"role": "user", "content": [{"type": "image"}]}]


def folder_like(checkpoint: Path, target: Path) -> Path:
    """A copy of all but the weights."""
    return shutil.copytree(checkpoint, target / "copy", ignore=shutil.ignore_patterns("*.safetensors"))


def test_an_older_checkpoint_keeps_its_template_in_json(
    facts: CheckpointFacts, builder: PromptBuilder, tmp_path: Path
) -> None:
    folder = folder_like(facts.path, tmp_path)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))

    older = PromptBuilder(replace(facts, path=folder))

    assert older.build("What is it?", None, [IMAGE_TOKENS]) == builder.build("What is it?", None, [IMAGE_TOKENS])


def test_without_a_template_only_whole_prompts_are_served(facts: CheckpointFacts, tmp_path: Path) -> None:
    folder = folder_like(facts.path, tmp_path)
    (folder / "chat_template.jinja").unlink()
    bare = PromptBuilder(replace(facts, path=folder))

    assert bare.build("<image> hello", None, [IMAGE_TOKENS]).text == "<image> hello"
    with pytest.raises(InvalidPrompt) as refused:
        bare.build("hello", None, [IMAGE_TOKENS])
    assert refused.value.text == "this checkpoint has no chat template; give the whole prompt in text_input"


def test_what_the_template_refuses_is_told(facts: CheckpointFacts, tmp_path: Path) -> None:
    folder = folder_like(facts.path, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    strict = PromptBuilder(replace(facts, path=folder))

    with pytest.raises(InvalidPrompt) as refused:
        strict.build(None, '[{"role": "user", "content": "a"}]', [])
    assert refused.value.text == "the checkpoint's chat template refuses these messages: roles must alternate"


def test_a_folder_without_a_tokenizer_is_refused(facts: CheckpointFacts, tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused) as refused:
        PromptBuilder(replace(facts, path=tmp_path))
    assert str(refused.value).startswith(f"checkpoint {tmp_path}: its tokenizer cannot be read: ")
