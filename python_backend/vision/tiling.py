"""Pictures of any resolution through an encoder of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from python_backend.checkpoint import CheckpointFacts, CheckpointRefused
from python_backend.tiles import Features, TileGrid
from python_backend.transport.segment import Rows
from python_backend.vision.buckets import to_host
from python_backend.vision.preprocess import Preprocessor
from python_backend.vision.runtime import Encoder

NEWLINE_NAMES = ("image_newline", "model.image_newline")


class Tiling:
    """Cuts pictures into tiles, and makes one embedding of the features of each one's tiles."""

    def __init__(self, grid: TileGrid, newline: Features) -> None:
        self._grid = grid
        self._newline = newline

    def encode(self, images: Sequence[Image.Image], preprocessor: Preprocessor, encoder: Encoder) -> list[Rows]:
        """The features of each picture, (tokens, width), in host memory."""
        tiles = [preprocessor.tiles(image) for image in images]
        pixels = np.concatenate(tiles)
        features: list[Features] = []
        for start in range(0, len(pixels), encoder.max_batch):  # what one call gives is gone at the next
            features += [np.array(to_host(rows)) for rows in encoder.encode(pixels[start : start + encoder.max_batch])]
        found: list[Rows] = []
        for image, own in zip(images, tiles, strict=True):
            of_image, features = features[: len(own)], features[len(own) :]
            found.append(self._grid.arrange(np.stack(of_image), self._newline, image.height, image.width))
        return found


def make_tiling(facts: CheckpointFacts) -> Tiling | None:
    """What a LLaVA-NeXT checkpoint needs; None for others, whose pictures are one tile.

    Raises:
        CheckpointRefused: it has no newline embedding.
    """
    return None if facts.grid is None else Tiling(facts.grid, _read_newline(facts.path, facts.width))


def _read_newline(checkpoint: Path, width: int) -> Features:
    from python_backend.weights import BadCheckpoint, TensorFiles  # torch: only where needed

    try:
        with TensorFiles(checkpoint) as files:
            name = next((each for each in NEWLINE_NAMES if each in files), NEWLINE_NAMES[0])
            found: Features = files.read(name, (width,)).float().numpy()
    except BadCheckpoint as error:
        raise CheckpointRefused(str(error)) from error
    return found
