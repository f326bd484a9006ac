"""A workload as plain lists, which are faster to read one by one."""

from __future__ import annotations

from scheduler.loads import RequestShape
from scheduler.simulate.workload import Floats, Ints, Workload


class Columns:
    """The columns that a simulation reads, request by request."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.arrived_s: list[float] = workload.arrived_s.tolist()
        self.output_tokens: list[int] = workload.output_tokens.tolist()
        self.priority = _whole(workload.priority)
        self.deadline_s = _real(workload.deadline_s)
        self.cancel_s = _real(workload.cancel_s)
        self._images: list[int] = workload.num_images.tolist()
        self._prompts: list[int] = workload.prompt_tokens.tolist()
        self._allowed: list[int] = workload.max_tokens.tolist()
        self._keys = _whole(workload.image_keys)

    def shape(self, index: int) -> RequestShape:
        """What the decision knows of a request."""
        num_images = self._images[index]
        keys: tuple[bytes, ...] = ()
        if self._keys is not None and num_images:
            keys = tuple(f"{self._keys[index]}.{place}".encode() for place in range(num_images))
        return RequestShape(
            num_images, self._prompts[index], self._allowed[index], self._workload.image_tokens, image_keys=keys
        )


def _whole(column: Ints | None) -> list[int] | None:
    return None if column is None else list(column.tolist())


def _real(column: Floats | None) -> list[float] | None:
    return None if column is None else list(column.tolist())
