"""Answers in OpenAI's words: whole ones, chunks of a stream, and log-probabilities. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from client.answer import Alternative, Answer, Chunk

Json = dict[str, object]
Token = tuple[Alternative, ...]  # the chosen token first, then the likeliest


def usage(answer: Answer) -> Json:
    """The counts; an image counts with all its tokens."""
    read, written = answer.num_input_tokens, answer.num_output_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Wording(Protocol):
    """One request's answer in the words of its endpoint; owned by that request."""

    def opening(self) -> Json | None:
        """The first chunk of a stream, where the endpoint has one that says nothing yet."""

    def chunk(self, chunk: Chunk) -> Json:
        """A chunk of a stream."""

    def counts(self, answer: Answer) -> Json:
        """The chunk with the counts, after all others."""

    def whole(self, answer: Answer) -> Json:
        """The answer to a request that does not stream."""


@dataclass(slots=True)
class ChatWording:
    """`/v1/chat/completions`. `num_top` None: no log-probabilities."""

    id: str
    created: int
    model: str
    num_top: int | None
    includes_usage: bool

    def opening(self) -> Json | None:
        """The assistant's name, before its first word."""
        return self._chunk({"role": "assistant", "content": ""}, None, ())

    def chunk(self, chunk: Chunk) -> Json:
        """The words since the last chunk."""
        return self._chunk({"content": chunk.text}, chunk.finish_reason, chunk.logprobs)

    def counts(self, answer: Answer) -> Json:
        """The counts, with no choice beside them."""
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage(answer)}

    def whole(self, answer: Answer) -> Json:
        """The whole message."""
        choice: Json = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }
        return self._head("chat.completion") | {"choices": [choice], "usage": usage(answer)}

    def _chunk(self, delta: Json, finish_reason: str | None, tokens: tuple[Token, ...]) -> Json:
        logprobs = self._logprobs(tokens) if tokens else None
        choice: Json = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        counts: Json = {"usage": None} if self.includes_usage else {}
        return self._head("chat.completion.chunk") | {"choices": [choice]} | counts

    def _head(self, kind: str) -> Json:
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, tokens: tuple[Token, ...]) -> Json | None:
        if self.num_top is None:
            return None
        content = [
            _entry(token[0]) | {"top_logprobs": [_entry(each) for each in _top(token, self.num_top)]}
            for token in tokens
            if token
        ]
        return {"content": content, "refusal": None}


@dataclass(slots=True)
class TextWording:
    """`/v1/completions`. `num_top` None: no log-probabilities."""

    id: str
    created: int
    model: str
    num_top: int | None
    includes_usage: bool
    num_characters: int = field(default=0)  # said so far, for the places of tokens

    def opening(self) -> Json | None:
        """Nothing: a text has no role."""
        return None

    def chunk(self, chunk: Chunk) -> Json:
        """The text since the last chunk."""
        counts: Json = {"usage": None} if self.includes_usage else {}
        return self._head() | {"choices": [self._choice(chunk.text, chunk.finish_reason, chunk.logprobs)]} | counts

    def counts(self, answer: Answer) -> Json:
        """The counts, with no choice beside them."""
        return self._head() | {"choices": [], "usage": usage(answer)}

    def whole(self, answer: Answer) -> Json:
        """The whole text."""
        choice = self._choice(answer.text, answer.finish_reason, answer.logprobs)
        return self._head() | {"choices": [choice], "usage": usage(answer)}

    def _choice(self, text: str, finish_reason: str | None, tokens: tuple[Token, ...]) -> Json:
        return {"index": 0, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": finish_reason}

    def _head(self) -> Json:
        return {"id": f"cmpl-{self.id}", "object": "text_completion", "created": self.created, "model": self.model}

    def _logprobs(self, tokens: tuple[Token, ...]) -> Json | None:
        if self.num_top is None:
            return None
        offsets = []
        chosen = [token[0] for token in tokens if token]
        for each in chosen:
            offsets.append(self.num_characters)
            self.num_characters += len(each.text)
        return {
            "tokens": [each.text for each in chosen],
            "token_logprobs": [each.logprob for each in chosen],
            "top_logprobs": [
                {each.text: each.logprob for each in _top(token, self.num_top)} for token in tokens if token
            ],
            "text_offset": offsets,
        }


def _top(token: Token, num_top: int) -> list[Alternative]:
    return sorted((each for each in token if each.rank <= num_top), key=lambda each: each.rank)


def _entry(token: Alternative) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}
