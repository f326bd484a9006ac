"""The seal on a handle: nothing but what this boot sealed, for this model, opens."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as some

from python_backend.errors import HandleRefused
from python_backend.transport.boot import BootKey
from python_backend.transport.handle import (
    HANDLE_BYTES,
    DType,
    EmbeddingHandle,
    content_digest,
    fingerprint_of,
)

BOOT = BootKey("4242-987654-4026531836", bytes(range(32)))
FINGERPRINT = fingerprint_of("llava-1.5-7b", "clip-vit-large-336")
HANDLE = EmbeddingHandle(
    segment="vlm_relay.4242-987654-4026531836.0123456789abcdef",
    slot=3,
    offset=8192 + 3 * 4718592,
    shape=(576, 4096),
    dtype="float16",
    generation=2**63 + 4,
    lease_index=17,
    lease_id=2**64 - 1,
    digest=content_digest(b"an image", BOOT),
    fingerprint=FINGERPRINT,
)
SEALED = HANDLE.seal(BOOT)

numbers = some.integers(0, 2**32 - 1)
long_numbers = some.integers(0, 2**64 - 1)
handles = some.builds(
    EmbeddingHandle,
    segment=some.just(HANDLE.segment),
    slot=numbers,
    offset=long_numbers,
    shape=some.tuples(numbers, numbers),
    dtype=some.sampled_from(get_args(DType)),
    generation=long_numbers,
    lease_index=numbers,
    lease_id=long_numbers,
    digest=some.binary(min_size=16, max_size=16),
    fingerprint=some.just(FINGERPRINT),
)


def test_a_handle_is_shorter_than_256_bytes() -> None:
    longest = replace(HANDLE, segment=f"vlm_relay.4194304-{10**15}-4294967295.0123456789abcdef")
    assert [len(SEALED), len(longest.seal(BOOT)), HANDLE_BYTES] == [176, 176, 176]
    boot = BootKey(f"4194304-{10**15}-4294967295", BOOT.key)
    assert EmbeddingHandle.open(longest.seal(boot), boot, FINGERPRINT) == longest


@given(handles)
def test_what_was_sealed_opens_equal(handle: EmbeddingHandle) -> None:
    assert EmbeddingHandle.open(handle.seal(BOOT), BOOT, FINGERPRINT) == handle


@given(position=some.integers(0, HANDLE_BYTES - 1), change=some.integers(1, 255))
def test_a_change_of_any_byte_is_refused(position: int, change: int) -> None:
    forged = bytearray(SEALED)
    forged[position] ^= change
    with pytest.raises(HandleRefused):
        EmbeddingHandle.open(bytes(forged), BOOT, FINGERPRINT)


def test_a_flip_of_every_bit_is_refused() -> None:
    for bit in range(8 * HANDLE_BYTES):
        forged = bytearray(SEALED)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(HandleRefused):
            EmbeddingHandle.open(bytes(forged), BOOT, FINGERPRINT)


@given(some.binary(max_size=300))
def test_bytes_from_anywhere_are_refused(data: bytes) -> None:
    with pytest.raises(HandleRefused):
        EmbeddingHandle.open(data, BOOT, FINGERPRINT)


OTHER_BOOT = BootKey("4242-987655-4026531836", BOOT.key)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "has 176 bytes, this has 0", id="empty"),
        pytest.param(SEALED[:-1], "has 176 bytes, this has 175", id="truncated"),
        pytest.param(SEALED + b"\0", "has 176 bytes, this has 177", id="too long"),
        pytest.param(bytes(176), "not an embedding handle", id="something else"),
        pytest.param(
            HANDLE.seal(BootKey(BOOT.id, bytes(32))),
            "a wrong seal: forged, damaged, or issued before",
            id="key",
        ),
        pytest.param(
            replace(HANDLE, segment="vlm_relay.1-2-3.0123456789abcdef").seal(BOOT),
            "of another boot: .*1-2-3",
            id="boot",
        ),
        pytest.param(replace(HANDLE, segment="../../etc/passwd").seal(BOOT), "of another boot", id="path"),
        pytest.param(
            replace(HANDLE, fingerprint=fingerprint_of("llava-1.5-13b")).seal(BOOT),
            f"of another model, preprocessing or layout: .*{FINGERPRINT.hex()}",
            id="model",
        ),
        pytest.param(replace(HANDLE, version=2).seal(BOOT), "version 2, this process knows 1", id="version"),
    ],
)
def test_each_refusal_says_why_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(HandleRefused, match=message) as refusal:
        EmbeddingHandle.open(data, BOOT, FINGERPRINT)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("[INVALID_ARGUMENT] ")


def test_the_seal_is_checked_before_anything_in_the_handle_is_believed() -> None:
    forged = replace(HANDLE, version=9, segment="/etc/passwd", fingerprint=bytes(16)).seal(BootKey(BOOT.id, bytes(32)))
    with pytest.raises(HandleRefused, match="a wrong seal"):
        EmbeddingHandle.open(forged, BOOT, FINGERPRINT)


def test_a_fingerprint_tells_its_parts_apart() -> None:
    names = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("c", "ab")]
    assert len({fingerprint_of(*parts) for parts in names}) == len(names)
    assert fingerprint_of("ab", "c") == fingerprint_of("ab", "c")


def test_a_content_digest_is_of_one_boot_only() -> None:
    other = BootKey(BOOT.id, bytes(32))
    assert content_digest(b"an image", BOOT) == content_digest(b"an image", BOOT)
    assert content_digest(b"an image", BOOT) != content_digest(b"an image", other)
