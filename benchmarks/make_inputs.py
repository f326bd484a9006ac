"""The requests that perf_analyzer sends: `python -m benchmarks.make_inputs` writes `inputs/*.json`."""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Iterable
from pathlib import Path

from python_backend.checkpoint import PROJECT_ROOT

INPUTS = Path(__file__).parent / "inputs"
PICTURE = PROJECT_ROOT / "demo" / "picture.jpg"
SAMPLING = '{"max_tokens": 16, "min_tokens": 16, "ignore_eos": true, "temperature": 0}'  # the same work each time
QUESTIONS = (
    "What is in the picture?",
    "What colour is the circle?",
    "How many objects are there?",
    "Where is the red circle relative to the blue square?",
)
TEXT_QUESTIONS = ("How many corners does a triangle have?", "What colour do red and yellow make?")

Entry = dict[str, object]


def with_picture(question: str, picture: bytes) -> Entry:
    """A streamed question about a picture, as perf_analyzer's `--input-data` wants it."""
    return {**text_only(question), "image": {"content": [_content(picture)], "shape": [1]}}


def text_only(question: str) -> Entry:
    """A streamed question."""
    return {
        "text_input": {"content": [question], "shape": [1]},
        "stream": {"content": [True], "shape": [1]},
        "sampling_parameters": {"content": [SAMPLING], "shape": [1]},
    }


def with_decision(question: str, picture: bytes) -> Entry:
    """An urgent question with a deadline, whose placement is told."""
    return {
        **with_picture(question, picture),
        "priority": {"content": [-10], "shape": [1]},
        "deadline_ms": {"content": [60_000], "shape": [1]},
        "return_decision": {"content": [True], "shape": [1]},
    }


def openai_with_picture(question: str, picture: bytes) -> Entry:
    """The same question as `with_picture`, as a body for the gateway and perf_analyzer's `openai` kind."""
    uri = f"data:image/jpeg;base64,{_content(picture)}"
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": parts}]
    return {"payload": [{"model": "llava", "messages": messages, "stream": True, **json.loads(SAMPLING)}]}


def distinct(picture: bytes, num: int) -> list[bytes]:
    """As many JPEG files of one picture's size, each with pixels of its own, so that no cache knows the next."""
    import io

    from PIL import Image

    files = []
    with Image.open(io.BytesIO(picture)) as image:
        for number in range(num):
            copy = image.copy()
            copy.paste((number % 256, 255 - number % 256, number // 256), (0, 0, 8, 8))
            file = io.BytesIO()
            copy.save(file, "JPEG", quality=85)
            files.append(file.getvalue())
    return files


def write_inputs(path: Path, entries: Iterable[Entry]) -> None:
    """One file of requests; perf_analyzer takes them in turn, over and over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": list(entries)}, indent=1) + "\n")


def main() -> None:
    """Writes the files that are kept in the repository."""
    argparse.ArgumentParser(prog="python -m benchmarks.make_inputs", description=__doc__).parse_args()
    picture = PICTURE.read_bytes()
    write_inputs(INPUTS / "llava_stream.json", [with_picture(question, picture) for question in QUESTIONS])
    write_inputs(INPUTS / "llava_decision.json", [with_decision(question, picture) for question in QUESTIONS])
    write_inputs(INPUTS / "openai_stream.json", [openai_with_picture(question, picture) for question in QUESTIONS])
    write_inputs(INPUTS / "llava_text_stream.json", [text_only(question) for question in TEXT_QUESTIONS])


def _content(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


if __name__ == "__main__":
    main()
