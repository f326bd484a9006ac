"""Training batches: some patches of a picture, and many questions after it in one packed sequence."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from demo.architecture import DEVIATION, END_ID, GRID, MEAN, PAD_ID, PATCH_SIDE, PATCHES, SIDE
from demo.pictures import (
    COLOURS,
    SHAPES,
    Scene,
    draw_scene,
    from_jpeg,
    photograph,
    relation,
    render,
    render_index,
    to_jpeg,
)
from demo.questions import Question, ask, questions_of_kind, text_questions

IGNORED = -100  # torch's cross entropy skips it
COVERED = 0.5  # share of a patch from which it belongs to a thing
SHARE_ON_THINGS = 0.7  # of the patches of a picture
SHARE_CHAINED = 0.2  # of the pictures: their questions are one conversation
SHARE_WITH_TEXT = 0.2  # of the pictures: one question without a picture is packed beside theirs
EASY_KINDS = ("shape", "count")
HARD_KINDS = ("colour", "place")
SHARE_EASY = 0.3  # of the easy kinds' questions are asked
MOST_HARD = 3  # questions of the hard kinds after a picture of several things
LONGEST_TOKENS = 104  # of the questions packed after a picture; those without room are left out
SHARE_JPEG = 0.2
SHARE_PHOTOGRAPH = 0.1

PREFIX_SEGMENT, PADDING_SEGMENT = 0, -100

# Of each patch: the colour and shape of its thing (0: none), where the thing's centre is, and its role.
CENTRE_BINS = 12
ROLES = ("alone", "to the left", "to the right", "above", "below", "first", "second", "third")
PATCH_CLASSES = (1 + len(COLOURS), 1 + len(SHAPES), CENTRE_BINS, CENTRE_BINS, len(ROLES))

Encode = Callable[[str], list[int]]
Bytes = npt.NDArray[np.uint8]
Classes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Pictures (b), patches of each (p), those the language model is shown (q), tokens before (f) and after (t).

    The language model's sequence is s = f + q + t.
    """

    pixels: torch.Tensor  # (b, p, 588) float32, normalised, channel then row then column
    patches: torch.Tensor  # (b, p) int64, place among the 576
    shown: torch.Tensor  # (b, q) int64, place among the p
    classes: torch.Tensor  # (b, p, 5) int64, what each patch shows, see PATCH_CLASSES
    prefix: torch.Tensor  # (f,) int64
    tokens: torch.Tensor  # (b, t) int64
    labels: torch.Tensor  # (b, t) int64, the token that follows, IGNORED outside answers
    segments: torch.Tensor  # (b, s) int64, 0 for what every question of the picture sees
    positions: torch.Tensor  # (b, s) int64, as in a prompt with all 576 image tokens


