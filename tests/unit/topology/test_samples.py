"""Recorded texts of many machines, which are not part of the repository. Where they lie beside it, all are read."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from scheduler.topology import Topology, TopologyRefused, parse
from scheduler.topology.text import decode

SAMPLES = Path(__file__).parents[3] / ".." / "shared" / "topology"
INDEX = SAMPLES / "index.tsv"

pytestmark = pytest.mark.skipif(not INDEX.exists(), reason="the recorded texts (../shared/topology) are not here")


@dataclass(frozen=True, slots=True)
class Sample:
    """A text and what a person read in it."""

    file: str
    num_gpus: int
    num_nics: int
    links: dict[str, str]
    affinities: tuple[list[str | None], ...]  # CPU, NUMA, GPU NUMA ID
    is_negative: bool
    is_cut: bool

    @property
    def text(self) -> str:
        return decode((SAMPLES / "samples" / self.file).read_bytes())


def read_index() -> list[Sample]:
    if not INDEX.exists():
        return []
    samples = []
    for line in INDEX.read_text(encoding="utf-8").splitlines()[1:]:
        file, num_gpus, num_nics, links, cpu, numa, tricky, gpu_numa, fidelity = line.split("\t")
        affinities = tuple(json.loads(column) for column in (cpu, numa, gpu_numa))
        is_negative = tricky.startswith("NEGATIVE")
        samples.append(
            Sample(
                file, int(num_gpus), int(num_nics), json.loads(links), affinities, is_negative, is_cut=fidelity == "cut"
            )
        )
    return samples


ALL = read_index()
WHOLE = [sample for sample in ALL if not sample.is_negative and not sample.is_cut]
CUT = [sample for sample in ALL if sample.is_cut]
NEGATIVE = [sample for sample in ALL if sample.is_negative]


def links_of(topology: Topology) -> dict[str, str]:
    return {f"{first}-{second}": link for (first, second), link in topology.links.items()}


@pytest.mark.parametrize("sample", WHOLE, ids=lambda sample: sample.file)
def test_a_whole_text_reads_as_a_person_read_it(sample: Sample) -> None:
    topology = parse(sample.text)

    assert links_of(topology) == sample.links
    assert topology.num_gpus == sample.num_gpus
    assert len(topology.nics) == sample.num_nics
    cpu, numa, gpu_numa = sample.affinities
    assert [gpu.cpu_affinity for gpu in topology.gpus] == cpu
    assert [gpu.numa_affinity for gpu in topology.gpus] == numa
    assert [gpu.gpu_numa_id for gpu in topology.gpus] == gpu_numa


@pytest.mark.parametrize("sample", CUT, ids=lambda sample: sample.file)
def test_of_a_cut_text_every_visible_pair_is_right_and_every_other_unknown(sample: Sample) -> None:
    topology = parse(sample.text)

    assert {pair: link for pair, link in links_of(topology).items() if link != "unknown"} == sample.links
    for shown, read in zip(sample.affinities, ("cpu_affinity", "numa_affinity", "gpu_numa_id"), strict=True):
        assert [getattr(gpu, read) for gpu in topology.gpus] == shown


@pytest.mark.parametrize("sample", NEGATIVE, ids=lambda sample: sample.file)
def test_what_is_no_link_matrix_is_refused(sample: Sample) -> None:
    with pytest.raises(TopologyRefused):
        parse(sample.text)
