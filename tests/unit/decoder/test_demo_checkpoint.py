"""The shipped checkpoint gives transformers' greedy answers, alone and together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, LlavaForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from python_backend.decoder.engine import DecodeRequest, ImageEmbedding
from python_backend.decoder.native import load_library
from python_backend.request import SamplingParameters
from tests.unit.decoder.conftest import Harness, Receiver, StartEngine

DEMO = Path(__file__).parents[3] / "demo" / "checkpoint"
QUESTIONS = ("What is in the picture?", "What color is the circle?")
MAX_TOKENS = 12

pytestmark = pytest.mark.skipif(not (DEMO / "model.safetensors").exists(), reason="no demo checkpoint here")


@pytest.fixture(scope="module")
def reference() -> LlavaForConditionalGeneration:
    """The shipped model in float32."""
    return LlavaForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32).eval()


def test_answers_about_pictures_equal_transformers(
    reference: LlavaForConditionalGeneration, start_engine: StartEngine
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    pixels = torch.randn(2, 3, 336, 336, generator=torch.Generator().manual_seed(1)).clamp(-1.5, 1.5)
    image_token = reference.config.image_token_index
    prompts, expected = [], []
    with torch.inference_mode():
        features = reference.get_image_features(pixel_values=pixels).pooler_output
        for picture in range(2):
            for question in QUESTIONS:
                content = [{"type": "image"}, {"type": "text", "text": question}]
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
                )
                ids = tokenizer(text).input_ids
                inputs = torch.tensor([[each for i in ids for each in [i] * (576 if i == image_token else 1)]])
                output = reference.generate(
                    input_ids=inputs,
                    attention_mask=torch.ones_like(inputs),
                    pixel_values=pixels[picture : picture + 1],
                    do_sample=False,
                    max_new_tokens=MAX_TOKENS,
                )
                prompts.append((tuple(ids), picture))
                expected.append(tuple(output[0, inputs.shape[1] :].tolist()))
    harness = start_engine(DEMO, num_blocks=600, block_tokens=16, max_step_tokens=700)

    def submit(index: int, request_id: str) -> Receiver:
        ids, picture = prompts[index]
        image = ImageEmbedding(bytes([picture]), features[picture].clone())
        receiver = Receiver()
        sampling = SamplingParameters(max_tokens=MAX_TOKENS)
        harness.engine.submit(DecodeRequest(request_id, ids, (image,), sampling), receiver)
        return receiver

    alone = [submit(index, "alone").token_ids() for index in range(len(prompts))]
    together = [receiver.token_ids() for receiver in [submit(i, str(i)) for i in range(len(prompts))]]

    assert alone == expected
    assert together == expected


@pytest.mark.skipif(load_library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_weights_answer_about_the_shipped_picture_alike(
    reference: LlavaForConditionalGeneration, start_engine: StartEngine, dtype: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    processor = CLIPImageProcessorPil.from_pretrained(DEMO)
    with Image.open(DEMO.parent / "picture.jpg") as picture:
        pixels = processor(images=[picture.convert("RGB")], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        image = ImageEmbedding(b"picture", reference.get_image_features(pixel_values=pixels).pooler_output[0].clone())
    options = {"num_blocks": 200, "block_tokens": 16, "max_step_tokens": 700}
    engines = start_engine(DEMO, **options), start_engine(DEMO, dtype=dtype, weights="int8", **options)

    def ask(harness: Harness, question: str) -> tuple[list[float], tuple[int, ...]]:
        ids = tuple(tokenizer(f"USER: <image>\n{question} ASSISTANT:").input_ids)
        receiver, sampling = Receiver(), SamplingParameters(max_tokens=MAX_TOKENS, logprobs=0)
        harness.engine.submit(DecodeRequest(question, ids, (image,), sampling), receiver)
        deltas = receiver.wait()
        return [each.logprob for delta in deltas for each in delta.logprobs], receiver.token_ids()

    for question in QUESTIONS:
        (exact, tokens), (rounded, same) = (ask(harness, question) for harness in engines)
        assert same == tokens
        assert rounded == pytest.approx(exact, abs=0.05)
        assert rounded != exact, "int8 weights were not used"
