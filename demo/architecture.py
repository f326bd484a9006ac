"""The demo model's shape, and a checkpoint folder as llava-hf writes it."""

import json
import os
import re
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from demo.vocabulary import CHAT_TEMPLATE, END, IMAGE, MAX_POSITIONS, PAD, START, VOCABULARY, train_tokenizer

SIDE = 336  # pixels
PATCH_SIDE = 14  # pixels
GRID = SIDE // PATCH_SIDE
PATCHES = GRID * GRID  # 576, as LLaVA-1.5 (arXiv:2310.03744)
VISION_WIDTH = 128
LANGUAGE_WIDTH = 192
VISION_LAYERS = 4
FEATURE_LAYER = -2
USED_VISION_LAYERS = VISION_LAYERS + 1 + FEATURE_LAYER
PAD_ID, START_ID, END_ID, IMAGE_ID = range(4)

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, by channel
DEVIATION = (0.26862954, 0.26130258, 0.27577711)

# Names in our process -> names on the hub, which vLLM and older releases of transformers read.
HUB_NAMES = (
    (r"^model\.vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
    (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)


def configuration() -> LlavaConfig:
    """LLaVA-1.5 with its true image geometry and very narrow layers."""
    vision = CLIPVisionConfig(
        hidden_size=VISION_WIDTH,
        intermediate_size=4 * VISION_WIDTH,
        projection_dim=VISION_WIDTH,
        num_hidden_layers=VISION_LAYERS,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH_SIDE,
    )
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=LANGUAGE_WIDTH,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        pad_token_id=PAD_ID,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        tie_word_embeddings=False,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_ID,
        image_seq_length=PATCHES,
        vision_feature_layer=FEATURE_LAYER,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
    )


def _wave_positions() -> torch.Tensor:
    """Sines and cosines of each patch's row and column, (1 + patches, vision width); zeros for the class."""
    quarter = VISION_WIDTH // 4
    rates = 1.0 / (100.0 ** (torch.arange(quarter) / quarter))
    angles = torch.arange(GRID)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = waves[:, None].expand(GRID, GRID, -1)
    columns = waves[None].expand(GRID, GRID, -1)
    grid = torch.cat([rows, columns], dim=2).reshape(PATCHES, VISION_WIDTH)
    return torch.cat([torch.zeros(1, VISION_WIDTH), grid])


def fresh_model(seed: int) -> LlavaForConditionalGeneration:
    """An untrained model in float32, its matrices drawn with deviation fan_in ** -0.5."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(configuration())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        model.model.vision_tower.embeddings.position_embedding.weight.copy_(0.5 * _wave_positions())
    return model


def hub_name(name: str) -> str:
    """The name on the hub of a tensor of our model."""
    for pattern, replacement in HUB_NAMES:
        name, count = re.subn(pattern, replacement, name)
        if count:
            return name
    raise KeyError(name)


def save_weights(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write `model.safetensors` in float16 under the hub's names, at once or not at all."""
    tensors = {
        hub_name(name): tensor.to(torch.float16).contiguous().clone() for name, tensor in model.state_dict().items()
    }
    beside = folder / "model.safetensors.part"
    save_file(tensors, beside, {"format": "pt"})
    beside.chmod(0o644)
    os.replace(beside, folder / "model.safetensors")


def load_model(folder: Path) -> LlavaForConditionalGeneration:
    """The model of a checkpoint folder in float32, for inference."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return cast(LlavaForConditionalGeneration, model.eval())


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _special_token(content: str) -> dict[str, object]:
    return {
        "content": content,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


def _write_tokenizer(folder: Path) -> None:
    tokenizer = train_tokenizer()
    specials = (PAD, START, END, IMAGE)
    if [tokenizer.token_to_id(token) for token in specials] != [PAD_ID, START_ID, END_ID, IMAGE_ID]:
        raise AssertionError("the special tokens do not come first")
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "LlavaProcessor",
        "bos_token": START,
        "eos_token": END,
        "pad_token": PAD,
        "image_token": IMAGE,
        "extra_special_tokens": {"image_token": IMAGE},
        "added_tokens_decoder": {str(i): _special_token(token) for i, token in enumerate(specials)},
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": MAX_POSITIONS,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_processor(folder: Path) -> None:
    _write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": SIDE},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": SIDE, "width": SIDE},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(MEAN),
            "image_std": list(DEVIATION),
        },
    )
    _write_json(
        folder / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "num_additional_image_tokens": 1,
            "patch_size": PATCH_SIDE,
            "vision_feature_select_strategy": "default",
        },
    )


def write_checkpoint(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write a whole checkpoint folder: configuration, tokenizer, processor and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    config.architectures = ["LlavaForConditionalGeneration"]
    config.dtype = torch.float16
    config.save_pretrained(folder)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": START_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": False},
    )
    _write_tokenizer(folder)
    _write_processor(folder)
    save_weights(model, folder)
