"""What clients may send, as OpenAI's and vLLM's fields; unknown ones are ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_STOPS = 16
MAX_INT32 = 2**31 - 1


def _is_unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode text") from None
    return text


Text = Annotated[str, AfterValidator(_is_unicode)]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
AtLeastOne = Annotated[int, Field(ge=1, le=MAX_INT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_is_unicode)]


class Body(BaseModel):
    """What all of them share. A null is the same as nothing."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    """`include_usage`: one more chunk with the counts, before `[DONE]`."""

    include_usage: bool | None = None


class ResponseFormat(Body):
    """Only text can be asked for."""

    type: str


class CompletionBody(Body):
    """The fields that chat and text completions have in common."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None


class TextPart(Body):
    """Words."""

    type: Literal["text"]
    text: Text


class ImageUrl(Body):
    """Where the image is: in a `data:` URI."""

    url: str


class ImagePart(Body):
    """An image, at its place between the words."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(Body):
    """One turn. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]


class ChatBody(CompletionBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[object] | None = None
    functions: list[object] | None = None
    modalities: list[str] | None = None


class TextBody(CompletionBody):
    """POST /v1/completions: a raw prompt, word for word, without a chat template."""

    prompt: Text | Annotated[list[Text], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None


def describe(errors: list[dict[str, object]]) -> tuple[str, str | None]:
    """The first error in one line, and the field it is about; of several branches the one that went deepest.

    `errors` are pydantic's; the value that was sent is not repeated: it may be an image.
    """
    places = [_place(error) for error in errors]
    depth = max(len(place) for place in places)
    place, error = next((p, e) for p, e in zip(places, errors, strict=True) if len(p) == depth)
    message = str(error["msg"])
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {_context(error)}", None
    if not place:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    return f"{'.'.join(place)}: {message}", place[0]


def _place(error: dict[str, object]) -> list[str]:
    """Where in the body; without pydantic's own names of the branches of a union."""
    location = error["loc"]
    assert isinstance(location, tuple)
    if error["type"] == "json_invalid":
        return []
    return [str(step) for step in location[1:] if isinstance(step, int) or str(step) in _FIELDS]


def _context(error: dict[str, object]) -> object:
    context = error.get("ctx")
    return context.get("error", "") if isinstance(context, dict) else ""


_FIELDS = {
    name
    for kind in (ChatBody, TextBody, ChatMessage, TextPart, ImagePart, ImageUrl, StreamOptions, ResponseFormat)
    for name in kind.model_fields
}
