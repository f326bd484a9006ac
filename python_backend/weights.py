"""A LLaVA checkpoint folder read into the language model's shape and tensors.

Shapes: vocab = vocabulary, width = hidden size, head = channels per head, mlp = inner width of the MLP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Model types whose layers are Llama's; Vicuna is "llama".
LLAMA_TYPES = frozenset({"llama", "mistral"})
# Rotary variants whose frequencies do not depend on the length of the sequence.
FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

# (prefix of the layers, prefix of the output head), in the order they are looked for.
NAME_LAYOUTS = (
    ("language_model.model.", "language_model."),  # the hub's LLaVA checkpoints
    ("model.language_model.", ""),  # what recent releases of transformers save
    ("model.", ""),  # a plain language model
)


class BadCheckpoint(ValueError):
    """A checkpoint folder that cannot be loaded; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The language model's shape, and the ids that the checkpoint gives a meaning to."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    norm_epsilon: float
    max_position_tokens: int
    rope_frequencies: tuple[float, ...]  # (head / 2,), radians per position
    rope_scale: float  # factor on cosine and sine; 1 except for yarn
    is_tied: bool  # the output head is the embedding matrix
    image_token_id: int | None
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Query, key and value are stacked, and so are gate and up, to be one product each."""

    input_norm: torch.Tensor  # (width,)
    qkv: torch.Tensor  # ((num_heads + 2 * num_kv_heads) * head, width)
    qkv_bias: torch.Tensor | None
    output: torch.Tensor  # (width, num_heads * head)
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # (width,)
    gate_up: torch.Tensor  # (2 * mlp, width)
    down: torch.Tensor  # (width, mlp)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of the language model, of one dtype and on one device."""

    embedding: torch.Tensor  # (vocab, width)
    layers: Iterator[
        LayerWeights
    ]  # read one at a time, so that memory need not hold them twice; may raise BadCheckpoint
    norm: torch.Tensor  # (width,)
    head: torch.Tensor  # (vocab, width)


