"""The questions the demo model knows, and their exact answers."""

import random
from dataclasses import dataclass

from demo.pictures import Scene, Thing, relation

PICTURE_KINDS = ("caption", "colour", "shape", "place", "count")
TEXT_KIND = "text"
NUMBERS = ("zero", "one", "two", "three")

CAPTION_WORDINGS = ("What is in the picture?", "Describe the picture.", "What do you see?")
COLOUR_WORDINGS = ("What colour is the {shape}?", "What color is the {shape}?")
SHAPE_WORDINGS = ("What shape is the {colour} object?", "Which shape is {colour}?")
PLACE_WORDING = "Where is the {one} relative to the {other}?"
COUNT_WORDINGS = ("How many objects are there?", "How many shapes are in the picture?")

TEXT_ANSWERS = {
    "How many corners does a triangle have?": "three",
    "How many corners does a square have?": "four",
    "How many corners does a circle have?": "none",
    "What colour do red and yellow make?": "orange",
    "What colour do blue and yellow make?": "green",
    "What colour do red and blue make?": "purple",
    "What is the opposite of left?": "right",
    "What is the opposite of above?": "below",
    "Who are you?": "a tiny model that knows coloured shapes",
    "Which shapes do you know?": "circle, square and triangle",
    "Which colours do you know?": "red, orange, yellow, green, blue, purple and black",
    "Count from one to twenty.": (
        "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, "
        "fourteen, fifteen, sixteen, seventeen, eighteen, nineteen, twenty"
    ),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the one answer that counts as right."""

    kind: str
    text: str
    answer: str


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def caption(scene: Scene) -> str:
    """The scene in words; of two things the left or upper one comes first, of three the leftmost."""
    names = [_with_article(thing.name) for thing in scene.things]
    if len(names) == 1:
        return names[0]
    if len(names) == 3:
        return f"{names[0]}, {names[1]} and {names[2]}"
    where = relation(*scene.things)
    if where == "to the left":
        return f"{names[0]} to the left of {names[1]}"
    first, second = names if where == "above" else names[::-1]
    return f"{first} above {second}"


def _colour_questions(scene: Scene) -> list[Question]:
    shapes = [thing.shape for thing in scene.things]
    unique = [thing for thing in scene.things if shapes.count(thing.shape) == 1]
    return [
        Question("colour", wording.format(shape=thing.shape), thing.colour)
        for thing in unique
        for wording in COLOUR_WORDINGS
    ]


def _shape_questions(scene: Scene) -> list[Question]:
    return [
        Question("shape", wording.format(colour=thing.colour), thing.shape)
        for thing in scene.things
        for wording in SHAPE_WORDINGS
    ]


def _place_question(one: Thing, other: Thing) -> Question | None:
    where = relation(one, other)
    if where is None:
        return None
    return Question("place", PLACE_WORDING.format(one=one.name, other=other.name), where)


def _place_questions(scene: Scene) -> list[Question]:
    if len(scene.things) != 2:
        return []
    one, other = scene.things
    asked = [_place_question(one, other), _place_question(other, one)]
    return [question for question in asked if question is not None]


def questions_of_kind(scene: Scene, kind: str) -> list[Question]:
    """Every question of one kind the scene answers without doubt; may be empty."""
    if kind == "caption":
        return [Question(kind, wording, caption(scene)) for wording in CAPTION_WORDINGS]
    if kind == "colour":
        return _colour_questions(scene)
    if kind == "shape":
        return _shape_questions(scene)
    if kind == "place":
        return _place_questions(scene)
    return [Question(kind, wording, NUMBERS[len(scene.things)]) for wording in COUNT_WORDINGS]


def ask(scene: Scene, chance: random.Random) -> list[Question]:
    """One question of each kind the scene allows, in random order."""
    by_kind = [questions_of_kind(scene, kind) for kind in PICTURE_KINDS]
    asked = [chance.choice(questions) for questions in by_kind if questions]
    chance.shuffle(asked)
    return asked


def text_questions() -> list[Question]:
    """Every question that needs no picture."""
    return [Question(TEXT_KIND, text, answer) for text, answer in TEXT_ANSWERS.items()]
