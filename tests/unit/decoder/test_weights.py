"""Checkpoints in every layout give the same tensors, and broken ones one clear error."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

from python_backend.weights import BadCheckpoint, DecoderWeights, read_config, read_weights
from tests.unit.decoder.conftest import EOS, IMAGE, VOCABULARY, WIDTH, edit_json, random_model, save

HUB_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
LAYER = "model.language_model.layers.1.mlp.down_proj.weight"


def read(folder: Path) -> DecoderWeights:
    weights = read_weights(folder, read_config(folder), torch.float32, torch.device("cpu"))
    return replace(weights, layers=iter(list(weights.layers)))


def rewrite(folder: Path, change: object) -> None:
    """Save the folder's tensors again under the names, or without those, that `change` gives."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors), file, {"format": "pt"})  # type: ignore[operator]


@pytest.fixture
def folder(model: LlavaForConditionalGeneration, tmp_path: Path) -> Path:
    """A checkpoint to be broken; in the layout that transformers saves by itself, whichever it is."""
    folder = save(model, tmp_path)
    rewrite(folder, lambda tensors: {to_new_name(name): tensor for name, tensor in tensors.items()})
    return folder


def to_new_name(name: str) -> str:
    name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
    return re.sub(r"^language_model\.lm_head\.", "lm_head.", name)


def to_hub_name(name: str) -> str:
    for pattern, replacement in HUB_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def test_the_config_has_the_models_shape(checkpoint: Path) -> None:
    config = read_config(checkpoint)

    assert (config.vocab_size, config.width, config.num_layers) == (VOCABULARY, WIDTH, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_width) == (4, 2, 16)
    assert (config.image_token_id, config.eos_ids, config.max_position_tokens) == (IMAGE, {EOS}, 256)
    assert config.rope_frequencies == pytest.approx([10000 ** (-index / 8) for index in range(8)], rel=1e-6)


def test_both_name_layouts_give_the_same_tensors(folder: Path, model: LlavaForConditionalGeneration) -> None:
    new = read(folder)
    rewrite(folder, lambda tensors: {to_hub_name(name): tensor for name, tensor in tensors.items()})
    old = read(folder)

    assert torch.equal(old.head, model.lm_head.weight)
    attention = model.model.language_model.layers[1].self_attn
    stacked = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    for weights in (old, new):
        assert torch.equal(list(weights.layers)[1].qkv, stacked)


def test_a_sharded_checkpoint_is_read(model: LlavaForConditionalGeneration, tmp_path: Path) -> None:
    folder = save(model, tmp_path, max_shard_size="100KB")

    weights = read(folder)

    assert len(list(folder.glob("*.safetensors"))) > 2
    assert torch.equal(weights.embedding, model.model.language_model.embed_tokens.weight)


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    weights = read(save(random_model(tie_word_embeddings=True), tmp_path))

    assert weights.head is weights.embedding


def test_old_rope_theta_is_understood(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    text = content["text_config"]
    text.pop("rope_parameters")
    text["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(content))

    assert read_config(folder).rope_frequencies[1] == pytest.approx(500 ** (-1 / 8), rel=1e-6)


def test_a_sparse_text_config_gets_the_librarys_defaults(folder: Path) -> None:
    edit_json(folder / "config.json", text_config={"model_type": "llama", "vocab_size": 32064})

    config = read_config(folder)

    assert (config.vocab_size, config.width, config.num_layers, config.num_kv_heads) == (32064, 4096, 32, 32)
    assert config.norm_epsilon == 1e-6


@pytest.mark.parametrize(("eos", "expected"), [([2, 7], {2, 7}), (7, {7}), (None, {EOS})])
def test_end_tokens_come_from_the_generation_config(folder: Path, eos: object, expected: set[int]) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=eos)

    assert read_config(folder).eos_ids == expected


def without(name: str) -> object:
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(LAYER), f"no tensor '{LAYER}'"),
        (without("lm_head.weight"), "no tensor 'lm_head.weight'"),
        (without("model.language_model.embed_tokens.weight"), "no embedding"),
        (
            lambda tensors: tensors | {LAYER: torch.zeros(3, 4)},
            rf"model\.safetensors: tensor '{LAYER}' is \(3, 4\), expected \(64, 128\)",
        ),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(folder: Path, change: object, message: str) -> None:
    rewrite(folder, change)

    with pytest.raises(BadCheckpoint, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "gpt2"}, r"config\.json: language model type 'gpt2'; allowed: llama, mistral"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_an_architecture_that_is_not_computed_is_refused(folder: Path, text: dict[str, object], message: str) -> None:
    edit_json(folder / "config.json", text_config=text)

    with pytest.raises(BadCheckpoint, match=message):
        read_config(folder)


def test_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    config = read_config(folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: "):
        read_weights(folder, config, torch.float32, torch.device("cpu"))
    (folder / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(folder)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(tmp_path / "nowhere")
