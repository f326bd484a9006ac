"""Text comes in whole characters, all of it, and stops where it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from python_backend.decoder.detokenize import CharacterStream, TextStream, load_tokenizer
from python_backend.weights import BadCheckpoint
from tests.unit.decoder.conftest import BOS, EOS, byte_tokenizer

BYTES = byte_tokenizer()


def llama_tokenizer() -> Tokenizer:
    """Words with a space before them, and bytes for all else, as Llama's."""
    pieces = ["<unk>", "<s>", "</s>", "▁the", "▁cat", "s", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


LLAMA = llama_tokenizer()


def byte_ids(text: str) -> list[int]:
    return BYTES.encode(text).ids


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    stream = CharacterStream(tokenizer, skip_special_tokens=True)
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@given(st.text(max_size=20))
def test_characters_come_whole_and_as_soon_as_they_can(text: str) -> None:
    given_out = pieces(BYTES, byte_ids(text))

    assert "".join(given_out) == text
    ends = [character for character in text for _ in range(len(character.encode()))]
    assert all(piece in ("", character) for piece, character in zip(given_out, ends, strict=False))


@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=30))
def test_any_bytes_join_to_the_tokenizers_text(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTES, token_ids)) == BYTES.decode(token_ids)


@given(
    st.lists(
        st.one_of(
            st.sampled_from([[1], [2], [3], [4], [5], [6]]),
            st.characters(exclude_categories=["Cs"]).map(lambda each: [7 + byte for byte in each.encode()]),
        ),
        max_size=12,
    )
)
def test_words_bytes_and_special_tokens_join_to_the_tokenizers_text(groups: list[list[int]]) -> None:
    token_ids = [token_id for group in groups for token_id in group]

    assert "".join(pieces(LLAMA, token_ids)) == LLAMA.decode(token_ids)


def test_the_space_before_a_word_survives_a_special_token() -> None:
    assert pieces(LLAMA, [3, 1, 4, 5]) == ["the", "", " cat", "s", ""]


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    assert pieces(BYTES, byte_ids("aé")[:2]) == ["a", "", "\ufffd"]


def test_special_tokens_show_when_asked_for() -> None:
    stream = CharacterStream(BYTES, skip_special_tokens=False)

    assert [stream.push(token_id) for token_id in (BOS, EOS)] == ["<s>", "</s>"]


def stopped(text: str, stop: tuple[str, ...], include: bool = False) -> tuple[list[str], bool]:
    stream = TextStream(BYTES, stop, include, skip_special_tokens=True)
    given_out: list[str] = []
    for token_id in byte_ids(text):
        given_out.append(stream.push(token_id))
        if stream.is_stopped:
            return given_out, True
    return [*given_out, stream.flush()], stream.is_stopped


@pytest.mark.parametrize(
    ("text", "stop", "include", "expected"),
    [
        ("ab STOP cd", ("STOP",), False, "ab "),
        ("ab STOP cd", ("STOP",), True, "ab STOP"),
        ("ab STO", ("STOP",), False, "ab STO"),
        ("aab", ("ab",), False, "a"),
        ("one two", ("two", "ne"), False, "o"),
        ("xyz", ("yz", "z"), True, "xyz"),
        ("é€é", ("€",), False, "é"),
        ("", ("a",), False, ""),
    ],
)
def test_text_ends_at_the_stop_string(text: str, stop: tuple[str, ...], include: bool, expected: str) -> None:
    given_out, is_stopped = stopped(text, stop, include)

    assert "".join(given_out) == expected
    assert is_stopped == any(string in text for string in stop)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_nothing_after_or_of_a_stop_string_is_ever_given_out(text: str, stop: list[str]) -> None:
    given_out, _ = stopped(text, tuple(stop))

    ends = [text.find(string) + len(string) for string in stop if string in text]
    if not ends:
        assert "".join(given_out) == text
        return
    longest = max(len(string) for string in stop if text[: min(ends)].endswith(string))
    assert "".join(given_out) == text[: min(ends) - longest]


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    assert stopped("aSTaST", ("STOP",))[0] == ["a", "", "", "STa", "", "", "ST"]


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), (b"{", "not a tokenizer")])
def test_a_broken_tokenizer_file_is_one_clear_error(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)

    with pytest.raises(BadCheckpoint, match=rf"tokenizer\.json: {message}"):
        load_tokenizer(tmp_path)
