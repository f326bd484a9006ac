"""The order of sources, on machines without NVML that are made of a script and a folder."""

import sys
from pathlib import Path

import pytest

from scheduler.topology import nvml
from scheduler.topology.discover import TopoFailed, discover, read_topo

MATRIX = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPIX\t0-7\nGPU1\tPIX\t X \t0-7\n"
NO_NVML = "NVML does not start: NVML Shared Library Not Found"


@pytest.fixture(autouse=True)
def without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVML, also on a machine that has one."""
    pynvml = pytest.importorskip("pynvml")

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)


def script(folder: Path, body: str) -> list[str]:
    file = folder / "nvidia_smi.py"
    file.write_text(body, encoding="utf-8")
    return [sys.executable, str(file)]


def printing(folder: Path, text: str, code: int = 0) -> list[str]:
    return script(folder, f"import sys\nsys.stdout.write({text!r})\nsys.exit({code})\n")


def pci_device(sysfs: Path, slot: str, vendor: str, kind: str, node: str, cpus: str) -> None:
    device = sysfs / "bus" / "pci" / "devices" / slot
    device.mkdir(parents=True)
    facts = {"vendor": vendor, "class": kind, "numa_node": node, "local_cpulist": cpus}
    for name, value in facts.items():
        (device / name).write_text(f"{value}\n")


def test_without_nvml_the_text_counts(tmp_path: Path) -> None:
    topology = discover(tmp_path, printing(tmp_path, MATRIX))

    assert topology.source == "nvidia-smi"
    assert topology.links == {(0, 1): "PIX"}
    assert topology.warnings == (NO_NVML,)


def test_a_matrix_counts_whatever_the_exit_code(tmp_path: Path) -> None:
    topology = discover(tmp_path, printing(tmp_path, MATRIX, 255))

    assert topology.links == {(0, 1): "PIX"}
    assert topology.warnings[1].endswith("printed a matrix and exited with 255")


def test_a_command_that_hangs_is_given_up(tmp_path: Path) -> None:
    command = script(tmp_path, "import signal\nsignal.pause()\n")

    with pytest.raises(TopoFailed, match=r"took longer than 0\.2 s"):
        read_topo(command, timeout_s=0.2)


def test_an_error_message_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(TopoFailed, match=r"\(exit code 9\): this is an error message.*NVIDIA-SMI has failed"):
        read_topo(printing(tmp_path, "NVIDIA-SMI has failed because ...\n", 9))


def test_the_last_resort_is_flat_and_says_so(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:65:00.0", "0x10de", "0x030200", "1", "8-15")
    pci_device(tmp_path, "0000:17:00.0", "0x10de", "0x030000", "-1", "0-15")
    pci_device(tmp_path, "0000:17:00.1", "0x10de", "0x040300", "0", "0-7")  # the GPU's sound
    pci_device(tmp_path, "0000:02:00.0", "0x1a03", "0x030000", "0", "0-7")  # the board's own display

    topology = discover(tmp_path, ["no-such-command"])

    assert topology.source == "sysfs"
    assert [gpu.bus_id for gpu in topology.gpus] == ["0000:17:00.0", "0000:65:00.0"]
    assert topology.links == {(0, 1): "unknown"}
    assert [gpu.numa_affinity for gpu in topology.gpus] == ["N/A", "1"]
    assert [gpu.cpu_affinity for gpu in topology.gpus] == ["0-15", "8-15"]
    assert topology.warnings == (NO_NVML, "`no-such-command` cannot be run: No such file or directory")


def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    topology = discover(tmp_path / "missing", ["no-such-command"])

    assert (topology.source, topology.num_gpus) == ("none", 0)


def test_a_missing_package_is_a_reason_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with pytest.raises(nvml.NvmlUnavailable, match="the package nvidia-ml-py is not installed"):
        nvml.read_nvml()
