"""The order of link classes."""

import pytest

from scheduler.topology.links import distance, farther, is_link, num_nvlinks

NEAREST_FIRST = ["NV18", "NV12", "NV2", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS", "unknown"]


def test_classes_rank_by_how_near_they_are() -> None:
    assert sorted(sorted(NEAREST_FIRST), key=distance) == NEAREST_FIRST
    assert len({distance(link) for link in NEAREST_FIRST}) == len(NEAREST_FIRST)


def test_the_old_name_ranks_as_the_new_one() -> None:
    assert distance("SOC") == distance("SYS")


@pytest.mark.parametrize(
    ("first", "second", "worse"), [("PIX", "SYS", "SYS"), ("NV1", "NV12", "NV1"), ("SOC", "SYS", "SOC")]
)
def test_of_two_claims_the_farther_counts(first: str, second: str, worse: str) -> None:
    assert farther(first, second) == worse


@pytest.mark.parametrize(("link", "count"), [("NV1", 1), ("NV18", 18), ("NV37", 0), ("NV0", 0), ("NV", 0), ("NODE", 0)])
def test_nvlinks_are_counted(link: str, count: int) -> None:
    assert num_nvlinks(link) == count


@pytest.mark.parametrize("text", ["X", "unknown", "NVL", "NV99", "OK", "nv2", ""])
def test_what_nvidia_smi_does_not_print_is_no_link(text: str) -> None:
    assert not is_link(text)
