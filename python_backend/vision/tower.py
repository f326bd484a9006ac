"""The vision encoder of a checkpoint, read from its files alone: the language model is never loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, CLIPVisionModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from python_backend.checkpoint import CheckpointRefused
from python_backend.weights import BadCheckpoint, TensorFiles

# What checkpoints call the two parts, in the order they are looked for: the hub's, and what transformers saves.
TOWER_PREFIXES = (
    "vision_tower.vision_model.",
    "model.vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.",
)
PROJECTOR_PREFIXES = ("multi_modal_projector.", "model.multi_modal_projector.")


class VisionEncoder(torch.nn.Module):
    """Pixel values (batch, 3, height, width) to features (batch, tokens, width): the tower's used layers, projector."""

    def __init__(self, tower: CLIPVisionModel, projector: torch.nn.Module, num_layers: int, skips_class: bool) -> None:
        super().__init__()
        vision = getattr(tower, "vision_model", tower)
        self.embeddings = vision.embeddings
        self.pre_norm = vision.pre_layrnorm
        self.layers = torch.nn.ModuleList(list(vision.encoder.layers)[:num_layers])
        self.projector = projector
        self.first = 1 if skips_class else 0

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The features of a batch of images."""
        hidden = self.pre_norm(self.embeddings(pixel_values))
        for layer in self.layers:
            output = layer(hidden, None)
            hidden = output[0] if isinstance(output, tuple) else output
        features: torch.Tensor = self.projector(hidden[:, self.first :])
        return features


def used_layers(feature_layer: object, num_layers: int) -> int:
    """How many layers produce hidden state `feature_layer` (0 is the embedding, -1 the last layer's).

    Raises:
        CheckpointRefused: not one layer.
    """
    if not isinstance(feature_layer, int):
        raise CheckpointRefused(f"vision_feature_layer is {feature_layer!r}; one layer is served, not several")
    return feature_layer if feature_layer >= 0 else num_layers + 1 + feature_layer


def load_encoder(checkpoint: Path, dtype: torch.dtype, device: torch.device) -> VisionEncoder:
    """The encoder's modules with their weights in `dtype` on `device`, for inference.

    Raises:
        CheckpointRefused: a tensor is missing or of the wrong shape.
    """
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    with torch.device("meta"):
        tower, projector = CLIPVisionModel(config.vision_config), LlavaMultiModalProjector(config)
        num_layers = used_layers(config.vision_feature_layer, config.vision_config.num_hidden_layers)
        encoder = VisionEncoder(tower, projector, num_layers, config.vision_feature_select_strategy == "default")
    encoder.to_empty(device=device)
    for name, buffer in encoder.named_buffers():  # not in the files: the numbers of the positions
        assert name == "embeddings.position_ids", name
        buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
    encoder.to(dtype).eval().requires_grad_(False)
    with TensorFiles(checkpoint) as files, torch.inference_mode(False):
        for name, parameter in encoder.named_parameters():
            found = next((each for each in _names(name) if each in files), None)
            if found is None:
                raise CheckpointRefused(f"checkpoint {checkpoint}: no tensor {next(_names(name))!r} in its files")
            try:
                parameter.data.copy_(files.read(found, tuple(parameter.shape)))
            except BadCheckpoint as error:
                raise CheckpointRefused(str(error)) from error
    return encoder


def _names(name: str) -> Iterator[str]:
    """What a file may call a parameter of the encoder."""
    part, _, rest = name.partition(".")
    if part == "projector":
        yield from (f"{prefix}{rest}" for prefix in PROJECTOR_PREFIXES)
        return
    inner = {"embeddings": "embeddings", "pre_norm": "pre_layrnorm", "layers": "encoder.layers"}[part]
    yield from (f"{prefix}{inner}.{rest}" for prefix in TOWER_PREFIXES)
