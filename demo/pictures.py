"""Seeded pictures of one to three coloured shapes on a plain background."""

import io
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "orange": (245, 140, 20),
    "yellow": (245, 225, 40),
    "green": (30, 150, 60),
    "blue": (40, 80, 220),
    "purple": (140, 50, 170),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle")
SIZES = ((336, 336), (640, 480), (480, 640), (512, 512), (800, 600))
JPEG_QUALITY = 90

MARGIN = 0.03  # least distance of an object from the edge of the central square
GAP = 0.04  # least distance between the boxes of two objects
COLUMN = 0.10  # least distance between the centres of three objects from left to right
DOMINANCE = 1.6  # how much longer one axis must be before a relation is named after it
HALF_SIDES = {1: (0.10, 0.22), 2: (0.09, 0.17), 3: (0.08, 0.13)}  # by number of objects


@dataclass(frozen=True, slots=True)
class Thing:
    """One coloured shape; lengths are shares of the central square's side."""

    shape: str
    colour: str
    rgb: Colour
    x: float
    y: float
    half_side: float

    @property
    def name(self) -> str:
        """What the questions call it: "red circle"."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows, whatever its size; colours differ, things are ordered from left to right."""

    things: tuple[Thing, ...]
    background: Colour


def relation(one: Thing, other: Thing) -> str | None:
    """Where `one` is as seen from `other`, or None where no axis dominates."""
    right, down = one.x - other.x, one.y - other.y
    if abs(right) >= DOMINANCE * abs(down):
        return "to the right" if right > 0 else "to the left"
    if abs(down) >= DOMINANCE * abs(right):
        return "below" if down > 0 else "above"
    return None


def _are_apart(one: Thing, other: Thing) -> bool:
    reach = one.half_side + other.half_side + GAP
    return abs(one.x - other.x) >= reach or abs(one.y - other.y) >= reach


def _is_clear(things: tuple[Thing, ...]) -> bool:
    pairs = [(a, b) for i, a in enumerate(things) for b in things[i + 1 :]]
    if not all(_are_apart(a, b) for a, b in pairs):
        return False
    if len(things) == 2:
        return relation(*things) is not None
    return all(abs(a.x - b.x) >= COLUMN for a, b in pairs)


def _draw_thing(chance: random.Random, colour: str, sides: tuple[float, float]) -> Thing:
    half_side = chance.uniform(*sides)
    near, far = half_side + MARGIN, 1 - half_side - MARGIN
    red, green, blue = (max(0, min(255, c + chance.randint(-14, 14))) for c in COLOURS[colour])
    return Thing(
        shape=chance.choice(SHAPES),
        colour=colour,
        rgb=(red, green, blue),
        x=chance.uniform(near, far),
        y=chance.uniform(near, far),
        half_side=half_side,
    )


def draw_scene(chance: random.Random) -> Scene:
    """A scene whose every question has one answer."""
    num_things = chance.choices((1, 2, 3), weights=(5, 9, 6))[0]
    colours = chance.sample(list(COLOURS), num_things)
    level = chance.randint(222, 248)
    red, green, blue = (level + chance.randint(-7, 7) for _ in range(3))
    while True:
        things = tuple(_draw_thing(chance, colour, HALF_SIDES[num_things]) for colour in colours)
        if _is_clear(things):
            ordered = tuple(sorted(things, key=lambda thing: thing.x))
            return Scene(things=ordered, background=(red, green, blue))


def _paint(draw: ImageDraw.ImageDraw, thing: Thing, side: int, left: int, top: int, ink: Colour | int) -> None:
    x, y, half = left + thing.x * side, top + thing.y * side, thing.half_side * side
    if thing.shape == "circle":
        draw.ellipse((x - half, y - half, x + half, y + half), fill=ink)
    elif thing.shape == "square":
        draw.rectangle((x - half, y - half, x + half, y + half), fill=ink)
    else:
        draw.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill=ink)


def render(scene: Scene, width: int, height: int, oversampling: int = 2) -> Image.Image:
    """The scene in RGB, `width` x `height`; all its things lie within the central square."""
    wide, high = width * oversampling, height * oversampling
    side = min(wide, high)
    image = Image.new("RGB", (wide, high), scene.background)
    draw = ImageDraw.Draw(image)
    for thing in scene.things:
        _paint(draw, thing, side, (wide - side) // 2, (high - side) // 2, thing.rgb)
    return image if oversampling == 1 else image.reduce(oversampling)


def render_index(scene: Scene, side: int) -> Image.Image:
    """Which thing each pixel shows, (side, side): 0 for the background, else 1 + its place in the scene."""
    image = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(image)
    for index, thing in enumerate(scene.things):
        _paint(draw, thing, side, 0, 0, index + 1)
    return image


def to_jpeg(image: Image.Image, quality: int = JPEG_QUALITY) -> bytes:
    """The picture as a JPEG file."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def from_jpeg(data: bytes) -> Image.Image:
    """The picture in a JPEG file, in RGB."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def photograph(scene: Scene, chance: random.Random) -> Image.Image:
    """The scene as a user's file would show it: some size, encoded to JPEG and decoded again."""
    width, height = chance.choice(SIZES)
    return from_jpeg(to_jpeg(render(scene, width, height)))
