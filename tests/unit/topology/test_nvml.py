"""The real pynvml against machines that a stand-in for the driver's library plays."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from scheduler.topology import PcieLink, Topology
from scheduler.topology.bandwidth import Bandwidth, estimate
from scheduler.topology.cpu_list import read_list

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).parent / "nvml_stand_in.c"
DISCOVER = """
import pickle, sys
from pathlib import Path
from scheduler.topology.discover import discover
sys.stdout.buffer.write(pickle.dumps(discover(Path(sys.argv[1]), sys.argv[2:])))
"""
NO_COMMAND = ["no-such-nvidia-smi"]

Scenario = list[str]
Play = Callable[..., Topology]

pytest.importorskip("pynvml")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libnvidia-ml.so.1 built from the stand-in."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, SOURCE], check=True)
    return folder


@pytest.fixture
def play(library: Path, tmp_path: Path) -> Play:
    """What `discover` finds on the machine of a scenario, in a process of its own."""

    def play(scenario: Scenario, command: list[str] = NO_COMMAND, sysfs: Path = tmp_path) -> Topology:
        file = tmp_path / "scenario"
        file.write_text("\n".join([*scenario, ""]), encoding="utf-8")
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(library),
            "NVML_STAND_IN": str(file),
            "PYTHONPATH": str(ROOT),
        }
        arguments = [sys.executable, "-c", DISCOVER, str(sysfs), *command]
        done = subprocess.run(arguments, env=environment, check=True, capture_output=True)
        assert done.stderr == b""
        topology = pickle.loads(done.stdout)
        assert isinstance(topology, Topology)
        return topology

    return play


def bus(index: int) -> str:
    return f"00000000:{0x10 + 7 * index:02X}:00.0"


def words_of(cpus: str) -> str:
    """A CPU list as the stand-in's 64-bit words."""
    numbers = read_list(cpus) or frozenset()
    return " ".join(f"{sum(1 << n - 64 * w for n in numbers if n // 64 == w):x}" for w in range(max(numbers) // 64 + 1))


def gpus(count: int, name: str) -> Scenario:
    lines = [f"count = {count}", f"name * = {name}", "generation * = 4", "width * = 16", "mig * = 0", "virtual * = 0"]
    for index in range(count):
        lines += [f"bus {index} = {bus(index)}", f"uuid {index} = GPU-{index:032x}"]
    return lines


def affinity(index: int, cpus: str, node: int) -> Scenario:
    return [f"cpus {index} = {words_of(cpus)}", f"nodes {index} = {1 << node:x}"]


def direct(pairs: Iterable[tuple[int, int, int]]) -> Scenario:
    """Links (GPU, GPU, how many), each seen from both ends."""
    used: dict[int, int] = {}
    lines: Scenario = []
    for first, second, count in pairs:
        for here, there in ((first, second), (second, first)):
            for _ in range(count):
                lines.append(f"link {here} {used.setdefault(here, 0)} = gpu {bus(there)}")
                used[here] += 1
    return lines


PEERS = ["read * * = 0", "write * * = 0"]


def test_an_nvswitch_box_is_all_to_all(play: Play) -> None:
    scenario = gpus(8, "NVIDIA H100 80GB HBM3") + PEERS + ["ancestor * * = 50", "version * = 6", "generation * = 5"]
    for index in range(8):
        scenario += affinity(index, "0-47,96-143" if index < 4 else "48-95,144-191", index // 4)
        scenario += [f"link {index} {link} = switch" for link in range(18)]

    topology = play(scenario)

    assert (topology.source, topology.warnings, topology.shows_nvlink) == ("nvml", (), True)
    assert topology.num_gpus == 8
    assert set(topology.links.values()) == {"NV18"}
    assert len(topology.links) == 28
    assert set(topology.peer_access.values()) == {True}
    assert [gpu.cpu_affinity for gpu in topology.gpus] == ["0-47,96-143"] * 4 + ["48-95,144-191"] * 4
    assert [gpu.numa_affinity for gpu in topology.gpus] == ["0"] * 4 + ["1"] * 4
    assert topology.gpus[5].numa_nodes == {1}
    assert estimate(topology, 0, 7) == Bandwidth(450, "nvlink")


def test_a_dgx1_mesh_is_read_link_by_link(play: Play) -> None:
    doubled = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]
    single = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]
    mesh = [(*pair, 2) for pair in doubled] + [(*pair, 1) for pair in single]
    scenario = gpus(8, "Tesla V100-SXM2-32GB") + direct(mesh) + ["ancestor * * = 50", "version * = 2", *PEERS]

    topology = play(scenario)

    nvlinks = dict.fromkeys(doubled, "NV2") | dict.fromkeys(single, "NV1")
    assert topology.links == {pair: nvlinks.get(pair, "SYS") for pair in topology.pairs}
    assert estimate(topology, 0, 3) == Bandwidth(50, "nvlink")
    assert estimate(topology, 0, 1) == Bandwidth(25, "nvlink")


def test_a_bridged_pair_beside_a_lone_gpu(play: Play) -> None:
    scenario = gpus(3, "NVIDIA RTX A6000") + direct([(0, 1, 4)]) + ["ancestor * * = 40", *PEERS]
    scenario += ["link 2 0 = off", "link 2 1 = off"]

    topology = play(scenario)

    assert topology.links == {(0, 1): "NV4", (0, 2): "NODE", (1, 2): "NODE"}
    assert estimate(topology, 0, 1) == Bandwidth(56, "nvlink")


def test_on_an_all_sys_box_without_peer_access_numa_is_what_is_left(play: Play) -> None:
    scenario = [*gpus(4, "NVIDIA GeForce RTX 4090"), "ancestor * * = 50", "read * * = 1", "write * * = 1"]
    for index in range(4):
        scenario += affinity(index, "0-31" if index < 2 else "32-63", index // 2)

    topology = play(scenario)

    assert set(topology.links.values()) == {"SYS"}
    assert set(topology.peer_access.values()) == {False}
    assert [gpu.numa_nodes for gpu in topology.gpus] == [{0}, {0}, {1}, {1}]
    assert estimate(topology, 0, 1) == Bandwidth(5, "staged")
    assert "peer access refused" in topology.warnings[0]


def test_reading_without_writing_is_no_peer_access(play: Play) -> None:
    topology = play([*gpus(2, "NVIDIA L4"), "ancestor * * = 30", "read * * = 0", "write 1 0 = 5", "write * * = 0"])

    assert topology.peer_access == {(0, 1): False}


def test_mig_is_seen_and_takes_peer_access_away(play: Play) -> None:
    scenario = gpus(2, "NVIDIA A100-SXM4-80GB") + PEERS + ["ancestor * * = 20", "mig 1 = 1"]
    scenario += [f"link {gpu} {link} = switch" for gpu in range(2) for link in range(12)]

    topology = play(scenario)

    assert [gpu.is_mig for gpu in topology.gpus] == [False, True]
    assert topology.links == {(0, 1): "NV12"}
    assert topology.peer_access == {(0, 1): False}
    assert topology.warnings[0] == "MIG is on for GPU1: no peer access between instances"


def test_calls_that_fail_cost_their_own_answer_only(play: Play) -> None:
    scenario = [*gpus(2, "NVIDIA A10"), "name 1 = error 999", "ancestor * * = error 999", "read * * = error 999"]
    scenario += ["cpus * = error 7", "link * * = error 999"]

    topology = play(scenario)

    assert [gpu.name for gpu in topology.gpus] == ["NVIDIA A10", None]
    assert topology.gpus[0].pcie == PcieLink(4, 16)
    assert topology.links == {(0, 1): "unknown"}
    assert topology.peer_access == {}
    assert topology.shows_nvlink is False
    assert "nvmlDeviceGetName: Unknown Error for GPU1" in topology.warnings
    assert "nvmlDeviceGetCpuAffinity: Insufficient Size for GPU0, GPU1" in topology.warnings


def test_a_lost_gpu_keeps_its_index(play: Play) -> None:
    topology = play([*gpus(3, "NVIDIA H200"), "handle 1 = error 15", "ancestor * * = 40"])

    assert [gpu.name for gpu in topology.gpus] == ["NVIDIA H200", None, "NVIDIA H200"]
    assert topology.links == {(0, 1): "unknown", (0, 2): "NODE", (1, 2): "unknown"}
    assert "nvmlDeviceGetHandleByIndex: GPU is lost for GPU1" in topology.warnings


def test_grace_has_a_numa_node_of_its_own(play: Play) -> None:
    topology = play([*gpus(1, "NVIDIA GH200 480GB"), "node 0 = 4", "nodes 0 = fe1", "cpus 0 = ffffffffffffffff ff"])

    assert topology.gpus[0].gpu_numa_id == "4"
    assert topology.gpus[0].numa_affinity == "0,5-11"
    assert topology.gpus[0].cpu_affinity == "0-71"


def test_the_kernel_fills_in_numa_and_cpus(play: Play, tmp_path: Path) -> None:
    device = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:10:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("3\n")
    (device / "local_cpulist").write_text("24-31,56-63\n")

    topology = play(gpus(1, "NVIDIA A30"), sysfs=tmp_path / "sys")

    assert topology.gpus[0].numa_affinity == "3"
    assert topology.gpus[0].cpu_affinity == "24-31,56-63"


def test_a_virtual_machine_shows_no_true_distance(play: Play) -> None:
    topology = play([*gpus(2, "NVIDIA A100-SXM4-40GB"), "virtual * = 1", "ancestor * * = 30"])

    assert topology.links == {(0, 1): "unknown"}
    assert topology.warnings[0] == "virtual machine: all PCIe distances read PHB, so they are unknown"


def test_where_nvml_knows_no_link_the_text_may(play: Play, tmp_path: Path) -> None:
    matrix = tmp_path / "matrix"
    matrix.write_text("\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n")

    topology = play([*gpus(2, "NVIDIA RTX A6000"), "ancestor * * = error 999"], ["cat", str(matrix)])

    assert topology.source == "nvml"
    assert topology.links == {(0, 1): "NV4"}
    assert topology.warnings[-1].startswith("links read from `cat ")


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        (["init = error 9"], "NVML does not start: Driver Not Loaded"),
        (["init = error 18"], "NVML does not start: RM has detected an NVML/RM version mismatch."),
        (["count = error 999"], "NVML does not count the GPUs: Unknown Error"),
    ],
)
def test_a_driver_that_fails_leads_to_the_next_source(play: Play, scenario: Scenario, reason: str) -> None:
    topology = play(scenario)

    assert topology.source == "none"
    assert topology.warnings == (reason, "`no-such-nvidia-smi` cannot be run: No such file or directory")


def test_no_gpu_is_an_answer(play: Play) -> None:
    topology = play(["count = 0"])

    assert (topology.num_gpus, topology.links, topology.source, topology.warnings) == (0, {}, "nvml", ())
