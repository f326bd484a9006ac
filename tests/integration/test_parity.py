"""The server's greedy answers are those of `transformers`, token for token, alone and together."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoTokenizer, LlavaForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from client import RelayClient
from demo.pictures import draw_scene, from_jpeg, render, to_jpeg
from demo.questions import ask
from launcher.server import Server
from tests.integration.observe import assert_idle

CHECKPOINT = "demo/checkpoint"
NUM_PICTURES = 50
MAX_TOKENS = 24
IMAGE_TOKENS = 576


@dataclass(frozen=True)
class Case:
    """A JPEG file, a raw prompt, and the token ids that `transformers` answers with."""

    picture: bytes
    prompt: str
    token_ids: list[int]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Pictures of several sizes with a question each, answered by `transformers` in float32."""
    model = LlavaForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    processor = CLIPImageProcessorPil.from_pretrained(CHECKPOINT)
    chance = random.Random(20_000)
    found = []
    for index in range(NUM_PICTURES):
        scene = draw_scene(chance)
        size = ((336, 336), (640, 480), (480, 640), (200, 200))[index % 4]
        picture = to_jpeg(render(scene, *size))
        prompt = f"USER: <image>\n{chance.choice(ask(scene, chance)).text} ASSISTANT:"
        ids = []
        for token_id in tokenizer.encode(prompt):
            ids += [token_id] * (IMAGE_TOKENS if token_id == model.config.image_token_id else 1)
        pixels = processor(images=[from_jpeg(picture)], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            output = model.generate(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                pixel_values=pixels,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
            )
        found.append(Case(picture, prompt, output[0, len(ids) :].tolist()))
    return found


def test_fifty_pictures_one_at_a_time(client: RelayClient, cases: list[Case]) -> None:
    assert [_token_ids(client, case) for case in cases] == [case.token_ids for case in cases]


def test_fifty_pictures_sixteen_together(server: Server, cases: list[Case]) -> None:
    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda case: _token_ids(client, case), cases))
    assert answers == [case.token_ids for case in cases]
    assert_idle(server)


def _token_ids(client: RelayClient, case: Case) -> list[int]:
    """The answer's token ids: with logprobs 0, each place has exactly the chosen token."""
    answer = client.ask(case.prompt, raw=True, images=[case.picture], max_tokens=MAX_TOKENS, logprobs=0)
    return [alternatives[0].token_id for alternatives in answer.logprobs]
