"""The encoder by torch, recorded as CUDA graphs against plain, at each batch size."""

from __future__ import annotations

import numpy as np
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from python_backend.transport.cuda import Driver
from python_backend.vision.buckets import BucketedEncoder, to_host
from python_backend.vision.torch_graph import Lane, TorchProgram
from python_backend.vision.tower import VisionEncoder
from tests.device.setting import Setting


def run(setting: Setting) -> dict[str, object]:
    """Milliseconds per batch, plain and recorded, and how far from the floor."""
    sizes = setting.geometry
    module = make(setting)
    cuda = Driver.load(setting.driver).device(0) if setting.device == "cuda" else None
    lane = Lane(setting.torch_device, cuda)
    shape = (3, sizes.image_size, sizes.image_size)
    encoders = {
        name: BucketedEncoder(
            lambda batch: TorchProgram(module, (batch, *shape), setting.dtype, lane),
            sizes.image_size,
            sizes.encode_batches,
            uses_graphs,
        )
        for name, uses_graphs in (("plain", False), ("graphs", setting.device == "cuda"))
    }
    found: dict[str, object] = {"recorded": list(encoders["graphs"].graphs), "batches": {}}
    for batch in sizes.encode_batches:
        pixels = np.random.default_rng(batch).standard_normal((batch, *shape), dtype=np.float32)
        features = {name: _features(encoder, pixels) for name, encoder in encoders.items()}
        scale = abs(features["plain"]).max()
        row = {f"{name}_ms": round(_timed_ms(setting, encoder, pixels), 3) for name, encoder in encoders.items()}
        floor_ms = batch * sizes.encode_flop / setting.flop_per_s * 1e3
        row |= {
            "floor_ms": round(floor_ms, 4),
            "difference": float(abs(features["plain"] - features["graphs"]).max() / scale),
        }
        found["batches"][str(batch)] = row  # type: ignore[index]
    for encoder in encoders.values():
        encoder.close()
    return found


def _timed_ms(setting: Setting, encoder: BucketedEncoder, pixels: np.ndarray) -> float:
    return setting.timed_ms(lambda: encoder.encode(pixels))


def _features(encoder: BucketedEncoder, pixels: np.ndarray) -> np.ndarray:
    return np.stack([to_host(rows) for rows in encoder.encode(pixels)])


def make(setting: Setting) -> VisionEncoder:
    """The tower and projector of the geometry, with random weights."""
    sizes = setting.geometry
    config = CLIPVisionConfig(
        hidden_size=sizes.vision_width,
        intermediate_size=sizes.vision_mlp,
        num_hidden_layers=sizes.vision_layers,
        num_attention_heads=sizes.vision_heads,
        image_size=sizes.image_size,
        patch_size=sizes.patch_size,
    )
    projector = torch.nn.Sequential(
        torch.nn.Linear(sizes.vision_width, sizes.width), torch.nn.GELU(), torch.nn.Linear(sizes.width, sizes.width)
    )
    torch.manual_seed(0)
    encoder = VisionEncoder(CLIPVisionModel(config), projector, sizes.vision_layers - 1, skips_class=True)
    return encoder.to(device=setting.torch_device, dtype=setting.dtype).eval().requires_grad_(False)
