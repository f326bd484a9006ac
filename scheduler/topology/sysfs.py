"""What the kernel says about PCI devices under /sys: the NUMA node, the near CPUs, which ones are GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scheduler.topology.pci import read_address

SYSFS = Path("/sys")

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller (PCI code and ID assignment, base class 03)


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Where a PCI device sits."""

    numa_node: int | None = None
    """None where the kernel says -1: one node, or firmware that does not tell."""
    cpu_list: str | None = None


def read_place(bus_id: str, root: Path = SYSFS) -> PciPlace:
    """Where the device of `bus_id` ("00000000:3B:00.0") sits; all None if there is no such device."""
    address = read_address(bus_id)
    if address is None:
        return PciPlace()
    device = root / "bus" / "pci" / "devices" / str(address)
    node = _read(device / "numa_node")
    cpu_list = _read(device / "local_cpulist")
    return PciPlace(int(node) if node is not None and node.isdigit() else None, cpu_list or None)


def list_gpus(root: Path = SYSFS) -> list[str]:
    """The bus ids of NVIDIA GPUs, ascending, whether or not a driver is loaded."""
    try:
        devices = sorted((root / "bus" / "pci" / "devices").iterdir())
    except OSError:
        return []
    return [
        device.name
        for device in devices
        if _read(device / "vendor") == _NVIDIA and (_read(device / "class") or "")[:6] in _DISPLAY_CLASSES
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
