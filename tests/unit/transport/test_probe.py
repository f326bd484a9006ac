"""How embeddings come from GPU to GPU: found out on the stand-in driver, and what follows for memory and prices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from python_backend.transport.boot import BootKey
from python_backend.transport.cuda import Driver
from python_backend.transport.device import DeviceSegment
from python_backend.transport.layout import Memory, SegmentLayout
from python_backend.transport.placing import create_segment, memory_of, transfers_of
from scheduler.cost import TransferCost
from scheduler.plan import Link, Plan, Replica, Transfer
from scheduler.profile import DecodeTable, EncodeTable, LimitsTable
from scheduler.transfers import describe_transfer, pairs, with_transfers

ROOT = Path(__file__).resolve().parents[3]
NUM_BYTES = 1 << 16


def plan_on(encoder: str = "cuda:0", *decoders: str, transfers: tuple[Transfer, ...] = ()) -> Plan:
    return Plan(
        checkpoint="c",
        artifacts="a",
        encoders=(Replica(name="clip_encoder", device=encoder),),
        decoders=tuple(Replica(name=f"llava_decoder_{i}", device=name) for i, name in enumerate(decoders)),
        encode=EncodeTable(),
        decode=DecodeTable(),
        limits=LimitsTable(),
        links=(Link(first="cuda:0", second="cuda:1", link="NV4", gigabytes_per_s=100.0, path="nvlink"),),
        transfers=transfers,
    )


def run_probe(library: Path, encoder: int, decoder: int, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "python_backend.transport", "probe", str(encoder), str(decoder)]
    return subprocess.run(
        [*command, "--bytes", str(NUM_BYTES)],
        env={**os.environ, "LD_LIBRARY_PATH": str(library.parent), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("pair", "variables", "route", "why"),
    [
        ((0, 0), {}, "device", ""),
        ((0, 1), {}, "peer", ""),
        ((0, 1), {"STANDIN_NO_PEER": "0-1"}, "staged", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
        ((1, 0), {"STANDIN_NO_IPC": "1"}, "staged", "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE"),
        ((0, 0), {"STANDIN_FAIL": "cuIpcGetMemHandle=1@1"}, "staged", "cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_the_route_is_what_a_copy_between_two_processes_showed(
    standin_library: Path, pair: tuple[int, int], variables: dict[str, str], route: str, why: str
) -> None:
    done = run_probe(standin_library, *pair, **variables)

    found = Transfer.model_validate_json(done.stdout)
    assert (found.encoder, found.decoder, found.route) == (f"cuda:{pair[0]}", f"cuda:{pair[1]}", route)
    assert why in found.why
    assert bool(found.why) == bool(why)
    assert found.gigabytes_per_s is not None
    assert found.gigabytes_per_s > 0


def test_without_a_driver_the_probe_says_so_in_one_line(tmp_path: Path) -> None:
    done = run_probe(tmp_path / "libcuda.so.1", 0, 1)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no NVIDIA driver: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_copy_of_other_bytes_is_no_route(standin_library: Path) -> None:
    command = [sys.executable, "-m", "python_backend.transport", "open", "1"]
    handle = b"STANDIN".ljust(64, b"\0").hex()
    done = subprocess.run(
        [*command, handle, "64", "0" * 64],
        env={**os.environ, "LD_LIBRARY_PATH": str(standin_library.parent)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stdout) == {"error": "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)"}


def transfer(route: str, decoder: str = "cuda:1", rate: float | None = 40.0) -> Transfer:
    return Transfer(encoder="cuda:0", decoder=decoder, route=route, gigabytes_per_s=rate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("encoder", "decoders", "routes", "memory"),
    [
        ("cpu", ("cpu",), (), "host"),
        ("cpu", ("cuda:1",), (), "host"),
        ("cuda:0", ("cuda:1",), ("peer",), "device"),
        ("cuda:0", ("cuda:0",), ("device",), "device"),
        ("cuda:0", ("cuda:1", "cuda:2"), ("peer", "staged"), "both"),
        ("cuda:0", ("cuda:1", "cpu"), ("peer",), "both"),
    ],
)
def test_embeddings_lie_where_every_decoder_can_read_them(
    encoder: str, decoders: tuple[str, ...], routes: tuple[str, ...], memory: Memory
) -> None:
    plan = plan_on(encoder, *decoders)

    assert memory_of(plan, plan.encoders[0], [transfer(route) for route in routes]) == memory


def test_only_what_the_plan_does_not_say_is_tried() -> None:
    plan = plan_on("cuda:0", "cuda:0", "cuda:1", "cuda:1", "cpu", transfers=(transfer("peer"),))
    asked: list[tuple[int, int]] = []

    def ask(encoder: int, decoder: int) -> Transfer:
        asked.append((encoder, decoder))
        return transfer("device", "cuda:0")

    found = transfers_of(plan, plan.encoders[0], ask)

    assert pairs(plan) == (("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"))
    assert asked == [(0, 0)]
    assert [each.route for each in found] == ["device", "peer"]


@pytest.mark.parametrize(("refused", "memory"), [("", "device"), ("0-1", "both")])
def test_an_encoder_on_a_gpu_keeps_its_embeddings_there(
    standin_library: Path,
    boot: BootKey,
    shared_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    memory: Memory,
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(standin_library.parent))
    monkeypatch.setenv("STANDIN_NO_PEER", refused)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plan = plan_on("cuda:0", "cuda:1")

    segment = create_segment(
        boot.id,
        SegmentLayout(3, 64, 6),
        plan,
        plan.encoders[0],
        lambda: Driver.load(str(standin_library)),
        shared_memory,
    )

    assert isinstance(segment, DeviceSegment)
    assert segment.layout.memory == memory
    segment.close()


def test_an_encoder_on_a_cpu_needs_no_driver(boot: BootKey, shared_memory: Path) -> None:
    plan = plan_on("cpu", "cpu")

    segment = create_segment(boot.id, SegmentLayout(3, 64, 6), plan, plan.encoders[0], Driver.load, shared_memory)

    assert segment.layout.memory == "host"
    segment.close()


def test_what_was_measured_is_what_a_transfer_is_priced_by() -> None:
    plan = with_transfers(plan_on("cuda:0", "cuda:1"), [transfer("peer", rate=47.0), transfer("device", "cuda:0")])

    (link,) = plan.links
    assert (link.has_peer_access, link.measured_gigabytes_per_s, link.gigabytes_per_s) == (True, 47.0, 100.0)
    cost = TransferCost(embedding_bytes=47e6)
    assert cost.image_s(link) == pytest.approx(1e-3)
    assert plan.transfers == (transfer("peer", rate=47.0), transfer("device", "cuda:0"))


def test_a_refused_pair_is_priced_as_staged_at_its_measured_rate() -> None:
    (link,) = with_transfers(plan_on("cuda:0", "cuda:1"), [transfer("staged", rate=9.0)]).links

    cost = TransferCost(embedding_bytes=9e6)
    assert link.is_staged
    assert (cost.start_s(link), cost.image_s(link)) == (cost.staged_setup_s, pytest.approx(1e-3))


def test_the_log_line_names_route_rate_and_reason() -> None:
    told = Transfer(encoder="cuda:0", decoder="cuda:1", route="staged", gigabytes_per_s=9.04, why="refused (217)")

    assert describe_transfer(told) == (
        "embeddings cuda:0 to cuda:1: through pinned host memory, 9.04 GB/s (refused (217))"
    )
