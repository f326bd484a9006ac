"""PCI addresses, which NVML writes as 00000000:3B:00.0 and the kernel as 0000:3b:00.0."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADDRESS = re.compile(r"(?:([0-9A-Fa-f]{1,8}):)?([0-9A-Fa-f]{1,2}):([0-9A-Fa-f]{1,2})(?:\.([0-7]))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PciAddress:
    """Where a device is on the PCI buses. Equal however it was written."""

    domain: int
    bus: int
    device: int
    function: int = 0

    def __str__(self) -> str:
        """As the kernel names it under /sys/bus/pci/devices."""
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function}"


def read_address(text: str | None) -> PciAddress | None:
    """The address that `text` is; None if it is none."""
    match = _ADDRESS.fullmatch(text or "")
    if match is None:
        return None
    domain, bus, device, function = match.groups(default="0")
    return PciAddress(int(domain, 16), int(bus, 16), int(device, 16), int(function))
