"""The bytes of the images a request carries, read before anything is sent."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from client.errors import ImageNotReadable

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Image: TypeAlias = "str | Path | bytes | PillowImage"  # a string: Pillow need not be installed


def read_images(images: Iterable[Image]) -> tuple[bytes, ...]:
    """One file's bytes per image: a path is read, bytes are taken as they are, a Pillow image becomes a PNG.

    A string that is a `data:` URI is sent as it is; the server decodes it.

    Raises:
        ImageNotReadable: no such file, not readable, empty, or of none of these kinds.
    """
    if isinstance(images, str | bytes | Path):
        raise ImageNotReadable("images must be a list; put the one image into [...]")
    return tuple(_read(image) for image in images)


def _read(image: Image) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        content = bytes(image)
    elif isinstance(image, str) and image.startswith("data:"):
        content = image.encode()
    elif isinstance(image, str | Path):
        content = _file(Path(image))
    else:
        content = _png(image)
    if not content:
        raise ImageNotReadable(f"image {_name(image)} is empty")
    return content


def _file(path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except FileNotFoundError:
        raise ImageNotReadable(f"image {str(path)!r} does not exist") from None
    except IsADirectoryError:
        raise ImageNotReadable(f"image {str(path)!r} is a folder, not a file") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageNotReadable(f"image {str(path)!r} cannot be read: {reason}") from None


def _png(image: PillowImage) -> bytes:
    buffer = io.BytesIO()
    try:
        image.save(buffer, format="PNG")
    except AttributeError:
        kinds = "a path, bytes or a Pillow image"
        raise ImageNotReadable(f"an image must be {kinds}, not {type(image).__name__}") from None
    except OSError as error:  # a mode that PNG cannot hold, such as CMYK or F
        raise ImageNotReadable(f"the Pillow image cannot be sent as PNG: {error}") from None
    return buffer.getvalue()


def _name(image: Image) -> str:
    return repr(str(image)) if isinstance(image, str | Path) else f"of type {type(image).__name__}"
