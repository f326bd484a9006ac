"""No text breaks the parser, and damage leads to "unknown" or a refusal, never to a link that is not there."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.topology import Topology, TopologyRefused, parse
from scheduler.topology.links import is_link
from scheduler.topology.text import decode
from scheduler.topology.topology import all_pairs

DATA = Path(__file__).parents[2] / "data" / "topology"
TEXTS = {path.stem: decode(path.read_bytes()) for path in sorted(DATA.glob("*.txt"))}
# Layouts shown in full, for which a pair that is known after the damage must be what it was before.
WHOLE = [
    "nvswitch_raw", "cube_mesh_oldest", "bridged_pairs_stripped", "switch_tree_quoted", "switch_tree_log",
    "table_box", "grace_numa_sets", "sixteen_gpus", "nvlink_hidden", "cpu_list_cut_by_nvidia_smi",
]  # fmt: skip
CELL = r"(?<![A-Za-z0-9])(?:X|NV[0-9]+|PIX|PXB|PHB|NODE|SYS|SOC)(?![A-Za-z0-9])"

Damage = Callable[[str, random.Random], str]


def cut_off(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text))]


def lose_a_line(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    del lines[chance.randrange(len(lines))]
    return "\n".join(lines)


def repeat_a_line(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    place = chance.randrange(len(lines))
    return "\n".join([*lines[:place], lines[place], *lines[place:]])


def lose_a_cell(text: str, chance: random.Random) -> str:
    cell = chance.choice(list(re.finditer(CELL, text)))
    return text[: cell.start()] + text[cell.end() :]


def spoil_a_cell(text: str, chance: random.Random) -> str:
    cell = chance.choice(list(re.finditer(CELL, text)))
    return text[: cell.start()] + chance.choice(["??", "N/A", "-", "OK", "NVL"]) + text[cell.end() :]


def lose_a_gap(text: str, chance: random.Random) -> str:
    gap = chance.choice(list(re.finditer(r"[ \t]+", text)))
    return text[: gap.start()] + text[gap.end() :]


def expand_tabs(text: str, chance: random.Random) -> str:
    return text.expandtabs(8)


def collapse_blanks(text: str, chance: random.Random) -> str:
    return re.sub(r"[ \t]+", " ", text)


def double_tabs(text: str, chance: random.Random) -> str:
    return text.replace("\t", "\t\t")


def strip_lines(text: str, chance: random.Random) -> str:
    return "\n".join(line.strip() for line in text.split("\n"))


def wrap_lines(text: str, chance: random.Random) -> str:
    width = chance.randrange(24, 140)
    lines = text.expandtabs(8).split("\n")
    return "\n".join(line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width))


def write_twice(text: str, chance: random.Random) -> str:
    return f"{text}\n{text}"


DAMAGES: list[Damage] = [
    cut_off, lose_a_line, repeat_a_line, lose_a_cell, spoil_a_cell, lose_a_gap, expand_tabs, collapse_blanks,
    double_tabs, strip_lines, wrap_lines, write_twice,
]  # fmt: skip


def read(text: str) -> Topology | None:
    """The topology, checked for what holds of every topology; None for a refused text."""
    try:
        topology = parse(text)
    except TopologyRefused:
        return None
    assert topology.num_gpus > 0
    assert list(topology.links) == all_pairs(topology.num_gpus)
    assert all(link == "unknown" or is_link(link) for link in topology.links.values())
    return topology


@pytest.mark.parametrize("damage", DAMAGES)
@settings(max_examples=60)
@given(case=st.sampled_from(WHOLE), seed=st.integers(0, 2**32))
def test_a_damaged_text_gives_no_wrong_link(damage: Damage, case: str, seed: int) -> None:
    truth = json.loads((DATA / f"{case}.json").read_text(encoding="utf-8"))["links"]

    topology = read(damage(TEXTS[case], random.Random(seed)))

    known = {f"{a}-{b}": link for (a, b), link in topology.links.items() if link != "unknown"} if topology else {}
    assert known.items() <= truth.items()


@settings(max_examples=150)
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    read(text)


WORDS = [
    "GPU0", "GPU1", "GPU2", "GPU10", "GPU127", "GPU128", "NIC0", "mlx5_0", "X", " X ", "NV1", "NV12", "NV99", "PIX",
    "SYSSYS", "PH0-9", "OK", "N/A", "0-3", "0-31,64-950", "-3,", "9" * 5000, "0", "\u00b2", "CPU Affinity",
    "NUMA Affinity", "GPU NUMA ID", "NUMA 1", "Legend:", "X = Self", "NIC0: mlx5_0", "---", "\x1b[4m", "\u00a0",
    "\ud800", "|", "| |", "\t", "\t\t", " ", "        ", "\n", "\r\n", "\\n", "\\t", "topo -p2p",
]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=60), st.sampled_from(["", " ", "\t", "|"]))
def test_any_heap_of_its_own_words_is_read_or_refused(words: list[str], glue: str) -> None:
    read(glue.join(words))


@settings(max_examples=150)
@given(st.sampled_from(sorted(TEXTS)), st.integers(0, 2**32), st.integers(1, 20))
def test_any_mutation_is_read_or_refused(case: str, seed: int, num_changes: int) -> None:
    chance = random.Random(seed)
    letters = list(TEXTS[case])
    for _ in range(num_changes):
        place = chance.randrange(len(letters))
        letters[place] = chance.choice(["", "\t", "\n", " ", "|", "X", "0", "GPU1", letters[place] * 2])

    read("".join(letters))


@pytest.mark.parametrize(
    "text",
    [
        "GPU0 X\n" * 20_000,
        "GPU0 GPU1\n" + "NIC1\n" * 20_000,
        "GPU0 GPU1 " + " ".join(f"NIC{index}" for index in range(20_000)),
        "GPU0 GPU1\nGPU0 X SYS " + "NUMA " * 40_000,
        "GPU0 GPU1\nGPU0 X" + "SYS" * 40_000,
        "GPU0 CPU Affinity\nGPU0 X " + "9" * 100_000,
        "GPU0" + " " * 100_000 + "GPU1",
        "a" * 100_000 + "9" * 100_000,
    ],
    ids=["rows", "header lines", "names", "words", "fused", "digits", "blanks", "letters"],
)
def test_the_work_grows_with_the_text_and_no_faster(text: str) -> None:
    read(text)  # minutes, if it grew with the square
