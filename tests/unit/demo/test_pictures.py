"""Pictures and questions: the same from the same seed, and in agreement with each other."""

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

from demo.pictures import COLOURS, Scene, draw_scene, from_jpeg, photograph, relation, render, render_index
from demo.questions import ask, caption, questions_of_kind
from demo.shipped_picture import SCENE, SIZE

SCENES = [draw_scene(random.Random(seed)) for seed in range(60)]
PICTURE = Path(__file__).parents[3] / "demo" / "picture.jpg"


def _nearest_colour(rgb: np.ndarray) -> str:
    return min(COLOURS, key=lambda name: float(np.abs(np.array(COLOURS[name]) - rgb).sum()))


def test_a_seed_gives_one_scene_one_picture_and_one_list_of_questions() -> None:
    drawn = []
    for _ in range(2):
        chance = random.Random(5)
        scene = draw_scene(chance)
        drawn.append((scene, photograph(scene, chance).tobytes(), ask(scene, chance)))

    assert drawn[0] == drawn[1]


def test_scenes_of_other_seeds_differ() -> None:
    assert len(set(SCENES)) == len(SCENES)


@pytest.mark.parametrize("size", [(336, 336), (640, 480), (480, 640)])
def test_the_colour_at_a_things_centre_is_the_one_it_is_named_by(size: tuple[int, int]) -> None:
    width, height = size
    side = min(size)
    for scene in SCENES:
        pixels = np.asarray(render(scene, width, height), dtype=np.int64)
        for thing in scene.things:
            x = (width - side) // 2 + round(thing.x * side)
            y = (height - side) // 2 + round(thing.y * side)

            assert _nearest_colour(pixels[y, x]) == thing.colour


def test_things_do_not_overlap_and_stay_within_the_central_square() -> None:
    for scene in SCENES:
        together = np.asarray(render_index(scene, 336))
        alone = [np.asarray(render_index(Scene((thing,), scene.background), 336)) > 0 for thing in scene.things]

        assert (together > 0).sum() == sum(mask.sum() for mask in alone)
        assert not any(mask[[0, -1]].any() or mask[:, [0, -1]].any() for mask in alone)


def test_a_shape_covers_the_share_of_its_box_that_its_kind_does() -> None:
    shares = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5}
    for scene in SCENES:
        for thing in scene.things:
            drawn = np.asarray(render_index(Scene((thing,), scene.background), 672)) > 0
            box = (2 * thing.half_side * 672) ** 2

            assert drawn.sum() / box == pytest.approx(shares[thing.shape], abs=0.05)


def test_answers_agree_with_the_scene() -> None:
    for scene in SCENES:
        shapes = {thing.colour: thing.shape for thing in scene.things}
        for question in questions_of_kind(scene, "shape"):
            colour = next(colour for colour in shapes if colour in question.text)
            assert question.answer == shapes[colour]
        for question in questions_of_kind(scene, "colour"):
            assert shapes[question.answer] in question.text
        for question in questions_of_kind(scene, "count"):
            assert question.answer == ("one", "two", "three")[len(scene.things) - 1]


def test_a_question_has_one_answer() -> None:
    for scene in SCENES:
        answers: dict[str, str] = {}
        for kind in ("caption", "colour", "shape", "place", "count"):
            for question in questions_of_kind(scene, kind):
                assert answers.setdefault(question.text, question.answer) == question.answer


def test_relations_are_each_others_opposites() -> None:
    opposite = {
        "to the left": "to the right",
        "to the right": "to the left",
        "above": "below",
        "below": "above",
    }
    for scene in SCENES:
        if len(scene.things) == 2:
            one, other = scene.things
            where = relation(one, other)
            assert where is not None
            assert relation(other, one) == opposite[where]


def test_the_shipped_picture_shows_its_scene() -> None:
    shipped = from_jpeg(PICTURE.read_bytes())

    difference = ImageChops.difference(shipped, render(SCENE, *SIZE))

    assert Image.open(PICTURE).format == "JPEG"
    assert shipped.size == (640, 480)
    assert np.asarray(difference).mean() < 1.0
    assert caption(SCENE) == "a red circle to the left of a blue square"
