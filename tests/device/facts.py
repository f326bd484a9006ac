"""What machine this is."""

from __future__ import annotations

import importlib.metadata
import subprocess

import torch

from tests.device.setting import Setting

PACKAGES = ("torch", "triton", "transformers", "numpy", "onnxruntime", "tensorrt", "nvidia-pytriton")


def run(setting: Setting) -> dict[str, object]:
    """Versions, and NVML's facts where there is a GPU."""
    found: dict[str, object] = {"packages": {name: _version(name) for name in PACKAGES}, "commit": _commit()}
    if setting.device == "cuda":
        free, total = torch.cuda.mem_get_info(0)
        major, minor = torch.cuda.get_device_capability(0)
        found |= {"gpu": torch.cuda.get_device_name(0), "compute_capability": f"{major}.{minor}"}
        found |= {"free_mib": free >> 20, "total_mib": total >> 20, "cuda": torch.version.cuda, "nvml": _nvml()}
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _nvml() -> dict[str, object]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        "uuid": str(pynvml.nvmlDeviceGetUUID(handle)),
        "memory_mib": pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20,
        "max_pcie_generation": _asked(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "max_pcie_width": _asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "nvlinks": sum(_asked(pynvml.nvmlDeviceGetNvLinkState, handle, link) == 1 for link in range(18)),
    }


def _asked(call: object, *arguments: object) -> object:
    import pynvml

    try:
        return call(*arguments)  # type: ignore[operator]
    except pynvml.NVMLError as error:
        return str(error)
