"""The least loaded replica of each stage serves a request."""

from __future__ import annotations

import pytest

from scheduler.routing import Decision, Load, decide


def loads(**pending: int) -> dict[str, Load]:
    """Replicas and what each has before it."""
    return {name: Load(count) for name, count in pending.items()}


@pytest.mark.parametrize(
    ("num_images", "encoders", "decoders", "expected"),
    [
        (1, {"e0": 3, "e1": 2}, {"d0": 10, "d1": 9}, ("e1", "d1", 2, 9)),
        (4, {"e0": 2, "e1": 2}, {"d0": 9, "d1": 9}, ("e0", "d0", 2, 9)),
        (1, {"e1": 0, "e0": 0}, {"d0": 0}, ("e1", "d0", 0, 0)),
    ],
)
def test_the_least_pending_replica_is_chosen_and_the_first_of_equals(
    num_images: int, encoders: dict[str, int], decoders: dict[str, int], expected: tuple[str, str, int, int]
) -> None:
    decision = decide(num_images, loads(**encoders), loads(**decoders))

    assert decision == Decision(*expected, "split", "least pending images, least pending tokens")


@pytest.mark.parametrize("encoders", [{}, {"e": 5}])
def test_text_skips_the_encoder(encoders: dict[str, int]) -> None:
    decision = decide(0, loads(**encoders), loads(d=7))

    assert decision == Decision(None, "d", 0, 7, "text", "no image: the encoder is skipped")


@pytest.mark.parametrize(
    ("num_images", "encoders", "decoders", "told"),
    [
        (0, {"e": 0}, {}, "no decoder is available"),
        (1, {}, {"d": 0}, "no encoder is available"),
        (1, {}, {}, "no decoder is available"),
    ],
)
def test_a_stage_without_replicas_is_an_error(
    num_images: int, encoders: dict[str, int], decoders: dict[str, int], told: str
) -> None:
    with pytest.raises(LookupError, match=told):
        decide(num_images, loads(**encoders), loads(**decoders))


def test_a_decision_is_told_in_plain_values() -> None:
    assert decide(1, loads(e=1), loads(d=2)).to_dict() == {
        "encoder": "e",
        "decoder": "d",
        "encoder_pending_images": 1,
        "decoder_pending_tokens": 2,
        "mode": "split",
        "reason": "least pending images, least pending tokens",
    }
