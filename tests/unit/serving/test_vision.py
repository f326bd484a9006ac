"""Pixels are those of the checkpoint's own processor, features those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, LlavaForConditionalGeneration

from python_backend.checkpoint import CheckpointFacts, CheckpointRefused, read_facts
from python_backend.transport.segment import Rows
from python_backend.vision import export as exporting
from python_backend.vision.buckets import to_host
from python_backend.vision.export import MANIFEST_FILE, ONNX_FILE, ExportFailed, export, is_current
from python_backend.vision.onnx import OnnxEncoder
from python_backend.vision.preprocess import Preprocessor
from python_backend.vision.tower import load_encoder, used_layers

SIZES = [(336, 336), (30, 20), (500, 200), (200, 500), (1, 1), (3, 50), (1, 100)]


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.fixture(scope="session")
def preprocessor(checkpoint: Path) -> Preprocessor:
    return Preprocessor(checkpoint)


@pytest.fixture(scope="session")
def artifacts(facts: CheckpointFacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the exported encoder."""
    return export(facts, tmp_path_factory.mktemp("artifacts")).parent


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Iterator[LlavaForConditionalGeneration]:
    """The reference."""
    return LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


def test_pixels_are_those_of_the_checkpoints_processor(checkpoint: Path, preprocessor: Preprocessor) -> None:
    images = [picture(size, seed) for seed, size in enumerate(SIZES)]
    processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    wanted = np.concatenate([processor(images=image, return_tensors="np")["pixel_values"] for image in images])

    pixels = preprocessor.pixels(images)

    assert (pixels.shape, pixels.dtype) == ((len(SIZES), 3, 336, 336), np.float32)
    np.testing.assert_array_equal(pixels, wanted)


def test_a_folder_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused) as refused:
        Preprocessor(tmp_path)
    assert str(refused.value).startswith(f"checkpoint {tmp_path}: its image processor cannot be read: ")


@pytest.mark.parametrize("batch", [1, 3])
def test_features_are_those_of_transformers(
    artifacts: Path, model: LlavaForConditionalGeneration, preprocessor: Preprocessor, batch: int
) -> None:
    pixels = preprocessor.pixels([picture((60, 40), seed) for seed in range(batch)])
    with torch.inference_mode():
        output = model.model.get_image_features(pixel_values=torch.from_numpy(pixels))
    wanted = torch.stack(list(output.pooler_output)).numpy()

    features = np.stack([np.asarray(rows) for rows in OnnxEncoder(artifacts / ONNX_FILE, num_threads=1).encode(pixels)])

    assert features.dtype == np.float32
    np.testing.assert_allclose(features, wanted, rtol=0, atol=1e-4 * float(abs(wanted).max()))


def test_an_image_has_the_same_features_in_any_batch(artifacts: Path, preprocessor: Preprocessor) -> None:
    pixels = preprocessor.pixels([picture((60, 40), seed) for seed in range(3)])
    encoder = OnnxEncoder(artifacts / ONNX_FILE, num_threads=1)

    together = encoder.encode(pixels)

    for index in range(3):
        alone = to_host(encoder.encode(pixels[index : index + 1])[0])
        np.testing.assert_allclose(to_host(together[index]), alone, rtol=0, atol=1e-5 * float(abs(alone).max()))


def test_an_encoder_is_current_for_its_own_checkpoint_only(facts: CheckpointFacts, artifacts: Path) -> None:
    changed = replace(facts, fingerprint=bytes(16))

    assert is_current(facts, artifacts)
    assert not is_current(changed, artifacts)


def test_a_changed_weight_makes_the_encoder_stale(checkpoint: Path, artifacts: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))

    assert not is_current(read_facts(folder), artifacts)


@pytest.mark.parametrize("damage", ["no manifest", "no graph", "broken manifest", "another layout"])
def test_what_is_not_whole_is_not_current(facts: CheckpointFacts, artifacts: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(artifacts, tmp_path / "artifacts")
    manifest = folder / MANIFEST_FILE
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "no graph":
        (folder / ONNX_FILE).unlink()
    elif damage == "broken manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "layout": 0}))

    assert not is_current(facts, folder)


class Wrong:
    """An encoder whose features are a little off."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self._right = OnnxEncoder(path, num_threads)

    def encode(self, pixels: npt.NDArray[np.float32]) -> list[Rows]:
        return [to_host(rows) * np.float32(1.01) for rows in self._right.encode(pixels)]


def test_a_graph_that_computes_something_else_is_not_kept(
    facts: CheckpointFacts, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("python_backend.vision.onnx.OnnxEncoder", Wrong)
    pixels = torch.rand(2, 3, 336, 336, generator=torch.Generator().manual_seed(0))
    wanted = exporting._wanted(facts, pixels, "float32")

    with pytest.raises(ExportFailed, match=r"^the exported encoder differs from the checkpoint by 1\.0e-02"):
        exporting._verify(wanted, pixels, artifacts / ONNX_FILE, "float32")


@pytest.mark.parametrize(("layer", "used"), [(-2, 3), (-1, 4), (0, 0), (4, 4), (-5, 0)])
def test_layers_behind_the_feature_layer_are_not_computed(layer: int, used: int) -> None:
    assert used_layers(layer, 4) == used


def test_several_feature_layers_are_refused() -> None:
    with pytest.raises(CheckpointRefused, match=r"vision_feature_layer is \[-2, -1\]; one layer is served"):
        used_layers([-2, -1], 4)


def test_the_encoder_read_from_the_files_alone_is_that_of_transformers(
    checkpoint: Path, model: LlavaForConditionalGeneration
) -> None:
    pixels = torch.rand(2, 3, 336, 336, generator=torch.Generator().manual_seed(5))

    with torch.inference_mode():
        found = load_encoder(checkpoint, torch.float32, torch.device("cpu"))(pixels)
        wanted = torch.stack(list(model.model.get_image_features(pixel_values=pixels).pooler_output))

    assert torch.equal(found, wanted)


def test_a_checkpoint_without_its_projector_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if "linear_2" not in name}
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(CheckpointRefused, match=r"no tensor 'multi_modal_projector\.linear_2\.weight' in its files"):
        load_encoder(folder, torch.float32, torch.device("cpu"))
