"""Image bytes as clients send them: unwrapped, checked, decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
import warnings
from dataclasses import dataclass

from PIL import ExifTags, Image

from python_backend.errors import InvalidImage

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Scaling the shorter side of a narrower picture to the encoder's size would take gigabytes for the longer one.
MAX_ASPECT_RATIO = 100
ALLOWED = f"{', '.join(FORMATS)} as raw bytes, base64 or a data: URI"

_DATA_URI = re.compile(rb"data:(?P<type>[^;,]*)(?P<parameters>(;[^;,]*)*?)(?P<base64>;base64)?,", re.IGNORECASE)
_BASE64 = re.compile(rb"[A-Za-z0-9+/_\-\s]{16,}={0,2}\s*")
# What Pillow raises for files that are damaged in one way or another.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)
_UPRIGHT = {  # EXIF orientation to what turns the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LIES_ON_ITS_SIDE = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one image may be at most."""

    max_bytes: int
    max_pixels: int


def unwrap(data: bytes, limits: ImageLimits) -> bytes:
    """The file bytes in what a client sent: raw bytes, base64 of them, or a `data:` URI.

    Only the header is read: a file that breaks off later is found when it is decoded.

    Raises:
        InvalidImage: empty, too large, a URL, or not an image of an allowed format.
    """
    if not data:
        raise InvalidImage(f"the image is empty; allowed: {ALLOWED}")
    if data[:8].lower().startswith((b"http://", b"https://")):
        raise InvalidImage(f"image URLs are not fetched; allowed: {ALLOWED}")
    file = _from_text(data)
    if len(file) > limits.max_bytes:
        raise InvalidImage(f"the image has {len(file)} bytes; at most {limits.max_bytes} are allowed")
    with _open(file) as image:
        width, height = image.size
    if width * height > limits.max_pixels:
        raise InvalidImage(f"the image has {width} x {height} pixels; at most {limits.max_pixels} in all are allowed")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidImage(
            f"the image has {width} x {height} pixels; its longer side may be at most {MAX_ASPECT_RATIO} times "
            "the shorter"
        )
    return file


def upright_size(file: bytes) -> tuple[int, int]:
    """Height and width of the picture in a file, as `decode` gives it; only the header is read.

    Raises:
        InvalidImage: not an image of an allowed format.
    """
    with _open(file) as image:
        try:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        except _UNREADABLE as error:
            raise InvalidImage(f"the {image.format} image cannot be decoded: {error}") from error
        return (image.width, image.height) if orientation in _LIES_ON_ITS_SIDE else (image.height, image.width)


def decode(file: bytes) -> Image.Image:
    """The picture in a file, upright and in RGB, as `transformers.image_utils.load_image` gives it.

    Raises:
        InvalidImage: not an image of an allowed format, or one that breaks off.
    """
    with _open(file) as image:
        try:
            image.load()  # turns a TIFF upright by itself, so before its orientation is asked
            turn = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
            # Not `ImageOps.exif_transpose`: it writes the EXIF block anew, which fails for many that cameras wrote.
            return image.convert("RGB") if turn is None else image.convert("RGB").transpose(turn)
        except _UNREADABLE as error:
            raise InvalidImage(f"the {image.format} image cannot be decoded: {error}") from error


def _from_text(data: bytes) -> bytes:
    """The file behind base64 or a data URI; other bytes as they are."""
    if data[:5].lower() == b"data:":
        found = _DATA_URI.match(data)
        if found is None or found["base64"] is None:
            raise InvalidImage("the data: URI is not of the form data:image/...;base64,...")
        return _decode_base64(data[found.end() :])
    if _BASE64.fullmatch(data, 0, min(len(data), 256)) or _BASE64.fullmatch(data):
        return _decode_base64(data)
    return data


def _decode_base64(text: bytes) -> bytes:
    compact = b"".join(text.split()).translate(bytes.maketrans(b"-_", b"+/"))
    try:
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidImage(f"the image is not base64: {error}") from error


def _open(file: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # The limit is ours: `unwrap` compares the size with it.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(file), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidImage(f"the image has too many pixels: {error}") from error
    except _UNREADABLE as error:
        raise InvalidImage(f"not an image (it starts with {file[:8]!r}); allowed: {ALLOWED}") from error
