"""Recorded workloads: a CSV with a row per request.

    time_s, images, prompt_tokens, output_tokens            and, where they are known,
    max_tokens, deadline_s, priority, cancel_s, image_key   (image_key: equal values are equal images)

The columns of Azure's published multimodal trace (TIMESTAMP, NumImages, ContextTokens, GeneratedTokens) are read too;
its times may be seconds or dates. `prompt_tokens` counts those of the images.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from scheduler.simulate.workload import Floats, Ints, Workload, WorkloadRefused

NEEDED = ("time_s", "images", "prompt_tokens", "output_tokens")
OPTIONAL = ("max_tokens", "deadline_s", "priority", "cancel_s", "image_key")
AZURE = {
    "TIMESTAMP": "time_s",
    "NumImages": "images",
    "ContextTokens": "prompt_tokens",
    "GeneratedTokens": "output_tokens",
}
MOST = 2**53  # whole numbers above it are not exact


def read_trace(path: Path) -> Workload:
    """The workload in a CSV file.

    Raises:
        WorkloadRefused: it cannot be read, has no rows, lacks a column, or holds a value that is not allowed.
    """
    try:
        text = path.read_text("utf-8-sig")  # spreadsheets write a mark first
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise WorkloadRefused(f"trace {path}: {reason}") from error
    return parse_trace(text, str(path))


def parse_trace(text: str, source: str) -> Workload:
    """The workload in a CSV text; `source` names it in errors. Raises as `read_trace`."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise WorkloadRefused(f"trace {source}: no CSV: {error}") from error
    if not rows:
        raise WorkloadRefused(f"trace {source}: empty; a header line and a row per request are needed")
    header = [AZURE.get(name.strip(), name.strip()) for name in rows[0]]
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise WorkloadRefused(
            f"trace {source}: no column {', '.join(missing)}; the columns are {', '.join(NEEDED)}, and allowed are "
            f"{', '.join(OPTIONAL)}"
        )
    unknown = [name for name in header if name not in (*NEEDED, *OPTIONAL)]
    if unknown:
        raise WorkloadRefused(f"trace {source}: unknown column {', '.join(unknown)}; allowed: {', '.join(OPTIONAL)}")
    body = [(number, row) for number, row in enumerate(rows[1:], start=2) if row]
    if not body:
        raise WorkloadRefused(f"trace {source}: no rows below the header; at least 1 request is needed")
    columns = {name: _column(source, name, header.index(name), body) for name in header}
    try:
        workload = _workload(columns).checked()
    except WorkloadRefused as error:
        raise WorkloadRefused(f"trace {source}: {error} (request 0 is line 2)") from error
    return replace(workload, arrived_s=workload.arrived_s - workload.arrived_s[0])


def to_csv(workload: Workload) -> str:
    """A trace file of a workload that is no closed loop."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*NEEDED, "max_tokens"])
    for row in zip(
        workload.arrived_s.tolist(),
        workload.num_images.tolist(),
        workload.prompt_tokens.tolist(),
        workload.output_tokens.tolist(),
        workload.max_tokens.tolist(),
        strict=True,
    ):
        writer.writerow([f"{row[0]:.6f}", *row[1:]])
    return out.getvalue()


def _workload(columns: dict[str, Floats]) -> Workload:
    def whole(name: str) -> Ints:
        return columns[name].astype(np.int64)

    output = whole("output_tokens")
    return Workload(
        arrived_s=columns["time_s"],
        num_images=whole("images"),
        prompt_tokens=whole("prompt_tokens"),
        output_tokens=output,
        max_tokens=whole("max_tokens") if "max_tokens" in columns else output,
        image_keys=whole("image_key") if "image_key" in columns else None,
        priority=whole("priority") if "priority" in columns else None,
        deadline_s=columns.get("deadline_s"),
        cancel_s=columns.get("cancel_s"),
    )


def _column(source: str, name: str, index: int, body: Sequence[tuple[int, list[str]]]) -> Floats:
    """An empty cell of a time that may be missing is infinite, of another optional column 0."""
    read: Callable[[str], float] = _time if name == "time_s" else float
    values = np.empty(len(body))
    for place, (line, row) in enumerate(body):
        cell = row[index].strip() if index < len(row) else ""
        if not cell and name in OPTIONAL:
            values[place] = np.inf if name in ("deadline_s", "cancel_s") else 0
            continue
        try:
            values[place] = read(cell)
        except ValueError:
            needed = "seconds or a date are" if name == "time_s" else "a number is"
            raise WorkloadRefused(f"trace {source}, line {line}: {name} is {cell!r}; {needed} needed") from None
        if name in ("time_s", "deadline_s", "cancel_s"):
            continue
        if not values[place].is_integer() or abs(values[place]) > MOST:
            raise WorkloadRefused(f"trace {source}, line {line}: {name} is {cell!r}; a whole number is needed")
    return values


def _time(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float(np.datetime64(cell.removesuffix("Z").removesuffix("+00:00"), "us").astype(np.int64)) / 1e6
