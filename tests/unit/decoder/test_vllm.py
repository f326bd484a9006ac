"""The vLLM engine gives the answers of this project's own, where vLLM is installed (build/vllm)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from python_backend.decoder.options import EngineOptions
from python_backend.decoder.sequence import DecodeRequest, ImageEmbedding
from python_backend.decoder.vllm_engine import EngineMissing, VllmEngine
from python_backend.request import SamplingParameters
from tests.unit.decoder.conftest import Receiver, StartEngine

ROOT = Path(__file__).parents[3]
VLLM = ROOT / "build" / "vllm" / "bin" / "python"
IMAGE, IMAGE_TOKENS, WIDTH = 3, 16, 128


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random one with heads of a width that vLLM computes, under the hub's names, with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("vllm")
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=336, patch_size=84
    )
    text = LlamaConfig(
        vocab_size=1024,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(5)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=IMAGE_TOKENS)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=3 * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    hub = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    save_file(hub, folder / "model.safetensors", {"format": "pt"})
    for path in (ROOT / "demo" / "checkpoint").iterdir():
        if "token" in path.name or path.suffix == ".jinja" or path.name.endswith("processor_config.json"):
            shutil.copy(path, folder)
    settings = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(settings | {"patch_size": 84}))
    return folder


def requests() -> dict[str, tuple[list[int], list[torch.Tensor], dict[str, object]]]:
    """Prompts with none, one and two images; one that stops early, one that is cancelled, one that is too long."""
    generator = torch.Generator().manual_seed(1)

    def features(count: int) -> list[torch.Tensor]:
        return [torch.randn(IMAGE_TOKENS, WIDTH, generator=generator) for _ in range(count)]

    plain: dict[str, object] = {"max_tokens": 16, "ignore_eos": True}
    return {
        "text": ([1, 20, 30, 40], [], plain),
        "image": ([1, IMAGE, 50, 60], features(1), plain),
        "images": ([1, IMAGE, 50, IMAGE, 60], features(2), plain),
        "logprobs": ([1, 70, IMAGE], features(1), plain | {"logprobs": 2}),
        "cancelled": ([1, 20, 31], [], {"max_tokens": 400, "ignore_eos": True}),
        "long": ([1] * 600, [], plain),
    }


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed in build/vllm")
def test_vllm_answers_as_the_own_engine(start_engine: StartEngine, checkpoint: Path, tmp_path: Path) -> None:
    asked = requests()
    torch.save(asked, tmp_path / "requests.pt")
    command = [
        str(VLLM),
        str(Path(__file__).with_name("vllm_answers.py")),
        str(checkpoint),
        str(tmp_path / "requests.pt"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    told = [line for line in process.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert told, process.stderr[-3000:]
    found = json.loads(told[0].removeprefix("ANSWERS "))

    harness = start_engine(checkpoint, num_blocks=400)
    for name in ("text", "image", "images", "logprobs"):
        ids, features, values = asked[name]
        receiver = Receiver()
        images = tuple(ImageEmbedding(name.encode(), each) for each in features)
        sampling = SamplingParameters(**values)  # type: ignore[arg-type]
        harness.engine.submit(DecodeRequest(name, tuple(ids), images, sampling), receiver)
        answer = found["answers"][name]
        assert tuple(answer["token_ids"]) == receiver.token_ids()
        assert (answer["text"], answer["finish_reason"]) == (receiver.text(), "length")
        own = [each.logprob for delta in receiver.deltas for each in delta.logprobs]
        assert answer["logprobs"] == pytest.approx(own, abs=5e-3)
    assert found["answers"]["cancelled"]["error"] == "[CANCELLED] cancelled: cancelled"
    assert len(found["answers"]["cancelled"]["token_ids"]) < 400
    assert found["refused"].keys() == {"long"}


def test_without_vllm_it_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(EngineMissing, match="engine 'vllm' needs vLLM in this environment"):
        VllmEngine.load(checkpoint, EngineOptions(), lambda: 0.0)
