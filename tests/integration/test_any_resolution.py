"""A LLaVA-NeXT checkpoint on a Mistral text model: the server's greedy answers are those of `transformers`."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MistralConfig,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from client import RelayClient
from launcher.serve import plan_of, running
from launcher.server import Server
from tests.integration.observe import assert_idle

DEMO = Path("demo/checkpoint")
TILE, MAX_TOKENS = 56, 16
GRID = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
# (width, height) of the pictures of each prompt
PROMPTS = {
    "portrait": [(60, 130)],
    "landscape": [(300, 120)],
    "square": [(200, 200)],
    "tiny": [(3, 2)],
    "huge": [(2300, 1700)],
    "long": [(20, 900)],
    "several": [(90, 60), (40, 200), (500, 500)],
    "none": [],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random one with weights wide enough that answers vary, and the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("next")
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=TILE, patch_size=14
    )
    text = MistralConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        sliding_window=None,
    )
    config = LlavaNextConfig(vision_config=vision, text_config=text, image_grid_pinpoints=GRID, image_token_index=3)
    torch.manual_seed(3)
    model = LlavaNextForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=3 * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3)
    model.save_pretrained(folder)
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": TILE}, crop_size={"height": TILE, "width": TILE}, image_grid_pinpoints=GRID
    )
    processor.save_pretrained(folder)
    for path in DEMO.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    profile = tmp_path_factory.mktemp("profile") / "next.toml"
    artifacts = tmp_path_factory.mktemp("artifacts")
    profile.write_text(f'[model]\ncheckpoint = "{checkpoint}"\nartifacts = "{artifacts}"\n[decode]\nthreads = 1\n')
    lines: list[str] = []
    with (
        (artifacts / "server.log").open("w") as log,
        running(plan_of(profile, None), ("127.0.0.1", 0, 0, 0), dict(os.environ), lines.append, log) as started,
    ):
        yield started
        assert_idle(started)


def picture(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(height * 5000 + width).integers(0, 255, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_answers_are_those_of_transformers(server: Server, checkpoint: Path) -> None:
    pictures = {name: [picture(*size) for size in sizes] for name, sizes in PROMPTS.items()}
    wanted = answers_of_transformers(checkpoint, pictures)

    def ask(name: str) -> tuple[list[int], int]:
        answer = client.ask(
            text_of(name), raw=True, images=[as_png(each) for each in pictures[name]], max_tokens=MAX_TOKENS, logprobs=0
        )
        return [each[0].token_id for each in answer.logprobs], answer.num_input_tokens or 0

    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client, ThreadPoolExecutor(8) as pool:
        assert dict(zip(PROMPTS, pool.map(ask, PROMPTS), strict=True)) == wanted
        assert {name: ask(name) for name in reversed(PROMPTS)} == wanted  # alone, from the embedding store
    assert len({tuple(ids) for ids, _ in wanted.values()}) > 4, "the answers hardly differ: they prove little"


def text_of(name: str) -> str:
    return "USER: " + "<image>\n" * len(PROMPTS[name]) + f"Is it {name}? ASSISTANT:"


def answers_of_transformers(
    checkpoint: Path, pictures: dict[str, list[Image.Image]]
) -> dict[str, tuple[list[int], int]]:
    """The token ids of each answer, and the length of its prompt."""
    model = LlavaNextForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = LlavaNextImageProcessorPil.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "llava_next"
    found = {}
    for name, images in pictures.items():
        inputs = dict(processor(images=images, return_tensors="pt")) if images else {}
        with torch.inference_mode():
            lengths = [len(each) for each in model.get_image_features(**inputs).pooler_output] if images else []
            counts, ids = iter(lengths), []
            for token_id in tokenizer.encode(text_of(name)):
                ids += [token_id] * (next(counts) if token_id == model.config.image_token_id else 1)
            output = model.generate(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                **inputs,
            )
        found[name] = (output[0, len(ids) :].tolist(), len(ids))
    return found
