"""Writes a plan into a Triton model repository.

A `config.pbtxt` has the contract (tensors, decoupled or not) above a marked line and the placement below it.
Rendering copies the contract, writes the placement, links the version folder, and puts `plan.json` beside the
models. Rendering a repository onto itself changes only what stands below the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scheduler.engine import engine_config, engine_name
from scheduler.plan import DECODER, ENCODER, ENGINE, FRONT, PLAN_FILE, Plan, Replica

MARK = "# ---- placement: written by 'python -m scheduler render'; edits below this line are lost ----"


_CACHED = re.compile(r"^[^#\n]*response_cache\s*:?\s*\{\s*enable\s*:\s*true", re.MULTILINE)


class RenderRefused(ValueError):
    """A repository that cannot be rendered; the message names the file."""


@dataclass(frozen=True, slots=True)
class RenderedModel:
    """One model folder: its name, the model it is a replica of, and the whole text of its config."""

    name: str
    source: str
    config: str


def render(plan: Plan, source: Path) -> Iterator[RenderedModel]:
    """The models of `plan`, with contracts taken from the repository `source`.

    Raises:
        RenderRefused: a config in `source` is missing or has no mark.
    """
    for model, replica in _placed(plan):
        yield RenderedModel(
            name=replica.name,
            source=model,
            config=f"{_contract(source / model, replica.name)}{MARK}\n{_placement(plan, model, replica)}",
        )
    if plan.encode.runtime == "triton":
        for replica in plan.encoders:
            yield RenderedModel(engine_name(replica), ENGINE, engine_config(plan, replica))


def write(plan: Plan, source: Path, target: Path) -> list[str]:
    """Renders `plan` into the folder `target`; the names of the models written.

    `target` may be `source` itself when the plan has one replica of each model.

    Raises:
        RenderRefused: as `render`; or numbered replicas would stand beside the model they are replicas of.
    """
    models = list(render(plan, source))
    numbered = [model.name for model in models if model.name != model.source or model.source == ENGINE]
    if numbered and target.resolve() == source.resolve():
        raise RenderRefused(f"{target}: {', '.join(numbered)} must go into a folder of their own; give --out")
    target.mkdir(parents=True, exist_ok=True)
    for model in models:
        folder = target / model.name
        folder.mkdir(exist_ok=True)
        (folder / "config.pbtxt").write_text(model.config)
        version = folder / "1"
        if model.source == ENGINE:
            version.mkdir(exist_ok=True)  # the engine itself is linked in by who builds it
        elif not version.exists():
            version.symlink_to((source / model.source / "1").resolve(), target_is_directory=True)
    (target / PLAN_FILE).write_text(plan.to_json())
    return [model.name for model in models]


def _placed(plan: Plan) -> Iterator[tuple[str, Replica]]:
    yield FRONT, Replica(name=FRONT, device="cpu")
    yield from ((ENCODER, replica) for replica in plan.encoders)
    yield from ((DECODER, replica) for replica in plan.decoders)


def _contract(folder: Path, name: str) -> str:
    """The text above the mark, under the replica's name."""
    path = folder / "config.pbtxt"
    try:
        text = path.read_text()
    except OSError as error:
        raise RenderRefused(f"{path}: {error.strerror}") from error
    if MARK not in text:
        raise RenderRefused(f"{path}: has no line {MARK!r}")
    if _CACHED.search(text.split(MARK)[0]):
        raise RenderRefused(f"{path}: response_cache; allowed: none, since it would repeat handles to reused slots")
    return re.sub(r'^name: "[^"]*"', f'name: "{name}"', text.split(MARK)[0], flags=re.MULTILINE)


def _placement(plan: Plan, model: str, replica: Replica) -> str:
    lines = []
    if model == ENCODER:
        lines += [
            f"max_batch_size: {plan.encode.max_batch}",
            f"dynamic_batching {{ max_queue_delay_microseconds: {plan.encode.queue_delay_us} }}",
        ]
    if replica.device == "cpu":
        lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
    else:
        index = replica.device.removeprefix("cuda:")
        lines.append(f"instance_group [ {{ count: 1 kind: KIND_GPU gpus: [ {index} ] }} ]")
    return "\n".join(lines) + "\n"
