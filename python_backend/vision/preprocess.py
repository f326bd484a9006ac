"""Pictures to pixel values, by the checkpoint's own image processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from python_backend.checkpoint import CheckpointRefused


class Preprocessor:
    """The Hugging Face image processor of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoImageProcessor  # seconds to import: only where needed

        try:
            self._processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil", local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointRefused(f"checkpoint {checkpoint}: its image processor cannot be read: {error}") from error

    def pixels(self, images: Sequence[Image.Image]) -> npt.NDArray[np.float32]:
        """Pixel values of RGB pictures, (images, 3, height, width)."""
        values = self._processor(images=list(images), return_tensors="np")["pixel_values"]
        return np.asarray(values, dtype=np.float32)

    def tiles(self, image: Image.Image) -> npt.NDArray[np.float32]:
        """Pixel values of the tiles of one RGB picture of any resolution, (tiles, 3, height, width); base first."""
        values = self._processor(images=[image], return_tensors="np")["pixel_values"]
        return np.asarray(values[0], dtype=np.float32)
