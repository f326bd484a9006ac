"""What a checkpoint folder says about itself, without loading its weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.tiles import TileGrid

PROJECT_ROOT = Path(__file__).resolve().parent.parent
SERVED_TYPES = ("llava", "llava_next")
_SAMPLE_BYTES = 1 << 20
_TEXT_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json")


class CheckpointRefused(ValueError):
    """A folder that is not a LLaVA checkpoint this server can load; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The numbers that requests are checked against."""

    path: Path
    image_token_id: int
    image_tokens: int  # rows that the encoder gives for one tile; of a picture's features, where `grid` is None
    image_size: int  # height and width in pixels
    width: int  # of the language model, and of each row
    context_tokens: int
    fingerprint: bytes  # 16 bytes; equal for equal weights and preprocessing
    grid: TileGrid | None = None  # how pictures of any resolution are cut (LLaVA-NeXT)

    @property
    def most_image_tokens(self) -> int:
        """Rows of the largest features that a picture can have."""
        return self.image_tokens if self.grid is None else self.grid.most_tokens


def resolve(path: str) -> Path:
    """An absolute path; a relative one starts at the project's root."""
    return (PROJECT_ROOT / path).resolve()


def read_facts(checkpoint: Path) -> CheckpointFacts:
    """The facts of a LLaVA-1.5 or LLaVA-NeXT checkpoint in Hugging Face format.

    Raises:
        CheckpointRefused: no such folder, no readable config, or an architecture that is not served.
    """
    from transformers import AutoConfig  # seconds to import: only where needed

    if not (checkpoint / "config.json").is_file():
        raise CheckpointRefused(f"checkpoint {checkpoint}: no config.json there")
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"checkpoint {checkpoint}: {error}") from error
    if config.model_type not in SERVED_TYPES:
        served = ", ".join(map(repr, SERVED_TYPES))
        raise CheckpointRefused(f"checkpoint {checkpoint}: model_type is {config.model_type!r}; served: {served}")
    _check_weights(checkpoint)
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    return CheckpointFacts(
        path=checkpoint,
        image_token_id=config.image_token_id,
        image_tokens=patches + (1 if config.vision_feature_select_strategy == "full" else 0),
        image_size=vision.image_size,
        width=config.text_config.hidden_size,
        context_tokens=config.text_config.max_position_embeddings,
        fingerprint=fingerprint(checkpoint),
        grid=_read_grid(checkpoint, config) if config.model_type == "llava_next" else None,
    )


def _read_grid(checkpoint: Path, config: Any) -> TileGrid:
    vision, strategy = config.vision_config, config.vision_feature_select_strategy
    if strategy != "default":
        raise CheckpointRefused(
            f"checkpoint {checkpoint}: vision_feature_select_strategy is {strategy!r}; of tiles 'default' is served"
        )
    resolutions = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
    if not resolutions or any(
        size < vision.image_size or size % vision.image_size for each in resolutions for size in each
    ):
        raise CheckpointRefused(
            f"checkpoint {checkpoint}: image_grid_pinpoints {list(resolutions)} are not multiples of the encoder's "
            f"{vision.image_size}"
        )
    return TileGrid(resolutions, vision.image_size, vision.image_size // vision.patch_size)


def _check_weights(checkpoint: Path) -> None:
    """Reads the headers of the weight files: a file that was cut short is found before anything is loaded."""
    from safetensors import SafetensorError, safe_open

    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise CheckpointRefused(f"checkpoint {checkpoint}: no *.safetensors file there")
    for path in files:
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointRefused(f"checkpoint {path}: damaged or cut short: {error}") from error


def fingerprint(checkpoint: Path) -> bytes:
    """16 bytes that change with the weights, the configuration or the preprocessing.

    Of each weight file its name, size, and first and last MiB are hashed: a 14 GB checkpoint takes milliseconds.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in _TEXT_FILES:
        path = checkpoint / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    for path in sorted(checkpoint.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