def _inner(mean: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(mean).repeat_interleave(PATCH_SIDE * PATCH_SIDE)


def to_patches(image: Image.Image) -> Bytes:
    """An RGB picture of 336 x 336 as patches, (576, 588), channel then row then column."""
    pixels = np.asarray(image).reshape(GRID, PATCH_SIDE, GRID, PATCH_SIDE, 3)
    return np.ascontiguousarray(pixels.transpose(0, 2, 4, 1, 3)).reshape(PATCHES, 3 * PATCH_SIDE * PATCH_SIDE)


def normalise(pixels: torch.Tensor) -> torch.Tensor:
    """Bytes of patches, (..., 588), as CLIP's processor scales them, in float32."""
    return (pixels.float() / 255.0 - _inner(MEAN)) / _inner(DEVIATION)


def fit(image: Image.Image) -> Image.Image:
    """The central square at 336 x 336, as CLIP's processor resizes and crops."""
    width, height = image.size
    short = min(width, height)
    wide, high = int(width * SIDE / short), int(height * SIDE / short)
    resized = image.resize((wide, high), Image.Resampling.BICUBIC)
    left, top = (wide - SIDE) // 2, (high - SIDE) // 2
    return resized.crop((left, top, left + SIDE, top + SIDE))


def training_view(scene: Scene, chance: random.Random) -> Image.Image:
    """The scene at 336 x 336: mostly drawn straight, at times through JPEG or another size and JPEG."""
    draw = chance.random()
    if draw < SHARE_PHOTOGRAPH:
        return fit(photograph(scene, chance))
    image = render(scene, SIDE, SIDE, oversampling=1)
    if draw < SHARE_PHOTOGRAPH + SHARE_JPEG:
        return from_jpeg(to_jpeg(image, chance.randint(75, 95)))
    return image


def _roles(scene: Scene) -> list[int]:
    """The place of each thing among the others, as a class."""
    if len(scene.things) == 1:
        return [0]
    if len(scene.things) == 3:
        return [5, 6, 7]
    one, other = scene.things
    return [ROLES.index(str(relation(one, other))), ROLES.index(str(relation(other, one)))]


def _patch_classes(scene: Scene) -> tuple[Bytes, Classes]:
    """Whether each patch touches a thing, (576,), and its classes, (576, 5)."""
    index = np.asarray(render_index(scene, SIDE)).reshape(GRID, PATCH_SIDE, GRID, PATCH_SIDE)
    index = index.transpose(0, 2, 1, 3).reshape(PATCHES, PATCH_SIDE * PATCH_SIDE)
    touched = (index > 0).any(axis=1)
    classes = np.full((PATCHES, len(PATCH_CLASSES)), IGNORED)
    classes[~touched, :2] = 0
    for i, (thing, role) in enumerate(zip(scene.things, _roles(scene), strict=True)):
        covered = (index == i + 1).mean(axis=1) >= COVERED
        classes[covered] = (
            1 + list(COLOURS).index(thing.colour),
            1 + SHAPES.index(thing.shape),
            int(thing.x * CENTRE_BINS),
            int(thing.y * CENTRE_BINS),
            role,
        )
    return touched.astype(np.uint8), classes


def _choose_patches(touched: Bytes, num_patches: int, draws: np.random.Generator) -> npt.NDArray[np.int64]:
    if num_patches == len(touched):
        return np.arange(num_patches)
    on, off = np.flatnonzero(touched), np.flatnonzero(touched == 0)
    num_on = min(len(on), max(int(SHARE_ON_THINGS * num_patches), num_patches - len(off)))
    chosen = [draws.choice(on, num_on, replace=False), draws.choice(off, num_patches - num_on, replace=False)]
    return np.sort(np.concatenate(chosen))


class Sequence:
    """The tokens after a picture's, growing question by question."""

    def __init__(self, encode: Encode, start: int) -> None:
        """`start` is the position after the image's last token."""
        self.encode = encode
        self.start = start
        self.tokens: list[int] = []
        self.labels: list[int] = []
        self.segments: list[int] = []
        self.positions: list[int] = []

    def add(self, before: str, question: Question, segment: int, position: int) -> None:
        """Append one question and its answer if there is room; only the answer and its end are learnt."""
        asked = self.encode(f"{before}{question.text} ASSISTANT:")
        answered = [*self.encode(f" {question.answer}"), END_ID]
        tokens = asked + answered
        if len(self.tokens) + len(tokens) > LONGEST_TOKENS:
            return
        self.tokens += tokens
        self.labels += [IGNORED] * (len(asked) - 1) + answered + [IGNORED]
        self.segments += [segment] * len(tokens)
        self.positions += range(position, position + len(tokens))

    def add_side_by_side(self, questions: list[Question]) -> None:
        """Append questions each of which sees the picture only."""
        for i, question in enumerate(questions):
            self.add("\n", question, i + 1, self.start)

    def add_chained(self, questions: list[Question]) -> None:
        """Append questions as one conversation."""
        shown = len(self.tokens)
        for i, question in enumerate(questions):
            self.add("USER: " if i else "\n", question, 1, self.start + len(self.tokens) - shown)

    def add_alone(self, prefix: list[int], question: Question) -> None:
        """Append a question that sees no picture."""
        self.tokens.append(prefix[0])
        self.labels.append(IGNORED)
        self.segments.append(-1)
        self.positions.append(0)
        self.add("USER: ", question, -1, 1)


def _stepping_stone(scene: Scene) -> list[Question]:
    """A question of the training only, whose answer sets each shape right before its colour.

    After a shape's word its colour is one look at the picture; a colour asked by shape takes two, and is
    hardly learnt without this.
    """
    shapes = [thing.shape for thing in scene.things]
    unique = [f"{thing.shape} {thing.colour}" for thing in scene.things if shapes.count(thing.shape) == 1]
    if len(scene.things) == 1 or not unique:
        return []
    return [Question("stepping stone", "What colours are the shapes?", ", ".join(unique))]


class BatchMaker:
    """Draws batches from a seed; owns its random state."""

    def __init__(self, encode: Encode, seed: int) -> None:
        """`encode` gives a text's tokens without `<s>`."""
        self.encode: Encode = functools.lru_cache(maxsize=20_000)(lambda text: encode(text))
        self.chance = random.Random(seed)
        self.draws = np.random.default_rng(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.text_questions = text_questions()

    def _questions(self, scene: Scene) -> list[Question]:
        """More of what is hard to learn, less of what is easy, in random order."""
        hard = [question for kind in HARD_KINDS for question in questions_of_kind(scene, kind)]
        most = MOST_HARD if len(scene.things) > 1 else 1
        chosen = self.chance.sample(hard, min(most, len(hard)))
        for question in ask(scene, self.chance):
            is_easy = question.kind in EASY_KINDS
            if question.kind not in HARD_KINDS and (not is_easy or self.chance.random() < SHARE_EASY):
                chosen.append(question)
        chosen += _stepping_stone(scene)
        self.chance.shuffle(chosen)
        return chosen

    def _sequence(self, scene: Scene, prefix: list[int]) -> Sequence:
        sequence = Sequence(self.encode, len(prefix) + PATCHES)
        questions = self._questions(scene)
        if self.chance.random() < SHARE_WITH_TEXT:
            sequence.add_alone(prefix, self.chance.choice(self.text_questions))
        if self.chance.random() < SHARE_CHAINED:
            sequence.add_chained(questions)
        else:
            sequence.add_side_by_side(questions)
        return sequence

    def draw(self, num_pictures: int, num_patches: int, num_shown: int, is_held_out: bool = False) -> Batch:
        """A batch of fresh pictures; a held-out one shows them as users' files do, without noise.

        The tower sees `num_patches`, and the language model `num_shown` of those.
        """
        prefix = [1, *self.encode("USER: ")]
        scenes = [draw_scene(self.chance) for _ in range(num_pictures)]
        pixels, chosen, shown, classes = [], [], [], []
        for scene in scenes:
            touched, patch_classes = _patch_classes(scene)
            choice = _choose_patches(touched, num_patches, self.draws)
            view = fit(photograph(scene, self.chance)) if is_held_out else training_view(scene, self.chance)
            pixels.append(to_patches(view)[choice])
            chosen.append(choice)
            shown.append(_choose_patches(touched[choice], num_shown, self.draws))
            classes.append(patch_classes[choice])
        patches = torch.from_numpy(np.stack(chosen))
        scaled = normalise(torch.from_numpy(np.stack(pixels)))
        if not is_held_out:
            scaled += 0.02 * torch.randn(scaled.shape, generator=self.noise)
        sequences = [self._sequence(scene, prefix) for scene in scenes]
        return self._pack(sequences, prefix, scaled, patches, torch.from_numpy(np.stack(shown)), np.stack(classes))

    def _pack(
        self,
        sequences: list[Sequence],
        prefix: list[int],
        pixels: torch.Tensor,
        patches: torch.Tensor,
        shown: torch.Tensor,
        classes: Classes,
    ) -> Batch:
        length = max(len(sequence.tokens) for sequence in sequences)

        def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
            return torch.tensor([row + [filler] * (length - len(row)) for row in rows])

        num_pictures, num_shown = shown.shape
        before = torch.arange(len(prefix)).expand(num_pictures, -1)
        shared = torch.full((num_pictures, len(prefix) + num_shown), PREFIX_SEGMENT)
        segments = padded([sequence.segments for sequence in sequences], PADDING_SEGMENT)
        positions = padded([sequence.positions for sequence in sequences], 0)
        return Batch(
            pixels=pixels,
            patches=patches,
            shown=shown,
            classes=torch.from_numpy(classes),
            prefix=torch.tensor(prefix),
            tokens=padded([sequence.tokens for sequence in sequences], PAD_ID),
            labels=padded([sequence.labels for sequence in sequences], IGNORED),
            segments=torch.cat([shared, segments], dim=1),
            positions=torch.cat([before, patches.gather(1, shown) + len(prefix), positions], dim=1),
        )


def attention_mask(segments: torch.Tensor) -> torch.Tensor:
    """Which token sees which, (b, 1, s, s) bool: its own segment and the picture's, earlier or itself."""
    seen_from, seen = segments[:, :, None], segments[:, None, :]
    is_visible = (seen_from == seen) | ((seen == PREFIX_SEGMENT) & (seen_from > 0))
    return is_visible.tril()[:, None]
