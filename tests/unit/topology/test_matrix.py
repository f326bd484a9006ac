"""Every layout and quirk in tests/data/topology, read from its bytes as the command does."""

import json
from pathlib import Path

import pytest

from scheduler.topology import TopologyRefused, parse
from scheduler.topology.text import decode

DATA = Path(__file__).parents[2] / "data" / "topology"
CASES = sorted(path.stem for path in DATA.glob("*.txt"))
READ = [case for case in CASES if not case.startswith("refused_")]
REFUSED = [case for case in CASES if case.startswith("refused_")]


def text_of(case: str) -> str:
    return decode((DATA / f"{case}.txt").read_bytes())


def expected(case: str) -> dict:
    return json.loads((DATA / f"{case}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", READ)
def test_links_and_affinities_are_read_as_shown(case: str) -> None:
    wanted = expected(case)

    topology = parse(text_of(case))

    assert {f"{first}-{second}": link for (first, second), link in topology.links.items()} == wanted["links"]
    assert [gpu.cpu_affinity for gpu in topology.gpus] == wanted["cpu_affinity"]
    assert [gpu.numa_affinity for gpu in topology.gpus] == wanted["numa_affinity"]
    assert [gpu.gpu_numa_id for gpu in topology.gpus] == wanted["gpu_numa_id"]
    assert list(topology.nics) == wanted["nics"]
    assert topology.shows_nvlink is wanted["shows_nvlink"]


@pytest.mark.parametrize("case", READ)
def test_what_is_doubtful_is_warned_of_and_nothing_else(case: str) -> None:
    wanted = expected(case)["warned"]

    warnings = parse(text_of(case)).warnings

    assert all(any(part in warning for warning in warnings) for part in wanted)
    assert bool(warnings) == bool(wanted)


@pytest.mark.parametrize("case", REFUSED)
def test_a_text_without_a_link_matrix_is_refused_in_one_line(case: str) -> None:
    with pytest.raises(TopologyRefused, match=expected(case)["refused"]) as refused:
        parse(text_of(case))

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("case", "cpus", "numa_nodes"),
    [
        ("nvswitch_raw", set(range(36)) | set(range(72, 108)), {0}),
        ("grace_numa_sets", set(range(64)), {0, 5, 6, 7, 8, 9, 10, 11}),
        ("cpu_list_cut_by_nvidia_smi", None, {0}),
        ("cpu_list_clipped", None, {0}),
        ("empty_affinity_tabs", None, None),
        ("peer_matrix_around", set(range(12)), None),
    ],
)
def test_only_a_whole_list_counts_as_cpus(case: str, cpus: set[int] | None, numa_nodes: set[int] | None) -> None:
    gpu = parse(text_of(case)).gpus[0]

    assert gpu.cpus == cpus
    assert gpu.numa_nodes == numa_nodes


def test_a_list_that_crosses_its_neighbours_is_not_believed() -> None:
    rows = ["\tGPU0\tGPU1\tGPU2\tCPU Affinity", "GPU0\t X \tPIX\tPIX\t2-31", "GPU1\tPIX\t X \tPIX\t32-63"]

    topology = parse("\n".join([*rows, "GPU2\tPIX\tPIX\t X \t2-63"]))

    assert [gpu.cpus is None for gpu in topology.gpus] == [True, True, True]
    assert [gpu.cpu_affinity for gpu in topology.gpus] == ["2-31", "32-63", "2-63"]


def test_a_link_is_the_same_from_both_ends() -> None:
    topology = parse(text_of("table_box"))

    assert topology.link(4, 0) == topology.link(0, 4) == "SYS"
    assert topology.link(2, 2) == "X"
    assert topology.link(0, 99) == "unknown"
