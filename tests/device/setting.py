"""What a run is about: the device, and the sizes of the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Geometry:
    """Sizes of a LLaVA, and what its runs are made of."""

    image_size: int
    patch_size: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    vision_mlp: int
    width: int
    mlp: int
    layers: int
    heads: int
    vocabulary: int
    context_tokens: int  # of each decoding sequence
    prompt_tokens: int
    encode_batches: tuple[int, ...]
    decode_batches: tuple[int, ...]
    repeats: int

    @property
    def image_tokens(self) -> int:
        """Rows of one image's features."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def encode_flop(self) -> float:
        """Of one image: the tower's layers up to the one before the last, and the projector."""
        tokens, width = self.image_tokens + 1, self.vision_width
        layer = tokens * (8 * width * width + 4 * width * self.vision_mlp) + 4 * tokens * tokens * width
        projector = 2 * self.image_tokens * (width * self.width + self.width * self.width)
        return (self.vision_layers - 1) * layer + projector

    @property
    def num_parameters(self) -> int:
        """Of the language model, as a decode step reads them."""
        layer = 4 * self.width * self.width + 3 * self.width * self.mlp
        return self.layers * layer + self.vocabulary * self.width


GEOMETRIES = {
    "llava-1.5-7b": Geometry(
        *(336, 14, 1024, 24, 16, 4096), *(4096, 11008, 32, 32, 32064), 700, 640, (1, 2, 4, 8), (1, 8, 32, 64), 30
    ),
    "tiny": Geometry(*(56, 14, 32, 3, 2, 64), *(64, 128, 2, 4, 260), 40, 24, (1, 2), (1, 3), 3),
}


@dataclass(frozen=True)
class Setting:
    """One run."""

    device: str  # "cuda" or "cpu"
    geometry: Geometry
    driver: str

    @property
    def torch_device(self) -> torch.device:
        """Where torch computes."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Half precision on a GPU."""
        return torch.float16 if self.device == "cuda" else torch.float32

    @property
    def flop_per_s(self) -> float:
        """Dense, of the H200 (facts of its maker); a CPU's floor means nothing."""
        return 989e12

    @property
    def bytes_per_s(self) -> float:
        """Of the H200's memory."""
        return 4.8e12

    def timed_ms(self, work: Callable[[], object], repeats: int | None = None) -> float:
        """The median of some runs after three to warm up, waited for one by one."""
        for _ in range(3):
            work()
        times = []
        for _ in range(repeats or self.geometry.repeats):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append((time.perf_counter() - began) * 1e3)
        return sorted(times)[len(times) // 2]

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.device == "cuda":
            torch.cuda.synchronize()