def read_config(checkpoint: Path) -> DecoderConfig:
    """The language model described by `checkpoint`/config.json; what it leaves out is transformers' default.

    Raises:
        BadCheckpoint: no readable config.json, or an architecture that this decoder does not compute.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"{checkpoint / 'config.json'}: {error}") from error
    text = config.get_text_config()
    if text.model_type not in LLAMA_TYPES:
        allowed = ", ".join(sorted(LLAMA_TYPES))
        raise BadCheckpoint(
            f"{checkpoint / 'config.json'}: language model type {text.model_type!r}; allowed: {allowed}"
        )
    if text.hidden_act != "silu":
        raise BadCheckpoint(f"{checkpoint / 'config.json'}: hidden_act {text.hidden_act!r}; allowed: 'silu'")
    frequencies, scale = _rope(checkpoint, text)
    window = getattr(text, "sliding_window", None)
    positions = text.max_position_embeddings
    image_token = getattr(config, "image_token_index", getattr(config, "image_token_id", None))
    return DecoderConfig(
        vocab_size=text.vocab_size,
        width=text.hidden_size,
        mlp_width=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads or text.num_attention_heads,
        head_width=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        norm_epsilon=text.rms_norm_eps,
        # Within its window a sliding attention is a full one, so the window bounds the context instead.
        max_position_tokens=min(positions, window) if window else positions,
        rope_frequencies=frequencies,
        rope_scale=scale,
        is_tied=bool(getattr(config, "tie_word_embeddings", False) or text.tie_word_embeddings),
        image_token_id=image_token,
        eos_ids=_eos_ids(checkpoint, config, text),
    )


def _rope(checkpoint: Path, text: Any) -> tuple[tuple[float, ...], float]:
    parameters = text.rope_parameters
    kind = parameters["rope_type"]
    if kind not in FIXED_ROPE_TYPES:
        allowed = ", ".join(sorted(FIXED_ROPE_TYPES))
        raise BadCheckpoint(f"{checkpoint / 'config.json'}: rope_type {kind!r}; allowed: {allowed}")
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](text)
        return tuple(frequencies.tolist()), float(scale)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # In float32 as transformers computes them: theta ** (-2 i / head), arXiv:2104.09864.
    exponents = torch.arange(0, head, 2, dtype=torch.float) / head
    return tuple((1.0 / (parameters["rope_theta"] ** exponents)).tolist()), 1.0


def _eos_ids(checkpoint: Path, config: Any, text: Any) -> frozenset[int]:
    """The ids that end a generation: the generation config's, else the model's."""
    path = checkpoint / "generation_config.json"
    found: object = None
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except ValueError as error:
            raise BadCheckpoint(f"{path}: not JSON: {error}") from error
    for source in (config, text):
        if found is None:
            found = getattr(source, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


class TensorFiles:
    """The tensors of a checkpoint folder, in one safetensors file or several behind an index.

    A context manager; reads lazily, one tensor at a time.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._files = _file_of_each_tensor(checkpoint)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._checkpoint = checkpoint

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name` on the CPU in the file's dtype.

        Raises:
            BadCheckpoint: it is missing, unreadable or not of `shape`.
        """
        path = self._files.get(name)
        if path is None:
            raise BadCheckpoint(f"{self._checkpoint}: no tensor {name!r} in its safetensors files")
        if path not in self._open:
            self._open[path] = self._stack.enter_context(_open_file(path))
        try:
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise BadCheckpoint(f"{path}: tensor {name!r}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise BadCheckpoint(f"{path}: tensor {name!r} is {tuple(tensor.shape)}, expected {shape}")
        return tensor


def _open_file(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{path}: {error}") from error


def _file_of_each_tensor(checkpoint: Path) -> dict[str, Path]:
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        try:
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise BadCheckpoint(f"{index}: {error!r}") from error
        return {name: checkpoint / file for name, file in names.items()}
    single = checkpoint / "model.safetensors"
    with _open_file(single) as file:
        return dict.fromkeys(file.keys(), single)


def read_weights(checkpoint: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """The language model's tensors in `dtype` on `device`; the vision tower's are not read.

    Raises:
        BadCheckpoint: a tensor is missing or of the wrong shape, or no known name layout fits.
    """
    with TensorFiles(checkpoint) as files:
        prefix, head_prefix = _layout(checkpoint, files)
        shape = (config.vocab_size, config.width)
        embedding = files.read(f"{prefix}embed_tokens.weight", shape).to(device=device, dtype=dtype)
        head = embedding
        if not config.is_tied:
            head = files.read(f"{head_prefix}lm_head.weight", shape).to(device=device, dtype=dtype)
        norm = files.read(f"{prefix}norm.weight", (config.width,)).to(device=device, dtype=dtype)
    return DecoderWeights(embedding, _read_layers(checkpoint, prefix, config, dtype, device), norm, head)


def _read_layers(
    checkpoint: Path, prefix: str, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[LayerWeights]:
    with TensorFiles(checkpoint) as files:

        def read(name: str, *shape: int) -> torch.Tensor:
            return files.read(prefix + name, shape).to(device=device, dtype=dtype)

        def read_optional(name: str, *shape: int) -> torch.Tensor | None:
            return read(name, *shape) if prefix + name in files else None

        for index in range(config.num_layers):
            yield _read_layer(f"layers.{index}.", config, read, read_optional)


def _layout(checkpoint: Path, files: TensorFiles) -> tuple[str, str]:
    for prefix, head_prefix in NAME_LAYOUTS:
        if f"{prefix}embed_tokens.weight" in files:
            return prefix, head_prefix
    tried = ", ".join(f"{prefix}embed_tokens.weight" for prefix, _ in NAME_LAYOUTS)
    raise BadCheckpoint(f"{checkpoint}: no embedding in its safetensors files; looked for {tried}")


def _read_layer(
    name: str,
    config: DecoderConfig,
    read: Callable[..., torch.Tensor],
    read_optional: Callable[..., torch.Tensor | None],
) -> LayerWeights:
    width, mlp = config.width, config.mlp_width
    query_width = config.num_heads * config.head_width
    kv_width = config.num_kv_heads * config.head_width
    parts = (("q_proj", query_width), ("k_proj", kv_width), ("v_proj", kv_width))
    biases = [read_optional(f"{name}self_attn.{part}.bias", size) for part, size in parts]
    present = [bias for bias in biases if bias is not None]
    return LayerWeights(
        input_norm=read(f"{name}input_layernorm.weight", width),
        qkv=torch.cat([read(f"{name}self_attn.{part}.weight", size, width) for part, size in parts]),
        qkv_bias=torch.cat(present) if len(present) == len(parts) else None,
        output=read(f"{name}self_attn.o_proj.weight", width, query_width),
        output_bias=read_optional(f"{name}self_attn.o_proj.bias", width),
        mlp_norm=read(f"{name}post_attention_layernorm.weight", width),
        gate_up=torch.cat([read(f"{name}mlp.{part}_proj.weight", mlp, width) for part in ("gate", "up")]),
        down=read(f"{name}mlp.down_proj.weight", width, mlp),
    )
