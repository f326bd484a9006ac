"""What a request and a load say."""

from __future__ import annotations

import pytest

from scheduler.loads import RecentKeys, RequestShape


def test_the_oldest_keys_are_forgotten_first() -> None:
    keys = RecentKeys(2)
    keys.note((b"cat", b"dog"))
    keys.note((b"cat",))
    keys.note((b"owl",))

    assert [key in keys for key in (b"cat", b"dog", b"owl")] == [True, False, True]
    assert list(keys) == [b"cat", b"owl"]


def test_a_replica_that_was_restarted_has_nothing() -> None:
    keys = RecentKeys(2)
    keys.note((b"cat",))
    keys.forget()

    assert not keys


def test_keys_are_given_for_all_images_or_none() -> None:
    with pytest.raises(ValueError, match="1 image_keys for 2 images; allowed: none or all"):
        RequestShape(num_images=2, image_keys=(b"cat",))


def test_a_larger_image_counts_as_several() -> None:
    assert RequestShape(num_images=1, image_tokens=2880).image_units == 5.0
