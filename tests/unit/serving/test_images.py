"""Image bytes in every form that clients send, and everything that is refused."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from python_backend.errors import InvalidImage
from python_backend.images import ALLOWED, FORMATS, ImageLimits, decode, unwrap

LIMITS = ImageLimits(max_bytes=100_000, max_pixels=20_000)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
ORIENTATION = 0x0112


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PNG = saved(PICTURE, "PNG")
TEXT = base64.b64encode(PNG)


@pytest.mark.parametrize("kind", FORMATS)
def test_raw_files_of_every_format_pass_as_they_are(kind: str) -> None:
    file = saved(PICTURE, kind)

    assert unwrap(file, LIMITS) == file
    assert decode(file).size == (30, 20)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_a_lossless_file_gives_its_very_pixels(kind: str) -> None:
    assert decode(saved(PICTURE, kind)).tobytes() == PICTURE.tobytes()


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        base64.encodebytes(PNG),
        b"\n".join(TEXT[i : i + 64] for i in range(0, len(TEXT), 64)),
        TEXT.replace(b"\n", b"\r\n") + b"\r\n",
        base64.urlsafe_b64encode(PNG),
        TEXT.rstrip(b"="),
        b"data:image/png;base64," + TEXT,
        b"DATA:image/png;BASE64," + TEXT,
        b"data:;base64," + TEXT,
        b"data:image/png;charset=utf-8;name=a.png;base64," + TEXT,
        b"data:image/png;base64," + base64.urlsafe_b64encode(PNG).rstrip(b"="),
    ],
    ids=[
        "plain",
        "mime",
        "lines",
        "crlf",
        "urlsafe",
        "unpadded",
        "uri",
        "upper case",
        "no type",
        "uri parameters",
        "uri urlsafe",
    ],
)
def test_base64_in_every_spelling_is_unwrapped(text: bytes) -> None:
    assert unwrap(text, LIMITS) == PNG


def test_a_file_of_another_format_is_named_as_what_it_is_not() -> None:
    for data in (b"%PDF-1.7 " + b"\0" * 100, base64.b64encode(b"%PDF-1.7 " + b"\0" * 100)):
        with pytest.raises(InvalidImage) as refused:
            unwrap(data, LIMITS)
        assert refused.value.text == f"not an image (it starts with b'%PDF-1.7'); allowed: {ALLOWED}"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", f"the image is empty; allowed: {ALLOWED}"),
        (b"http://example.org/a.png", f"image URLs are not fetched; allowed: {ALLOWED}"),
        (b"HTTPS://example.org/a.png", f"image URLs are not fetched; allowed: {ALLOWED}"),
        (b"data:image/png," + TEXT, "the data: URI is not of the form data:image/...;base64,..."),
        (b"data:image/png;base64", "the data: URI is not of the form data:image/...;base64,..."),
        (b"data:image/png;base64,%%%", "the image is not base64: "),
        (TEXT[:80] + b"A", "the image is not base64: "),
        (b"data:image/png;base64,", f"not an image (it starts with b''); allowed: {ALLOWED}"),
        (b"hello", f"not an image (it starts with b'hello'); allowed: {ALLOWED}"),
        (b"\0" * 64, "not an image (it starts with b'\\x00"),
        (saved(PICTURE, "PPM"), "not an image (it starts with b'P6"),
        (saved(PICTURE, "ICO", sizes=[(16, 16)]), "not an image (it starts with "),
    ],
)
def test_what_is_no_image_is_refused_in_words_that_help(data: bytes, told: str) -> None:
    with pytest.raises(InvalidImage) as refused:
        unwrap(data, LIMITS)
    assert refused.value.text.startswith(told)


def test_a_file_may_have_exactly_the_allowed_bytes_and_pixels() -> None:
    assert unwrap(PNG, ImageLimits(len(PNG), 600)) == PNG
    assert unwrap(TEXT, ImageLimits(len(PNG), 600)) == PNG  # the file counts, not its wrapping
    with pytest.raises(InvalidImage) as refused:
        unwrap(PNG, ImageLimits(len(PNG) - 1, 600))
    assert refused.value.text == f"the image has {len(PNG)} bytes; at most {len(PNG) - 1} are allowed"
    with pytest.raises(InvalidImage) as refused:
        unwrap(PNG, ImageLimits(len(PNG), 599))
    assert refused.value.text == "the image has 30 x 20 pixels; at most 599 in all are allowed"


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises more than the file holds."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height", "told"),
    [
        (60_000, 60_000, "the image has too many pixels: "),
        (10_000, 10_000, "the image has 10000 x 10000 pixels; at most 20000 in all are allowed"),
    ],
)
def test_a_decompression_bomb_is_refused_by_its_header(width: int, height: int, told: str) -> None:
    with pytest.raises(InvalidImage) as refused:
        unwrap(bomb(width, height), LIMITS)
    assert refused.value.text.startswith(told)


@pytest.mark.parametrize("size", [(1, 101), (101, 1), (3, 400)])
def test_a_picture_that_no_resize_can_bear_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage) as refused:
        unwrap(saved(Image.new("RGB", size), "PNG"), LIMITS)
    assert refused.value.text == (
        f"the image has {size[0]} x {size[1]} pixels; its longer side may be at most 100 times the shorter"
    )


@pytest.mark.parametrize("size", [(1, 1), (1, 100), (100, 1)])
def test_a_small_or_narrow_picture_passes(size: tuple[int, int]) -> None:
    file = saved(Image.new("RGB", size), "PNG")

    assert unwrap(file, LIMITS) == file


def test_a_file_that_breaks_off_is_found_when_it_is_decoded() -> None:
    file = saved(PICTURE.resize((100, 100)), "JPEG")
    broken = file[: len(file) // 2]

    assert unwrap(broken, LIMITS) == broken
    with pytest.raises(InvalidImage, match="the JPEG image cannot be decoded: image file is truncated"):
        decode(broken)


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, None),
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_270),
        (7, Image.Transpose.TRANSVERSE),
        (8, Image.Transpose.ROTATE_90),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_a_photo_taken_sideways_is_turned_upright(kind: str, orientation: int, turned: Image.Transpose | None) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    expected = PICTURE if turned is None else PICTURE.transpose(turned)

    decoded = decode(saved(PICTURE, kind, exif=exif))

    assert decoded.tobytes() == expected.tobytes()
    assert decoded.size == expected.size


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("CMYK", "TIFF"),
        ("CMYK", "JPEG"),
        ("P", "PNG"),
        ("P", "GIF"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("L", "JPEG"),
        ("1", "BMP"),
    ],
)
def test_every_colour_mode_becomes_rgb(mode: str, kind: str) -> None:
    file = saved(PICTURE.convert(mode), kind)

    decoded = decode(file)

    assert (decoded.mode, decoded.size) == ("RGB", (30, 20))
    with Image.open(io.BytesIO(file)) as original:
        assert decoded.tobytes() == original.convert("RGB").tobytes()


def test_an_animation_is_its_first_picture() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    file = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])

    assert decode(file).getpixel((0, 0)) == (255, 0, 0)


ASCII, SHORT, RATIONAL = 2, 3, 5  # types of an EXIF entry


@pytest.mark.parametrize(
    ("tag", "kind", "damaged"),
    [(0x010E, ASCII, RATIONAL), (0x011A, RATIONAL, ASCII), (0x011A, RATIONAL, 7), (0x010E, ASCII, SHORT)],
)
def test_a_photo_with_a_broken_exif_block_is_still_a_photo(tag: int, kind: int, damaged: int) -> None:
    file = bytearray(saved(PICTURE, "JPEG", exif=turned_exif()))
    at = file.index(struct.pack(">HH", tag, kind))
    file[at + 2 : at + 8] = struct.pack(">HI", damaged, 1)

    assert decode(bytes(file)).size == (20, 30)


def test_a_tiff_that_points_nowhere_is_refused() -> None:
    strip_offsets, long = 0x0111, 4
    file = bytearray(saved(PICTURE, "TIFF"))
    at = file.index(struct.pack("<HH", strip_offsets, long))
    file[at + 2 : at + 4] = struct.pack("<H", RATIONAL)

    with pytest.raises(InvalidImage, match="the TIFF image cannot be decoded: "):
        decode(bytes(file))


def turned_exif() -> Image.Exif:
    """A block with an orientation to read, and a text and a number to misread."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    exif[0x010E] = "a photo"
    exif[0x011A] = 72.5
    return exif


FILES = [
    *[saved(PICTURE, kind) for kind in FORMATS],
    *[saved(PICTURE, kind, exif=turned_exif()) for kind in ("JPEG", "PNG", "WEBP", "TIFF")],
    saved(PICTURE.convert("P"), "PNG"),
    saved(PICTURE, "TIFF", compression="tiff_lzw"),
    TEXT,
]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=300)
@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=12))
def test_a_damaged_file_gives_a_picture_or_a_refusal(file: bytes, damages: list[tuple[int, int]]) -> None:
    data = bytearray(file)
    for place, value in damages:
        data[place % len(data)] = value
    _gives_a_picture_or_a_refusal(bytes(data))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=200)
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | st.binary(max_size=60).map(base64.b64encode))
def test_any_bytes_give_a_picture_or_a_refusal(data: bytes) -> None:
    _gives_a_picture_or_a_refusal(data)


def _gives_a_picture_or_a_refusal(data: bytes) -> None:
    try:
        picture = decode(unwrap(data, LIMITS))
    except InvalidImage:
        return
    assert picture.mode == "RGB"
