"""Text, messages and images to the token ids of a prompt, by the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from python_backend.checkpoint import CheckpointFacts, CheckpointRefused
from python_backend.errors import InvalidPrompt
from python_backend.images import upright_size

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the decoder takes it."""

    text: str
    token_ids: tuple[int, ...]  # one image token per image
    num_tokens: int  # with every image token expanded to its image's features


class PromptBuilder:
    """Builds prompts for one checkpoint. Safe to use from several threads."""

    def __init__(self, facts: CheckpointFacts) -> None:
        from transformers import AutoTokenizer  # seconds to import: only where needed

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(facts.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointRefused(f"checkpoint {facts.path}: its tokenizer cannot be read: {error}") from error
        self._facts = facts
        self._mark = str(self._tokenizer.convert_ids_to_tokens(facts.image_token_id))
        self._template = self._tokenizer.chat_template or _template_file(facts.path)

    @property
    def image_token_id(self) -> int:
        """The token that stands for an image."""
        return self._facts.image_token_id

    def count_image_tokens(self, images: Sequence[bytes]) -> tuple[int, ...]:
        """The tokens of each image in the prompt.

        Raises:
            InvalidImage: its size cannot be read.
        """
        grid = self._facts.grid
        if grid is None:
            return (self._facts.image_tokens,) * len(images)
        return tuple(grid.num_tokens(*upright_size(image)) for image in images)

    def build(self, text: str | None, messages: str | None, image_tokens: Sequence[int]) -> Prompt:
        """The prompt of a request with images, whose numbers of tokens are given.

        `text` with image marks or without images is taken word for word; with images and no mark it is a
        question. `messages` is a JSON list in the chat format.

        Raises:
            InvalidPrompt: neither or both given, malformed messages, a number of marks other than
                that of the images, or more tokens than the context holds.
        """
        if messages is not None and text is not None:
            raise InvalidPrompt("text_input and messages are both given; give one of them")
        if messages is not None:
            rendered = self._render(parse_messages(messages))
        elif text is None or not text.strip():
            raise InvalidPrompt("text_input is missing or empty; give text_input or messages")
        elif image_tokens and self._mark not in text:
            parts = [{"type": "image"}] * len(image_tokens) + [{"type": "text", "text": text}]
            rendered = self._render([{"role": "user", "content": parts}])
        else:
            rendered = text
        return self._tokenize(rendered, image_tokens)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if self._template is None:
            raise InvalidPrompt("this checkpoint has no chat template; give the whole prompt in text_input")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
                )
            )
        except jinja2.TemplateError as error:
            raise InvalidPrompt(f"the checkpoint's chat template refuses these messages: {error}") from error

    def _tokenize(self, text: str, image_tokens: Sequence[int]) -> Prompt:
        begins = bool(self._tokenizer.bos_token) and text.startswith(self._tokenizer.bos_token)
        token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=not begins))
        marks = token_ids.count(self._facts.image_token_id)
        if marks != len(image_tokens):
            raise InvalidPrompt(
                f"the prompt has {marks} {self._mark} mark(s) and the request has {len(image_tokens)} image(s); "
                "they must be as many"
            )
        num_tokens = len(token_ids) + sum(image_tokens) - len(image_tokens)
        if num_tokens >= self._facts.context_tokens:
            raise InvalidPrompt(
                f"the prompt has {num_tokens} tokens ({sum(image_tokens)} of {len(image_tokens)} image(s)); "
                f"the context holds {self._facts.context_tokens}, at least one of them for the answer"
            )
        return Prompt(text, token_ids, num_tokens)


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Chat messages from JSON, each content a list of `text` and `image` parts.

    Raises:
        InvalidPrompt: not JSON, or not of that form; the message says which message and why.
    """
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter for a thousand brackets
        raise InvalidPrompt(f"messages is not JSON: {error}") from error
    if not isinstance(messages, list) or not messages:
        raise InvalidPrompt("messages must be a list of at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidPrompt(f"messages[{index}] must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise InvalidPrompt(f"messages[{index}].role is {role!r}; allowed: {', '.join(_ROLES)}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidPrompt(f"messages[{index}].content must be a string or a list of parts")
    return {"role": role, "content": [_part(f"messages[{index}].content[{n}]", p) for n, p in enumerate(content)]}


def _part(where: str, part: object) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image":
        return {"type": "image"}
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise InvalidPrompt(f'{where} must be {{"type": "text", "text": ...}} or {{"type": "image"}}')


def _template_file(checkpoint: Path) -> str | None:
    """The template that older checkpoints keep in a JSON file of its own."""
    path = checkpoint / "chat_template.json"
    return str(json.loads(path.read_text())["chat_template"]) if path.is_file() else None
