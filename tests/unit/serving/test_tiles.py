"""LLaVA-NeXT's tiles: which ones, how many tokens they become and in what order, as transformers has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from python_backend.tiles import TileGrid
from python_backend.transport.segment import Rows
from python_backend.vision.tiling import Tiling

TILE, SIDE, WIDTH = 28, 4, 6
RESOLUTIONS = ((28, 56), (56, 28), (56, 56), (84, 28), (28, 84))
GRID = TileGrid(RESOLUTIONS, TILE, SIDE)
TRUE_GRID = TileGrid(((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), 336, 24)
# (height, width): square, portrait, landscape, tiny, huge, long, an odd one
SIZES = [(64, 64), (90, 40), (40, 90), (3, 5), (1, 1), (1500, 2100), (20, 900), (900, 20), (57, 113)]


@pytest.fixture(scope="module")
def model() -> LlavaNextForConditionalGeneration:
    """A small random one, whose tower's patches are as many as the grid says."""
    vision = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=TILE, patch_size=7
    )
    text = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=10,
    )
    torch.manual_seed(1)
    config = LlavaNextConfig(
        vision_config=vision, text_config=text, image_grid_pinpoints=[list(each) for each in RESOLUTIONS]
    )
    return LlavaNextForConditionalGeneration(config).eval()


class TowerEncoder:
    """The model's own tower and projector, three tiles at a time."""

    max_batch = 3

    def __init__(self, model: LlavaNextForConditionalGeneration) -> None:
        self._parts = model.model

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray) -> list[Rows]:
        states = self._parts.vision_tower(torch.from_numpy(pixels), output_hidden_states=True).hidden_states
        return list(self._parts.multi_modal_projector(states[-2][:, 1:]).numpy())

    def close(self) -> None:
        pass


class Processor:
    """The checkpoint's image processor, without a checkpoint."""

    def __init__(self) -> None:
        self.processor = LlavaNextImageProcessorPil(
            size={"shortest_edge": TILE},
            crop_size={"height": TILE, "width": TILE},
            image_grid_pinpoints=[list(each) for each in RESOLUTIONS],
        )

    def tiles(self, image: Image.Image) -> np.ndarray:
        return np.asarray(self.processor(images=[image], return_tensors="np")["pixel_values"][0], np.float32)


def picture(height: int, width: int) -> Image.Image:
    values = np.random.default_rng(height * 1000 + width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_features_are_those_of_transformers(model: LlavaNextForConditionalGeneration) -> None:
    processor = Processor()
    images = [picture(*size) for size in SIZES]
    tiling = Tiling(GRID, model.model.image_newline.detach().numpy())

    found = tiling.encode(images, processor, TowerEncoder(model))  # type: ignore[arg-type]

    inputs = processor.processor(images=images, return_tensors="pt")
    with torch.inference_mode():
        wanted = model.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).pooler_output
    for size, rows, expected in zip(SIZES, found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(rows), expected.numpy(), atol=1e-5, err_msg=str(size))
        assert len(expected) == GRID.num_tokens(*size), size


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_best_resolution_is_that_of_transformers(height: int, width: int) -> None:
    for grid in (GRID, TRUE_GRID):
        assert grid.best_resolution(height, width) == select_best_resolution(
            (height, width), [list(each) for each in grid.resolutions]
        )
        assert grid.num_tokens(height, width) <= grid.most_tokens


def test_sizes_of_the_published_checkpoints() -> None:
    assert TRUE_GRID.num_tokens(672, 672) == 576 + 48 * 49
    assert TRUE_GRID.num_tokens(336, 672) == 576 + 24 * 49
    assert TRUE_GRID.most_tokens == 2928
