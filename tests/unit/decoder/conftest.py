"""A small random checkpoint, its reference answers from transformers, and engines that must end clean."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
)

from python_backend.decoder.engine import DecodeRequest, Delta, Engine, EngineOptions, ImageEmbedding
from python_backend.request import SamplingParameters

torch.set_num_threads(1)  # these models are too small for more

PAD, BOS, EOS, IMAGE = range(4)
WIDTH = 64
IMAGE_TOKENS = 16
VOCABULARY = 260  # four special tokens and all bytes


def byte_tokenizer() -> Tokenizer:
    """One token per byte behind the special tokens."""
    specials = ["<pad>", "<s>", "</s>", "<image>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def random_model(
    text_class: type[LlamaConfig] | type[MistralConfig] = LlamaConfig, **text_values: object
) -> LlavaForConditionalGeneration:
    """A LLaVA of two narrow layers, with weights wide enough that greedy answers vary."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
    )
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    text = text_class(**(values | text_values))
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    torch.manual_seed(7)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=3 * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    return model


def save(model: LlavaForConditionalGeneration, folder: Path, **options: object) -> Path:
    """A checkpoint folder with its tokenizer."""
    model.save_pretrained(folder, **options)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def model() -> LlavaForConditionalGeneration:
    """The reference."""
    return random_model()


@pytest.fixture(scope="session")
def checkpoint(model: LlavaForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference's folder."""
    return save(model, tmp_path_factory.mktemp("checkpoint"))


@dataclass(frozen=True)
class Case:
    """A prompt with its pixels, its features and what transformers answers."""

    token_ids: tuple[int, ...]
    images: tuple[ImageEmbedding, ...]
    answer: tuple[int, ...]


def make_case(
    model: LlavaForConditionalGeneration, seed: int, num_tokens: int, num_images: int, max_tokens: int
) -> Case:
    """A random prompt with images at random places, answered greedily by transformers."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (num_tokens,), generator=generator).tolist()
    for _ in range(num_images):
        ids.insert(int(torch.randint(len(ids), (1,), generator=generator)), IMAGE)
    return answer(model, (BOS, *ids), tuple(100 * seed + index for index in range(num_images)), max_tokens)


def answer(
    model: LlavaForConditionalGeneration, ids: tuple[int, ...], image_seeds: tuple[int, ...], max_tokens: int = 24
) -> Case:
    """A prompt and its images, each drawn from its seed, answered greedily by transformers."""
    expanded = [each for token_id in ids for each in [token_id] * (IMAGE_TOKENS if token_id == IMAGE else 1)]
    drawn = [torch.randn(3, 56, 56, generator=torch.Generator().manual_seed(seed)) for seed in image_seeds]
    pixels = torch.stack(drawn) if drawn else None
    images: tuple[ImageEmbedding, ...] = ()
    with torch.inference_mode():
        if pixels is not None:
            features = model.get_image_features(pixel_values=pixels).pooler_output
            images = tuple(
                ImageEmbedding(str(seed).encode(), rows.clone())
                for seed, rows in zip(image_seeds, features, strict=True)
            )
        inputs = torch.tensor([expanded])
        output = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_tokens,
            **({} if pixels is None else {"pixel_values": pixels}),
        )
    return Case(ids, images, tuple(output[0, len(expanded) :].tolist()))


@pytest.fixture(scope="session")
def cases(model: LlavaForConditionalGeneration) -> list[Case]:
    """Sixteen prompts of 5 to 65 tokens with 0 to 2 images, and 24 tokens of answer."""
    return [make_case(model, seed, 5 + 4 * seed, seed % 3, 24) for seed in range(16)]


@dataclass
class Receiver:
    """Collects the deltas of one request; `wait` gives them once the final one is there."""

    deltas: list[Delta] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    on_delta: Callable[[Delta], None] | None = None

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.is_final:
            self.ended.set()
        if self.on_delta is not None:
            self.on_delta(delta)

    def wait(self) -> list[Delta]:
        assert self.ended.wait(60), "no final delta"
        assert [delta.is_final for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        return self.deltas

    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for delta in self.wait() for token_id in delta.token_ids)

    def text(self) -> str:
        return "".join(delta.text for delta in self.wait())


@dataclass
class Halting(Receiver):
    """Halts the engine with its first delta, until told to go on: meanwhile nothing ends."""

    _is_halted: threading.Event = field(default_factory=threading.Event)
    _may_go_on: threading.Event = field(default_factory=threading.Event)

    def __call__(self, delta: Delta) -> None:
        super().__call__(delta)
        if not self._is_halted.is_set():
            self._is_halted.set()
            self._may_go_on.wait(60)

    def halt(self) -> None:
        """Returns when the engine stands still."""
        assert self._is_halted.wait(60), "no delta"

    def go_on(self) -> None:
        self._may_go_on.set()


@dataclass
class FakeClock:
    """Seconds that pass when told to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Harness:
    """A started engine with its clock."""

    engine: Engine
    clock: FakeClock
    # While this is held an idle engine begins nothing: what is submitted meanwhile is taken in at once.
    together: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        step = self.engine.step

        def step_when_allowed() -> None:
            with self.together:
                step()

        self.engine.step = step_when_allowed  # type: ignore[method-assign]
        self.engine.start()

    def submit(
        self, case: Case, request_id: str = "r", receiver: Receiver | None = None, **sampling: object
    ) -> Receiver:
        receiver = receiver or Receiver()
        parameters = SamplingParameters(**{"max_tokens": 24, **sampling})  # type: ignore[arg-type]
        self.engine.submit(DecodeRequest(request_id, case.token_ids, case.images, parameters), receiver)
        return receiver


StartEngine = Callable[..., Harness]


@pytest.fixture
def start_engine(checkpoint: Path) -> Iterator[StartEngine]:
    """Starts engines on the reference's checkpoint; at the end every block of each must be back."""
    started: list[Harness] = []

    def start(folder: Path = checkpoint, **options: object) -> Harness:
        clock = FakeClock()
        values = {"num_blocks": 256, "block_tokens": 4, "num_threads": 1, **options}
        engine = Engine.load(folder, EngineOptions(**values), clock, draw_seed=lambda: 1)  # type: ignore[arg-type]
        started.append(Harness(engine, clock))
        started[-1].start()
        return started[-1]

    yield start
    for harness in started:
        harness.engine.close()
        harness.engine.check_integrity()
        status = harness.engine.status()
        assert status.free_blocks == status.total_blocks
        assert (status.num_running, status.num_waiting) == (0, 0)


def edit_json(path: Path, **values: object) -> None:
    """Set values in a JSON file; None takes a name out."""
    content = json.loads(path.read_text())
    content.update(values)
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def features(num_tokens: int, width: int = WIDTH, value: float = 0.0) -> torch.Tensor:
    """Features of an image that is the same everywhere."""
    return torch.full((num_tokens, width), value)
