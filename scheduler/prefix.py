"""Names for the beginnings of prompts: two prompts with a key in common begin alike up to there."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

STRIDE = 16
"""Tokens between two keys: a block of the decoder's KV cache."""


def prefix_keys(
    token_ids: Sequence[int], image_token_id: int, image_keys: Sequence[bytes], image_tokens: Sequence[int]
) -> list[tuple[bytes, int]]:
    """Keys of a prompt's beginnings with their lengths in tokens, shortest first.

    `token_ids` has one image token per image; `image_keys` names the images in order, `image_tokens` says as how
    many tokens each counts. A key stands after every image and every `STRIDE` tokens.
    """
    digest = hashlib.blake2b(digest_size=16)
    keys: list[tuple[bytes, int]] = []
    images = iter(zip(image_keys, image_tokens, strict=True))
    begin = num_tokens = 0
    for index, token_id in enumerate(token_ids):
        is_image = token_id == image_token_id
        image_key, size = next(images) if is_image else (b"", 1)
        num_tokens += size
        if not is_image and (index + 1) % STRIDE:
            continue
        digest.update(array("q", token_ids[begin : index + 1]).tobytes())
        digest.update(image_key)
        begin = index + 1
        keys.append((digest.copy().digest(), num_tokens))
    return keys
