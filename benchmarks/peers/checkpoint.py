"""A random LLaVA-1.5 that every peer loads: names as the hub has them, a tokenizer and processor that can be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.decoder_step import GEOMETRIES, VOCABULARY, write_checkpoint
from python_backend.checkpoint import PROJECT_ROOT

BORROWED = PROJECT_ROOT / "demo" / "checkpoint"


def write_for_peers(geometry: str, folder: Path) -> None:
    """The checkpoint of a geometry in `folder`, with the demo's tokenizer and image processor."""
    write_checkpoint(GEOMETRIES[geometry], folder)
    for path in BORROWED.iterdir():
        if "token" in path.name or path.suffix == ".jinja" or path.name.endswith("processor_config.json"):
            shutil.copy(path, folder)
    _name_all_tokens(folder / "tokenizer.json")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {_hub_name(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))


def _name_all_tokens(path: Path) -> None:
    """Gives a word to every token that the model may choose: a random one chooses any, and answers shall have text."""
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"\u0120w{index}": index for index in range(max(words.values()) + 1, VOCABULARY)}
    path.write_text(json.dumps(tokenizer))


def _hub_name(name: str) -> str:
    own, _, rest = name.partition("vision_tower.")
    return f"{own}vision_tower.vision_model.{rest}" if rest and not rest.startswith("vision_model.") else name
