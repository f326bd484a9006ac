"""Prompts that begin alike have keys in common, and no others."""

from __future__ import annotations

from scheduler.prefix import STRIDE, prefix_keys

IMAGE = 3


def keys(*token_ids: int, images: tuple[bytes, ...] = ()) -> list[tuple[bytes, int]]:
    return prefix_keys(token_ids, IMAGE, images, [576] * len(images))


def test_a_key_stands_after_every_stride_and_every_image() -> None:
    prompt = (1, 2, IMAGE, *range(10, 10 + 2 * STRIDE))

    assert [size for _, size in keys(*prompt, images=(b"a",))] == [578, STRIDE + 575, 2 * STRIDE + 575]


def test_prompts_that_begin_alike_share_the_keys_of_that_beginning() -> None:
    first = keys(1, 2, IMAGE, *range(10, 60), images=(b"a",))
    second = keys(1, 2, IMAGE, *range(10, 45), 999, *range(46, 60), images=(b"a",))

    shared = [key for key in first if key in second]
    assert shared == first[: len(shared)]
    assert [size for _, size in shared] == [578, 591, 607]


def test_another_image_is_another_beginning() -> None:
    prompt = (1, 2, IMAGE, *range(10, 60))

    assert not set(keys(*prompt, images=(b"a",))) & set(keys(*prompt, images=(b"b",)))


def test_a_short_prompt_without_images_has_none() -> None:
    assert keys(*range(4, STRIDE + 3)) == []
