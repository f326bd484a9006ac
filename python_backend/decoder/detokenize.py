"""Token ids to text, as they come: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from python_backend.weights import BadCheckpoint

REPLACEMENT = "\ufffd"  # what a decoder gives for bytes that are not (yet) a character


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer in `checkpoint`/tokenizer.json.

    Raises:
        BadCheckpoint: the file is missing or broken.
    """
    path = checkpoint / "tokenizer.json"
    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path}: not a tokenizer: {error}") from error


class CharacterStream:
    """The text of a growing list of tokens; all parts joined are the tokenizer's text of all tokens.

    Tokens have no text of their own: a space at the front depends on what stands before, and a character may
    be spread over several tokens. So a short window is decoded anew each time:

        ids   . . . . . . . │ c c c │ n n n
                            start   read      `c` gives the context, `n` is not wholly given out yet
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._read = 0  # tokens of the window that are context
        self._num_given = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """The text that became certain by one more token."""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if certain == text and self._decode(self._window[self._read :]):
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._num_given = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as replacement characters."""
        text = self._decode(self._window)
        new = text[self._num_given :]
        self._num_given = len(text)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class TextStream:
    """The text of one answer up to its stop string.

    Text that could be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], include_stop: bool, skip_special_tokens: bool
    ) -> None:
        self._characters = CharacterStream(tokenizer, skip_special_tokens)
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""
        self.is_stopped = False  # a stop string was found; everything after it is dropped

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """The text to give out after one more token; unless `may_stop`, no stop string is looked for."""
        assert not self.is_stopped, "a token after the stop string"
        text = self._characters.push(token_id)
        if not may_stop:
            return text
        return self._give(text)

    def flush(self) -> str:
        """The rest of the text, when the answer ends for another reason than a stop string."""
        if self.is_stopped:
            return ""
        text = self._give(self._characters.flush())
        rest, self._held = self._held, ""
        return text + rest

    def _give(self, text: str) -> str:
        text = self._held + text
        found = first_stop(text, self._stop)
        if found is not None:
            start, stop = found
            self.is_stopped = True
            self._held = ""
            return text[: start + len(stop)] if self._include_stop else text[:start]
        certain = len(text) - num_held(text, self._stop)
        self._held = text[certain:]
        return text[:certain]


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first complete stop string begins, and which it is: of two, the one that ends first."""
    found = [(text.index(string) + len(string), string) for string in stop if string in text]
    if not found:
        return None
    end, string = min(found, key=lambda item: (item[0], -len(item[1])))
    return end - len(string), string


def num_held(text: str, stop: tuple[str, ...]) -> int:
    """Characters at the end of `text` that a stop string may begin with."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
