"""`vlm-relay build`: what the encoder's runtime needs, made ahead of time."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from python_backend.checkpoint import read_facts, resolve
from scheduler.engine import ENGINE_FILE, engine_name
from scheduler.plan import Plan

Target = Literal["auto", "onnx", "tensorrt"]
TARGETS: tuple[Target, ...] = ("auto", "onnx", "tensorrt")
ENGINE_RUNTIMES = ("tensorrt", "triton")

Say = Callable[[str], None]


class BuildFailed(RuntimeError):
    """An artifact could not be built; the message says why."""


def build(
    plan: Plan,
    say: Say,
    is_forced: bool = False,
    target: Target = "auto",
    variables: Mapping[str, str] | None = None,
) -> list[Path]:
    """Makes what is not current; the paths of all. `auto` is what the plan's runtime needs (torch: nothing).

    Raises:
        BuildFailed: an engine cannot be built on this machine.
        ExportFailed, CheckpointRefused: the checkpoint's encoder cannot be exported.
    """
    if target == "tensorrt" or (target == "auto" and plan.encode.runtime in ENGINE_RUNTIMES):
        return [_build_engine(plan, device, say, is_forced, variables) for device in _gpus(plan)]
    if target == "auto" and plan.encode.runtime == "torch":
        return []
    return [_export(plan, say, is_forced)]


def fit_engine(plan: Plan) -> Plan:
    """The plan with the shapes of its checkpoint's engine; unchanged unless Triton itself runs the engine."""
    if plan.encode.runtime != "triton":
        return plan
    facts = read_facts(resolve(plan.checkpoint))
    shapes = {"image_size": facts.image_size, "image_tokens": facts.image_tokens, "width": facts.width}
    return plan.model_copy(update={"engine": plan.engine.model_copy(update=shapes)})


def engine_files(plan: Plan, built: list[Path]) -> dict[str, Path]:
    """The engine of each of Triton's own models, by its path in the repository; `built` is what `build` gave."""
    if plan.encode.runtime != "triton":
        return {}
    by_device = dict(zip(_gpus(plan), built, strict=True))
    return {f"{engine_name(each)}/1/{ENGINE_FILE}": by_device[each.device] for each in plan.encoders}


def _export(plan: Plan, say: Say, is_forced: bool) -> Path:
    facts = read_facts(resolve(plan.checkpoint))
    artifacts = resolve(plan.artifacts)
    from python_backend.vision import export  # torch: seconds to import

    if not is_forced and export.is_current(facts, artifacts):
        return artifacts / export.ONNX_FILE
    say(f"exporting the vision encoder of {facts.path} (once per checkpoint)")
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        path = export.export(facts, artifacts)
    say(f"exported and verified in {time.monotonic() - began:.1f} s: {path}")
    return path


def _gpus(plan: Plan) -> list[str]:
    """The encoders' GPUs; the first one, where the plan has none: an engine was asked for all the same."""
    found = dict.fromkeys(replica.device for replica in plan.encoders if replica.device != "cpu")
    return list(found) or ["cuda:0"]


def _build_engine(plan: Plan, device: str, say: Say, is_forced: bool, variables: Mapping[str, str] | None) -> Path:
    """In a process of its own, whose GPU memory goes when it ends."""
    command = [
        sys.executable,
        "-m",
        "python_backend.vision",
        str(resolve(plan.checkpoint)),
        str(resolve(plan.artifacts)),
    ]
    command += [device.removeprefix("cuda:")] + (["--force"] if is_forced else [])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=None if variables is None else dict(variables), text=True
    )
    assert process.stdout is not None
    last: dict[str, str] = {}
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            last = json.loads(line)
            if "progress" in last:
                say(f"{device}: {last['progress']}")
    if process.wait() != 0 or "path" not in last:
        raise BuildFailed(f"{device}: {last.get('error', f'the build ended with {process.returncode}')}")
    return Path(last["path"])
