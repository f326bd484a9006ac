"""LLaVA-NeXT's pictures of any resolution: which tiles one is cut into, and the order of their features.

    picture ─▶ the whole, shrunk to one tile ────────────────────────────────▶ base features
           └─▶ fitted into the best resolution, padded, cut into tiles ─▶ one large field of features,
               the padding cut off, a newline behind each of its rows ───────▶ behind the base features

Numbers are in pixels for pictures and tiles, in patches for fields; pairs are (height, width).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TileGrid:
    """What a checkpoint says about its tiles."""

    resolutions: tuple[tuple[int, int], ...]  # that a picture may be fitted into
    tile_size: int
    side: int  # patches along a tile's side

    def best_resolution(self, height: int, width: int) -> tuple[int, int]:
        """The resolution that keeps most of a picture's pixels, and of those the one with the least padding."""

        def merit(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            kept = min(int(width * scale) * int(height * scale), height * width)
            return kept, kept - resolution[0] * resolution[1]

        return max(self.resolutions, key=merit)  # the first of several, as in transformers

    def field(self, height: int, width: int) -> tuple[int, int]:
        """The patches of the tiles of a picture, padding included."""
        rows, columns = (size // self.tile_size * self.side for size in self.best_resolution(height, width))
        return rows, columns

    def padding(self, height: int, width: int) -> tuple[int, int]:
        """How many of the field's rows at the top and bottom, and columns at both sides, show no picture."""
        rows, columns = self.field(height, width)
        if width / height > columns / rows:
            return (rows - int(round(height * (columns / width), 7))) // 2, 0
        return 0, (columns - int(round(width * (rows / height), 7))) // 2

    def num_tokens(self, height: int, width: int) -> int:
        """The rows of a picture's features."""
        rows, columns = self.field(height, width)
        above, beside = self.padding(height, width)
        return self.side**2 + (rows - 2 * above) * (columns - 2 * beside + 1)

    @property
    def most_tokens(self) -> int:
        """The rows of the largest features."""
        fields = (tuple(size // self.tile_size * self.side for size in each) for each in self.resolutions)
        return self.side**2 + max(rows * (columns + 1) for rows, columns in fields)

    def arrange(self, tiles: Features, newline: Features, height: int, width: int) -> Features:
        """A picture's features, (tokens, channels), from those of its tiles, (tiles, patches, channels), base first."""
        rows, columns = self.field(height, width)
        above, beside = self.padding(height, width)
        parts = tiles[1:].reshape(rows // self.side, columns // self.side, self.side, self.side, -1)
        whole = parts.transpose(0, 2, 1, 3, 4).reshape(rows, columns, -1)
        kept = whole[above : rows - above, beside : columns - beside]
        ends = np.broadcast_to(newline, (len(kept), 1, len(newline)))
        return np.concatenate([tiles[0], np.concatenate([kept, ends], axis=1).reshape(-1, len(newline))])
