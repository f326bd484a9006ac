"""Builds the encoder: vision tower up to its feature layer, and projector, as one ONNX graph.

The layers behind the feature layer (one of 24 in LLaVA-1.5) are not computed; the result is bit-identical. In float16
the graph is for TensorRT, which then computes it in exactly the types that it has (its "strongly typed" networks).
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForImageTextToText

from python_backend.checkpoint import CheckpointFacts
from python_backend.vision.buckets import to_host
from python_backend.vision.tower import load_encoder

logger = logging.getLogger(__name__)

Precision = Literal["float32", "float16"]

ONNX_FILE = "encoder.onnx"
MANIFEST_FILE = "encoder.json"
LAYOUT = 1  # of the graph: raise it when this file changes what it computes
MAX_BATCH = 64
# Of the largest feature: float32 differs in the last bits only, float16 after 24 layers by a few parts in a thousand.
TOLERANCE: dict[Precision, float] = {"float32": 1e-3, "float16": 2e-2}


class ExportFailed(RuntimeError):
    """The exported graph does not compute what the checkpoint does."""


def onnx_file(precision: Precision = "float32") -> str:
    """The name of the graph in the artifacts' folder."""
    return ONNX_FILE if precision == "float32" else f"encoder.{precision}.onnx"


def manifest_file(precision: Precision = "float32") -> str:
    """The name of the file that says what the graph was made from."""
    return MANIFEST_FILE if precision == "float32" else f"encoder.{precision}.json"


def is_current(facts: CheckpointFacts, artifacts: Path, precision: Precision = "float32") -> bool:
    """Whether `artifacts` holds the encoder of this very checkpoint."""
    try:
        manifest = json.loads((artifacts / manifest_file(precision)).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest == _manifest(facts)) and (artifacts / onnx_file(precision)).is_file()


def export(facts: CheckpointFacts, artifacts: Path, precision: Precision = "float32") -> Path:
    """Writes the encoder of a checkpoint into `artifacts`; its path. Replaces an older one in one step.

    Raises:
        ExportFailed: the graph's features differ from those of `transformers` (in float16: from the float32 modules').
        CheckpointRefused: the encoder's tensors are not all there.
    """
    artifacts.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, precision)
    encoder = load_encoder(facts.path, dtype, torch.device("cpu"))
    size = facts.image_size
    pixels = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    name = onnx_file(precision)
    target, draft = artifacts / name, artifacts / f".{name}.draft"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            encoder,
            (pixels.to(dtype),),
            draft,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=MAX_BATCH)},),
            input_names=["pixel_values"],
            output_names=["features"],
            external_data=True,
            verbose=False,
        )
    _verify(_wanted(facts, pixels, precision), pixels, draft, precision)
    for path in artifacts.glob(f"{draft.name}*"):  # the graph names its data file: keep that name
        if path != draft:
            path.replace(artifacts / path.name)
    draft.replace(target)
    (artifacts / manifest_file(precision)).write_text(json.dumps(_manifest(facts)) + "\n")
    logger.info("encoder exported to %s", target)
    return target


def _wanted(facts: CheckpointFacts, pixels: torch.Tensor, precision: Precision) -> npt.NDArray[np.float32]:
    """The features that the graph must give."""
    with torch.inference_mode():
        if precision != "float32":
            found: npt.NDArray[np.float32] = load_encoder(facts.path, torch.float32, torch.device("cpu"))(
                pixels
            ).numpy()
            return found
        model = AutoModelForImageTextToText.from_pretrained(facts.path, dtype=torch.float32).eval()
        config, parts = model.config, model.model
        states = parts.vision_tower(pixels, output_hidden_states=True).hidden_states[config.vision_feature_layer]
        first = 1 if config.vision_feature_select_strategy == "default" else 0
        wanted: npt.NDArray[np.float32] = parts.multi_modal_projector(states[:, first:]).numpy()
        return wanted


def _verify(wanted: npt.NDArray[np.float32], pixels: torch.Tensor, path: Path, precision: Precision) -> None:
    """Compares the graph's features of two different images with those wanted, at batch 2 and 1."""
    from python_backend.vision.onnx import OnnxEncoder

    encoder = OnnxEncoder(path, num_threads=2)
    scale = float(abs(wanted).max()) or 1.0
    for first, last in ((0, 2), (1, 2)):
        found = np.stack([to_host(rows) for rows in encoder.encode(pixels[first:last].numpy())])
        error = float(abs(found - wanted[first:last]).max()) / scale
        if not error <= TOLERANCE[precision]:
            raise ExportFailed(f"the exported encoder differs from the checkpoint by {error:.1e} of its scale")


def _manifest(facts: CheckpointFacts) -> dict[str, object]:
    return {"fingerprint": facts.fingerprint.hex(), "layout": LAYOUT}
