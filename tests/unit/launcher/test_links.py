"""What `serve` finds out about the GPUs of a plan before it starts the server, on the stand-in driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.links import ProbeRefused, measure
from tests.golden.refresh import plan_of


def variables(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), **more}


def test_a_plan_is_served_with_its_links_as_a_copy_showed_them(standin_library: Path) -> None:
    said: list[str] = []

    plan = measure(plan_of("two_gpu"), variables(standin_library.parent), said.append)

    (transfer,) = plan.transfers
    assert (transfer.encoder, transfer.decoder, transfer.route) == ("cuda:0", "cuda:1", "peer")
    assert plan.links[0].measured_gigabytes_per_s == transfer.gigabytes_per_s
    assert [line.rpartition(",")[0] for line in said] == ["embeddings cuda:0 to cuda:1: from the peer's memory"]


def test_a_refused_pair_is_said_and_staged(standin_library: Path) -> None:
    said: list[str] = []

    plan = measure(plan_of("two_gpu"), variables(standin_library.parent, STANDIN_NO_PEER="0-1"), said.append)

    assert plan.links[0].is_staged
    assert "through pinned host memory" in said[0]
    assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in said[0]


def test_a_plan_without_gpus_is_left_alone(tmp_path: Path) -> None:
    plan = plan_of("cpu")

    assert measure(plan, variables(tmp_path), print) is plan


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"STANDIN_DEVICES": "0"}, "the NVIDIA driver sees no GPU; is CUDA_VISIBLE_DEVICES empty?"),
        ({"STANDIN_DEVICES": "1"}, "no device cuda:1; the driver sees 1"),
        ({"STANDIN_FAIL": "cuInit=999@1"}, "the NVIDIA driver cannot start: cuInit: unknown (999)"),
    ],
)
def test_gpus_that_are_not_there_are_refused_in_one_line(
    standin_library: Path, more: dict[str, str], told: str
) -> None:
    with pytest.raises(ProbeRefused) as refused:
        measure(plan_of("two_gpu"), variables(standin_library.parent, **more), print)

    assert str(refused.value) == f"cuda:0 to cuda:1: {told}"
