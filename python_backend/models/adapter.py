"""What the Triton models share: where they stand, how inputs are read and errors told."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from python_backend.checkpoint import CheckpointFacts, read_facts, resolve
from python_backend.errors import RelayError
from python_backend.pulse import end_with
from python_backend.transport.boot import BootKey, boot_key, server_pid
from python_backend.transport.handle import fingerprint_of
from python_backend.transport.janitor import remove_orphans
from scheduler.plan import Plan, Replica, read_plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a model process stands: its name, the plan it follows, the checkpoint, the boot it belongs to."""

    model: str
    repository: Path
    plan: Plan
    facts: CheckpointFacts
    boot: BootKey

    @property
    def replica(self) -> Replica:
        """This process's own place in the plan; for a stage's models only."""
        return next(each for each in (*self.plan.encoders, *self.plan.decoders) if each.name == self.model)

    @property
    def embedding_fingerprint(self) -> bytes:
        """16 bytes that say which model and which form of features an embedding is of."""
        return fingerprint_of(self.facts.fingerprint.hex(), self.plan.encode.dtype)


def open_site(arguments: Mapping[str, str]) -> Site:
    """The site of the model that Triton initialises with `arguments`; from now on the process ends with Triton."""
    end_with(server_pid())
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname).1s {arguments['model_name']} %(message)s",
        force=True,
    )
    for name in ("httpx", "transformers", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    repository = _repository(Path(arguments["model_repository"]))
    plan = read_plan(repository)
    bind(next((each.cpus for each in (*plan.encoders, *plan.decoders) if each.name == arguments["model_name"]), ()))
    for name in remove_orphans():
        logger.warning("removed %s, left by a server that died", name)
    return Site(
        model=arguments["model_name"],
        repository=repository,
        plan=plan,
        facts=read_facts(resolve(plan.checkpoint)),
        boot=boot_key(server_pid()),
    )


def bind(cpus: Sequence[int]) -> None:
    """Keeps this process on `cpus`: its threads, and those that they start. Nothing when `cpus` is empty.

    A CPU set that the machine does not have is logged, and the process stays where the system puts it.
    """
    if not cpus:
        return
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cpus)
    except OSError as error:
        logger.warning("cannot be bound to CPU %s: %s", ",".join(map(str, cpus)), error.strerror)


def _repository(path: Path) -> Path:
    """The repository's folder: some releases of Triton name the model's folder instead."""
    return path if (path / "plan.json").exists() else path.parent


def tensors(request: Any) -> dict[str, npt.NDArray[Any]]:
    """Copies of a request's inputs by name; they outlive the request."""
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}


def parameters(request: Any) -> dict[str, Any]:
    """A request's parameters; Triton hands them over as JSON text."""
    return dict(json.loads(request.parameters() or "{}"))


def trace_of(request: Any) -> str:
    """The context of a request's trace, a W3C traceparent; empty: Triton does not trace it."""
    context = request.trace().get_context()
    return str(json.loads(context).get("traceparent", "")) if context else ""


def text_tensor(name: str, *values: str | bytes, shape: tuple[int, ...] | None = None) -> Any:
    """A BYTES tensor, of shape (number of values,) unless told otherwise."""
    data = [value.encode() if isinstance(value, str) else value for value in values]
    array = np.empty(len(data), dtype=np.object_)
    array[:] = data
    return pb_utils.Tensor(name, array if shape is None else array.reshape(shape))


def failure(error: RelayError) -> Any:
    """A response that tells an error, with its code in the text and in Triton's status."""
    return pb_utils.InferenceResponse(error=triton_error(error))


def triton_error(error: RelayError) -> Any:
    """Triton's form of an error."""
    return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.triton_status))
