from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from PIL import Image as pillow

from client.channel import address_from
from client.errors import ImageNotReadable, InvalidRequest
from client.images import Image, read_images
from client.request import request_from


def test_a_missing_image_is_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "no-such.jpg"

    with pytest.raises(ImageNotReadable, match=r"no-such\.jpg' does not exist"):
        request_from("What?", None, [path])


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"", "is empty"),
        (Path(__file__).parent, "is a folder"),
        ("with\0nul", "cannot be read"),
        (3, "must be a path, bytes or a Pillow image, not int"),
    ],
)
def test_what_is_not_an_image_is_refused_with_the_reason(image: Image, words: str) -> None:
    with pytest.raises(ImageNotReadable, match=words):
        read_images([image])


def test_one_path_instead_of_a_list_is_refused() -> None:
    with pytest.raises(ImageNotReadable, match="must be a list"):
        read_images("picture.jpg")


def test_paths_bytes_data_uris_and_pillow_images_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg\0\0")
    images: list[Image] = [tmp_path / "a.jpg", str(tmp_path / "a.jpg"), b"raw", "data:image/png;base64,AA=="]

    contents = read_images([*images, pillow.new("RGB", (2, 2))])

    assert contents[:4] == (b"jpeg\0\0", b"jpeg\0\0", b"raw", b"data:image/png;base64,AA==")
    assert contents[4].startswith(b"\x89PNG")


def test_a_pillow_mode_that_png_cannot_hold_is_refused() -> None:
    with pytest.raises(ImageNotReadable, match="cannot be sent as PNG"):
        read_images([pillow.new("CMYK", (2, 2))])


def test_only_what_was_given_is_sent_as_sampling_parameters() -> None:
    request = request_from(
        "What?", None, [], max_tokens=5, stop=["\n"], priority=3, deadline_s=2.0, return_decision=True
    )

    assert json.loads(request.sampling) == {"max_tokens": 5, "stop": ["\n"]}
    assert (request.priority, request.deadline_s, request.return_decision) == (3, 2.0, True)


@pytest.mark.parametrize(("question", "has_messages"), [(None, False), ("What?", True)])
def test_a_request_is_a_question_or_messages_and_never_both(question: str | None, has_messages: bool) -> None:
    messages = [{"role": "user", "content": "What?"}] if has_messages else None

    with pytest.raises(InvalidRequest, match="either a question or messages"):
        request_from(question, messages, [])


@pytest.mark.parametrize("priority", [-101, 101, True, 1.0, "1"])
def test_a_priority_the_wire_cannot_carry_is_refused(priority: int) -> None:
    with pytest.raises(InvalidRequest, match="from -100 to 100"):
        request_from("What?", None, [], priority=priority)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan, math.inf, 5e6, "1"])
def test_a_deadline_the_wire_cannot_carry_is_refused(deadline_s: float) -> None:
    with pytest.raises(InvalidRequest, match="deadline_s must be above 0"):
        request_from("What?", None, [], deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("temperature", "words"),
    [
        (math.nan, "temperature must be a finite number, not nan"),
        ({1}, "cannot be written as JSON"),
    ],
)
def test_a_parameter_that_is_not_json_is_refused(temperature: float, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        request_from("What?", None, [], temperature=temperature)


def test_a_question_that_is_not_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        request_from("\udcff", None, [])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("127.0.0.1:8001", "127.0.0.1:8001"),
        ("grpc://relay.example:8001/", "relay.example:8001"),
        (" localhost:1 ", "localhost:1"),
        ("[::1]:8001", "[::1]:8001"),
    ],
)
def test_an_address_is_host_and_port(url: str, address: str) -> None:
    assert address_from(url) == address


@pytest.mark.parametrize("url", ["", "localhost", "http://localhost:8000", "localhost:http", "::1:8001", "a b:1"])
def test_any_other_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="must be host:port"):
        address_from(url)
