"""Where an encoder's embeddings lie: in host memory, on its GPU, or both, by who reads them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from python_backend.transport.boot import SHARED_MEMORY
from python_backend.transport.cuda import Driver
from python_backend.transport.device import DeviceSegment
from python_backend.transport.layout import Memory, SegmentLayout
from python_backend.transport.probe import probe
from python_backend.transport.segment import Segment
from scheduler.plan import Plan, Replica, Transfer
from scheduler.transfers import describe_transfer, pairs

logger = logging.getLogger(__name__)

CPU = "cpu"


def gpu_index(device: str) -> int | None:
    """The number of a GPU's name; None for a CPU's."""
    return int(device.removeprefix("cuda:")) if device.startswith("cuda:") else None


def transfers_of(plan: Plan, encoder: Replica, ask: Callable[[int, int], Transfer]) -> list[Transfer]:
    """How the encoder's embeddings come to the GPUs of the plan's decoders; asks for what the plan does not say."""
    known = {(transfer.encoder, transfer.decoder): transfer for transfer in plan.transfers}
    return [
        known.get(pair) or ask(gpu_index(pair[0]) or 0, gpu_index(pair[1]) or 0)
        for pair in pairs(plan)
        if pair[0] == encoder.device
    ]


def memory_of(plan: Plan, encoder: Replica, transfers: list[Transfer]) -> Memory:
    """What kind of memory every decoder of the plan can read."""
    if encoder.device == CPU:
        return "host"
    needs_host = any(decoder.device == CPU for decoder in plan.decoders)
    return "both" if needs_host or any(transfer.route == "staged" for transfer in transfers) else "device"


def create_segment(
    boot_id: str,
    layout: SegmentLayout,
    plan: Plan,
    encoder: Replica,
    load: Callable[[], Driver] = Driver.load,
    directory: Path = SHARED_MEMORY,
) -> Segment:
    """The segment of an encoder's embeddings, in the memory that suits the plan; `layout` gives its sizes.

    Raises:
        CudaMissing: the encoder is to run on a GPU that is not there.
        Overloaded: no room for it.
    """
    index = gpu_index(encoder.device)
    if index is None:
        return Segment.create(boot_id, layout, directory)
    driver = load()
    device = driver.device(index)
    transfers = transfers_of(plan, encoder, lambda one, other: probe(driver, one, other))
    for transfer in transfers:
        logger.info("%s", describe_transfer(transfer))
    placed = replace(layout, memory=memory_of(plan, encoder, transfers))
    return DeviceSegment.allocate(boot_id, placed, device, directory)
