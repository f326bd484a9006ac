"""Builds the encoder: vision tower up to its feature layer, and projector, as one ONNX graph.

The layers behind the feature layer (one of 24 in LLaVA-1.5) are not computed; the result is bit-identical.
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import torch
from transformers import LlavaForConditionalGeneration

from python_backend.checkpoint import CheckpointFacts

logger = logging.getLogger(__name__)

ONNX_FILE = "encoder.onnx"
MANIFEST_FILE = "encoder.json"
LAYOUT = 1  # of the graph: raise it when this file changes what it computes
MAX_BATCH = 64
TOLERANCE = 1e-3  # of the largest feature; float32 differs in the last bits only


class ExportFailed(RuntimeError):
    """The exported graph does not compute what the checkpoint does."""


class Encoder(torch.nn.Module):
    """Pixel values (batch, 3, height, width) to features (batch, tokens, width)."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        tower = model.model.vision_tower
        vision = getattr(tower, "vision_model", tower)
        layers = list(vision.encoder.layers)
        used = _used_layers(model.config.vision_feature_layer, len(layers))
        self.embeddings = vision.embeddings
        self.pre_norm = vision.pre_layrnorm
        self.layers = torch.nn.ModuleList(layers[:used])
        self.projector = model.model.multi_modal_projector
        self.first = 1 if model.config.vision_feature_select_strategy == "default" else 0

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The features of a batch of images."""
        hidden = self.pre_norm(self.embeddings(pixel_values))
        for layer in self.layers:
            output = layer(hidden, None)
            hidden = output[0] if isinstance(output, tuple) else output
        features: torch.Tensor = self.projector(hidden[:, self.first :])
        return features


def _used_layers(feature_layer: object, num_layers: int) -> int:
    """How many layers produce hidden state `feature_layer` (0 is the embedding, -1 the last layer's)."""
    if not isinstance(feature_layer, int):
        raise ExportFailed(f"vision_feature_layer is {feature_layer!r}; one layer is served, not several")
    return feature_layer if feature_layer >= 0 else num_layers + 1 + feature_layer


def is_current(facts: CheckpointFacts, artifacts: Path) -> bool:
    """Whether `artifacts` holds the encoder of this very checkpoint."""
    try:
        manifest = json.loads((artifacts / MANIFEST_FILE).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest == _manifest(facts)) and (artifacts / ONNX_FILE).is_file()


def export(facts: CheckpointFacts, artifacts: Path) -> Path:
    """Writes the encoder of a checkpoint into `artifacts`; its path. Replaces an older one in one step.

    Raises:
        ExportFailed: the graph's features differ from those of `transformers`.
    """
    artifacts.mkdir(parents=True, exist_ok=True)
    model = LlavaForConditionalGeneration.from_pretrained(facts.path, dtype=torch.float32).eval()
    size = model.config.vision_config.image_size
    pixels = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    target, draft = artifacts / ONNX_FILE, artifacts / f".{ONNX_FILE}.draft"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Encoder(model).eval(),
            (pixels,),
            draft,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=MAX_BATCH)},),
            input_names=["pixel_values"],
            output_names=["features"],
            external_data=True,
            verbose=False,
        )
    _verify(model, pixels, draft)
    for path in artifacts.glob(f"{draft.name}*"):  # the graph names its data file: keep that name
        if path != draft:
            path.replace(artifacts / path.name)
    draft.replace(target)
    (artifacts / MANIFEST_FILE).write_text(json.dumps(_manifest(facts)) + "\n")
    logger.info("encoder exported to %s", target)
    return target


def _verify(model: LlavaForConditionalGeneration, pixels: torch.Tensor, path: Path) -> None:
    """Compares the graph with the checkpoint on two different images, at batch 2 and 1."""
    from python_backend.vision.onnx import OnnxEncoder

    with torch.inference_mode():
        wanted = torch.stack(list(model.model.get_image_features(pixel_values=pixels).pooler_output)).numpy()
    encoder = OnnxEncoder(path, num_threads=2)
    scale = float(abs(wanted).max()) or 1.0
    for first, last in ((0, 2), (1, 2)):
        error = float(abs(encoder.encode(pixels[first:last].numpy()) - wanted[first:last]).max()) / scale
        if not error <= TOLERANCE:
            raise ExportFailed(f"the exported encoder differs from the checkpoint by {error:.1e} of its scale")


def _manifest(facts: CheckpointFacts) -> dict[str, object]:
    return {"fingerprint": facts.fingerprint.hex(), "layout": LAYOUT}
