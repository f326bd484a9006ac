"""The picture that ships with the checkpoint: `python -m demo.shipped_picture --out demo/picture.jpg`."""

import argparse
from pathlib import Path

from demo.pictures import COLOURS, Scene, Thing, render, to_jpeg

SIZE = (640, 480)
SCENE = Scene(
    things=(
        Thing("circle", "red", COLOURS["red"], x=0.27, y=0.44, half_side=0.14),
        Thing("square", "blue", COLOURS["blue"], x=0.72, y=0.57, half_side=0.13),
    ),
    background=(236, 238, 240),
)


def main() -> None:
    """Draw the picture and write it as a JPEG file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_bytes(to_jpeg(render(SCENE, *SIZE)))


if __name__ == "__main__":
    main()
