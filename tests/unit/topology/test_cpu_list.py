"""CPU lists: whole ones are read, everything else is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.topology.cpu_list import may_be_truncated, read_list, write_list


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0", {0}),
        ("1-1", {1}),
        ("0,64", {0, 64}),
        ("0-2,8-9", {0, 1, 2, 8, 9}),
        ("0,5-7", {0, 5, 6, 7}),
    ],
)
def test_a_whole_list_is_read(text: str, numbers: set[int]) -> None:
    assert read_list(text) == numbers


@pytest.mark.parametrize(
    "text",
    ["", "N/A", "-31,64-95", "96-191,288-", "0-3,", "3-0", "8,0", "0-4,4-8", "0 - 3", "0x3", "9" * 5000, "\u00b2"],
)
def test_anything_else_is_none(text: str) -> None:
    assert read_list(text) is None


@given(st.sets(st.integers(0, 8191)))
def test_a_written_list_reads_back(numbers: set[int]) -> None:
    assert (read_list(write_list(numbers)) or frozenset()) == numbers


@pytest.mark.parametrize("text", ["0,2,4,6,8,10", "1,3,5,7,9,11", "0-1,4-5,8-9,12-13,16-17,20-21", "0,2,4"])
def test_a_list_that_nvidia_smi_may_have_cut_is_told(text: str) -> None:
    assert may_be_truncated(text)


@pytest.mark.parametrize("text", ["0-31,64-95", "0,64", "0", "0-3,8-11,16-19", "0,1,8"])
def test_a_list_that_ends_by_itself_is_not_doubted(text: str) -> None:
    assert not may_be_truncated(text)
