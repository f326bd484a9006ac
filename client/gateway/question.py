"""From a client's body to what the server is asked. Pure: no I/O, nothing kept."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

from client.gateway.bodies import ChatBody, ChatMessage, CompletionBody, ImagePart, TextBody
from client.gateway.failure import Refused, no_model
from client.gateway.settings import MIB, Settings
from client.request import Message, Options

LEAST_TOP_P = 1e-9  # the server's lowest; OpenAI allows 0, which means the same


@dataclass(frozen=True, slots=True)
class Question:
    """One request to the server; exactly one of `text` (a raw prompt) and `messages` is set."""

    text: str | None
    messages: tuple[Message, ...] | None
    images: tuple[bytes, ...]
    options: Options
    is_streaming: bool
    includes_usage: bool
    num_top_logprobs: int | None  # None: no log-probabilities


def addresses_in(body: ChatBody, settings: Settings) -> list[tuple[str, str]]:
    """The images that a chat body only has an address of: the place in the body, and the address.

    Raises:
        Refused: too many images.
    """
    images = [
        (f"messages.{index}.content.{place}.image_url", part)
        for index, message in enumerate(body.messages)
        if not isinstance(message.content, str)
        for place, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]
    if len(images) > settings.max_images:
        raise _too_many(settings)
    return [(where, _uri(part)) for where, part in images if _is_address(_uri(part))]


def question_from_chat(body: ChatBody, settings: Settings, fetched: Mapping[str, bytes] | None = None) -> Question:
    """The question in a chat body; `fetched` has the images behind its addresses.

    Raises:
        Refused: something that this server does not have, or an image that is none.
    """
    _check(body, settings)
    if body.tools or body.functions:
        raise Refused("tools are not supported: the model cannot call functions", "tools")
    if body.modalities is not None and any(kind != "text" for kind in body.modalities):
        raise Refused("modalities: the answer is text only", "modalities")
    if body.top_logprobs and not body.logprobs:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    images: list[bytes] = []
    messages = tuple(
        _message(index, message, images, settings, fetched or {}) for index, message in enumerate(body.messages)
    )
    options = _options(body, settings)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    return _question(body, None, messages, tuple(images), options, num_top)


def question_from_text(body: TextBody, settings: Settings) -> Question:
    """The question in a text completion's body; raises as `question_from_chat`."""
    _check(body, settings)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(prompts) != 1:
        raise Refused(f"prompt: one prompt per request, not {len(prompts)}", "prompt")
    if not prompts[0].strip():
        raise Refused("prompt is empty", "prompt")
    if body.echo:
        raise Refused("echo is not supported", "echo")
    if body.suffix:
        raise Refused("suffix is not supported", "suffix")
    options = _options(body, settings)
    options["raw"] = True
    if body.max_tokens is not None:
        options["max_tokens"] = body.max_tokens
    return _question(body, prompts[0], None, (), options, body.logprobs)


def _question(
    body: CompletionBody,
    text: str | None,
    messages: tuple[Message, ...] | None,
    images: tuple[bytes, ...],
    options: Options,
    num_top: int | None,
) -> Question:
    if num_top is not None:
        options["logprobs"] = num_top
    if options.get("min_tokens", 0) > options.get("max_tokens", options.get("min_tokens", 0)):
        raise Refused("min_tokens is above max_tokens", "min_tokens")
    is_streaming = bool(body.stream)
    includes_usage = is_streaming and body.stream_options is not None and bool(body.stream_options.include_usage)
    return Question(text, messages, images, options, is_streaming, includes_usage, num_top)


def _check(body: CompletionBody, settings: Settings) -> None:
    """Refuses what would else be silently left out of the answer."""
    if body.model is not None and body.model != settings.model:
        raise no_model(body.model, settings.model)
    for name, value in (("n", body.n), ("best_of", body.best_of)):
        if value not in (None, 1):
            raise Refused(f"{name} must be 1, not {value}", name)
    if body.logit_bias:
        raise Refused("logit_bias is not supported", "logit_bias")
    if body.response_format is not None and body.response_format.type != "text":
        raise Refused("response_format: only text is supported", "response_format")


def _options(body: CompletionBody, settings: Settings) -> Options:
    """What the server is asked for beside the question; what was not given is its own default."""
    options: Options = {
        "return_decision": True,
        "priority": body.priority or 0,
        "deadline_s": settings.deadline_s if body.deadline_ms is None else body.deadline_ms / 1000,
    }
    if body.min_tokens is not None:
        options["min_tokens"] = body.min_tokens
    if body.temperature is not None:
        options["temperature"] = body.temperature
    if body.top_p is not None:
        options["top_p"] = max(body.top_p, LEAST_TOP_P)
    if body.top_k is not None:
        options["top_k"] = body.top_k
    if body.min_p is not None:
        options["min_p"] = body.min_p
    if body.seed is not None:
        options["seed"] = body.seed
    if body.stop:
        options["stop"] = body.stop
    if body.stop_token_ids:
        options["stop_token_ids"] = body.stop_token_ids
    return options | _penalties(body) | _flags(body)


def _penalties(body: CompletionBody) -> Options:
    options: Options = {}
    if body.presence_penalty is not None:
        options["presence_penalty"] = body.presence_penalty
    if body.frequency_penalty is not None:
        options["frequency_penalty"] = body.frequency_penalty
    if body.repetition_penalty is not None:
        options["repetition_penalty"] = body.repetition_penalty
    return options


def _flags(body: CompletionBody) -> Options:
    options: Options = {}
    if body.ignore_eos is not None:
        options["ignore_eos"] = body.ignore_eos
    if body.skip_special_tokens is not None:
        options["skip_special_tokens"] = body.skip_special_tokens
    if body.include_stop_str_in_output is not None:
        options["include_stop_str_in_output"] = body.include_stop_str_in_output
    return options


def _message(
    index: int, message: ChatMessage, images: list[bytes], settings: Settings, fetched: Mapping[str, bytes]
) -> Message:
    """The server's form of a message; adds its images to `images`, in order."""
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    parts: list[dict[str, str]] = []
    for place, part in enumerate(message.content):
        if isinstance(part, ImagePart):
            if len(images) == settings.max_images:
                raise _too_many(settings)
            where = f"messages.{index}.content.{place}.image_url"
            images.append(fetched.get(_uri(part)) or _image(where, _uri(part), settings))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": role, "content": parts}


def _too_many(settings: Settings) -> Refused:
    return Refused(f"too many images; at most {settings.max_images} are allowed", "messages")


def _uri(part: ImagePart) -> str:
    return part.image_url if isinstance(part.image_url, str) else part.image_url.url


def _is_address(uri: str) -> bool:
    return uri[:8].lower().startswith(("http:", "https:"))


def _image(where: str, uri: str, settings: Settings) -> bytes:
    """The file in a `data:` URI."""
    if _is_address(uri):
        raise Refused(f"{where}: image addresses are not fetched; send the image as a data: URI", "messages")
    head, comma, data = uri.partition(",")
    if not uri[:5].lower() == "data:" or not comma or not head.lower().endswith(";base64"):
        raise Refused(f"{where}: must be a data: URI, data:image/jpeg;base64,...", "messages")
    if len(data) * 3 // 4 > settings.max_image_mib * MIB + 3:
        size = f"{len(data) * 3 / 4 / MIB:.1f} MiB"
        raise Refused(
            f"{where}: the image has {size}; at most {settings.max_image_mib} are allowed", "messages", status=413
        )
    try:
        image = base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(f"{where}: not base64: {error}", "messages") from None
    if not image:
        raise Refused(f"{where}: the image is empty", "messages")
    return image
