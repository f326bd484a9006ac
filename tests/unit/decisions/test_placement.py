"""Profiles and topologies become plans: the widest edges, then NUMA, and what cannot fit is refused by its key."""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from pathlib import Path

import pytest

from scheduler.__main__ import main
from scheduler.arrange import MOST_TRIED, Wanted, arrange
from scheduler.edges import Edges
from scheduler.placement import PlacementRefused, place
from scheduler.plan import Plan
from scheduler.profile import ProfileRefused, parse_profile
from scheduler.topology import Gpu, Topology
from scheduler.topology.topology import all_pairs
from tests.golden.refresh import GOLDEN, PROFILES

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


def machine(
    num_gpus: int, link: Callable[[int, int], str], name: str | None = A100, per_node: int | None = None
) -> Topology:
    """GPUs of one name, `per_node` of them on each NUMA node."""
    gpus = tuple(
        Gpu(name=name, numa_nodes=frozenset({index // per_node}) if per_node else None) for index in range(num_gpus)
    )
    return Topology(gpus=gpus, links={pair: link(*pair) for pair in all_pairs(num_gpus)}, source="test")


def bridged(*pairs: tuple[int, int]) -> Callable[[int, int], str]:
    """NVLink between those pairs, SYS between all others."""
    return lambda first, second: "NV12" if (first, second) in pairs else "SYS"


def placed(topology: Topology | None, text: str = "", encoders: int = 1, decoders: int = 1) -> Plan:
    """Automatic placement of so many replicas."""
    tables = f"[encode]\nreplicas = {encoders}\ndevices = 'auto'\n[decode]\nreplicas = {decoders}\ndevices = 'auto'\n"
    return place(parse_profile(tables + text, "p.toml"), topology)


def devices(plan: Plan) -> tuple[list[str], list[str]]:
    """Where the encoders stand, and where the decoders."""
    return [each.device for each in plan.encoders], [each.device for each in plan.decoders]


def cuda(*indices: int) -> list[str]:
    """Names of GPUs."""
    return [f"cuda:{index}" for index in indices]


@pytest.mark.parametrize(
    ("topology", "num_encoders", "num_decoders", "expected", "tier"),
    [
        (machine(4, bridged((1, 3))), 1, 1, (cuda(1), cuda(3)), "nvlink"),
        (machine(4, bridged((0, 2), (1, 3))), 2, 2, (cuda(0, 1), cuda(2, 3)), "nvlink"),
        # NVLink may cross NUMA nodes: the wider edge counts first.
        (machine(4, bridged((0, 2)), per_node=2), 1, 1, (cuda(0), cuda(2)), "nvlink"),
        # On a uniform fabric NUMA decides: an encoder on each node.
        (machine(8, lambda *_: "NV18", H100, 4), 2, 6, (cuda(0, 4), cuda(1, 2, 3, 5, 6, 7)), "nvlink"),
        (machine(8, lambda *_: "SYS", "NVIDIA L4", 4), 2, 6, (cuda(0, 4), cuda(1, 2, 3, 5, 6, 7)), "any"),
        # GB/s and not classes: one NVLink of a P100 (20) is less than PCIe generation 5 (48).
        (
            Topology(
                gpus=(*(Gpu(name="Tesla P100-SXM2-16GB"),) * 2, *(Gpu(name="NVIDIA H100 PCIe"),) * 2),
                links={**dict.fromkeys(all_pairs(4), "SYS"), (0, 1): "NV1", (2, 3): "PIX"},
            ),
            1,
            1,
            (cuda(2), cuda(3)),
            "switch",
        ),
        # Classes where the GPUs are not known.
        (machine(4, bridged((2, 3)), None), 1, 1, (cuda(2), cuda(3)), "nvlink"),
        # A pair that is left over stays whole: 0 and 1 are one, 2 and 3 another.
        (machine(4, bridged((0, 1), (2, 3))), 1, 1, (cuda(0), cuda(1)), "nvlink"),
    ],
    ids=["bridge", "two bridges", "over numa", "switch", "all sys", "rates", "classes", "whole pairs"],
)
def test_automatic_placement(
    topology: Topology, num_encoders: int, num_decoders: int, expected: tuple[list[str], list[str]], tier: str
) -> None:
    plan = placed(topology, encoders=num_encoders, decoders=num_decoders)

    assert devices(plan) == expected
    assert plan.tier == tier


def test_one_side_may_be_fixed() -> None:
    topology = machine(4, bridged((1, 3)))
    text = "[encode]\ndevices = 'auto'\n[decode]\ndevices = ['cuda:3']"

    assert devices(place(parse_profile(text, "p"), topology)) == (cuda(1), cuda(3))


def test_a_hybrid_device_feeds_itself() -> None:
    plan = placed(machine(2, lambda *_: "SYS"), "[schedule]\nhybrid = true", encoders=2, decoders=2)

    assert devices(plan) == (cuda(0, 1), cuda(0, 1))
    assert [device.roles for device in plan.devices] == [("encode", "decode")] * 2
    assert plan.tier == "device"


def test_peer_access_that_is_refused_counts_as_the_way_through_the_host() -> None:
    whole = machine(3, lambda *_: "PIX")
    topology = Topology(gpus=whole.gpus, links=whole.links, peer_access={(0, 1): False, (0, 2): False, (1, 2): True})

    plan = placed(topology)

    assert devices(plan) == (cuda(1), cuda(2))
    assert (plan.links[0].has_peer_access, plan.links[0].is_staged) == (True, False)


def test_many_devices_are_placed_one_by_one_and_as_well() -> None:
    topology = machine(32, lambda one, other: "NV18" if one // 8 == other // 8 else "SYS", H100, 8)
    wanted = Wanted(tuple(range(32)), 4, 28, is_hybrid=False)

    found = arrange(Edges(topology), wanted)

    assert comb(32, 4) > MOST_TRIED
    assert sorted(index // 8 for index in found.encoders) == [0, 1, 2, 3]
    assert sorted((*found.encoders, *found.decoders)) == list(range(32))


@pytest.mark.parametrize(
    ("text", "topology", "told"),
    [
        (
            "[encode]\ndevices='auto'\nreplicas=3\n[decode]\ndevices='auto'\nreplicas=2",
            machine(4, bridged()),
            "encode.replicas = 3 and decode.replicas = 2: automatic placement gives a device each "
            "(schedule.hybrid = false); the topology has 4 (test), 4 of them free",
        ),
        (
            "[encode]\ndevices='auto'\n[decode]\ndevices='auto'",
            None,
            "encode.replicas = 1 and decode.replicas = 1: automatic placement gives a device each "
            "(schedule.hybrid = false); the topology has 0 (none), 0 of them free",
        ),
        (
            "[encode]\ndevices='cuda:4'",
            machine(2, bridged()),
            "encode.devices: 'cuda:4' is not there; the topology has: cuda:0, cuda:1",
        ),
        (
            "[decode]\nreplicas=3\ndevices=['cuda:0', 'cuda:1']",
            machine(2, bridged()),
            "decode.devices: 2 given for 3 replicas; allowed: one for all, or one per replica",
        ),
        ("[encode]\ndevices=['auto', 'cpu']", None, "encode.devices: 'auto' stands alone (given ['auto', 'cpu'])"),
        ("[encode]\ndevices='auto'\ncpus='0'", None, "encode.cpus: for devices = 'cpu', not 'auto'"),
        (
            "[encode]\nreplicas=2\ncpus=['0']",
            None,
            "encode.cpus: 1 lists given; allowed: one per replica (2), with devices = 'cpu'",
        ),
        ("[encode]\ncpus=['3-1']", None, "encode.cpus: '3-1' is not a list of CPUs; allowed: ascending, as '0-3,8'"),
        (
            "[encode]\ncpus=['0-9']",
            None,
            "encode.cpus, decode.cpus: clip_encoder wants CPU 4-9; allowed on this machine: 0-3",
        ),
        (
            "[encode]\ncpus=['0-2']\n[decode]\ncpus=['2-3']",
            None,
            "encode.cpus, decode.cpus: clip_encoder (0-2) and llava_decoder (2-3) share CPU 2; allowed: the same set, "
            "or sets apart",
        ),
        ("[encode]\nruntime='tensorrt'", None, "encode.runtime: 'tensorrt' needs a GPU; on a CPU allowed: "
         "'onnxruntime', 'torch'"),
        (
            "[topology]\nstrict='nvlink'\n[encode]\ndevices='cuda:0'\n[decode]\ndevices='cuda:1'",
            machine(2, lambda *_: "PIX"),
            "topology.strict: 'nvlink' is wanted, and the best placement reaches 'switch': clip_encoder feeds "
            "llava_decoder over PIX, 24 GB/s",
        ),
        (
            "[topology]\nstands_for='cpu_sets'\n[encode]\ndevices='set:0'",
            machine(2, bridged()),
            "topology.file: GPU0 has no whole CPU list, and it is to stand for one",
        ),
        (
            "[model]\ndecoder_weights_mib=12600\n[decode]\ndevices='cuda:0'\nkv_cache_mib=70000",
            machine(1, bridged()),
            "decode.kv_cache_mib: cuda:0 would hold 80.7 GiB (model.decoder_weights_mib 12.3, decode.kv_cache_mib "
            "68.4); allowed: 80 GiB, its memory",
        ),
        (
            "[topology]\nmemory_gib=24\n[encode]\ndevices='cuda:0'\nslots=6000",
            machine(1, bridged(), None),
            "encode.slots: cuda:0 would hold 26.4 GiB (encode.slots 26.4); allowed: 24 GiB, its memory",
        ),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_by_its_key(text: str, topology: Topology | None, told: str) -> None:
    with pytest.raises(PlacementRefused) as refused:
        place(parse_profile(text, "p.toml"), topology, cpus=frozenset(range(4)))
    assert str(refused.value) == told


@pytest.mark.parametrize("value", ["'gpu:0'", "['cuda:x']", "[]", "3"])
def test_a_device_that_is_none_is_refused_when_the_profile_is_read(value: str) -> None:
    with pytest.raises(ProfileRefused, match=r"^profile p\.toml: encode\.devices"):
        parse_profile(f"[encode]\ndevices = {value}", "p.toml")


def test_cpus_of_a_replica_are_those_of_its_list() -> None:
    plan = place(parse_profile("[encode]\nreplicas=2\ncpus=['0-1', '0-1']\n[decode]\ncpus=['2,3']", "p"))

    assert [each.cpus for each in (*plan.encoders, *plan.decoders)] == [(0, 1), (0, 1), (2, 3)]
    assert [(device.name, device.roles) for device in plan.devices] == [
        ("cpu:0-1", ("encode",)),
        ("cpu:2,3", ("decode",)),
    ]


def test_the_command_prints_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    eight = [str(PROFILES / "eight_gpu.toml"), "--topology", str(GOLDEN / "topologies" / "eight_gpu.txt")]

    assert main(["plan", *eight, "--gpu-name", H100, "--explain"]) == 0

    assert capsys.readouterr().out == (GOLDEN / "eight_gpu" / "explain.txt").read_text()


def test_the_command_prints_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(PROFILES / "cpu.toml"), "--json"]) == 0

    assert capsys.readouterr().out == (GOLDEN / "cpu" / "plan.json").read_text()


def test_without_options_the_command_prints_one_line_per_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(PROFILES / "cpu.toml")]) == 0

    assert capsys.readouterr().out == (
        "DEVICE  ROLES  REPLICAS                     CPUS  NUMA  MODEL\n"
        "cpu     both   clip_encoder, llava_decoder  -     -     -\n"
    )


@pytest.mark.parametrize("text", [None, "nvidia-smi: command not found"])
def test_a_topology_that_cannot_be_read_is_one_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "topology.txt"
    if text is not None:
        path.write_text(text)

    assert main(["plan", str(PROFILES / "two_gpu.toml"), "--topology", str(path)]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"plan: topology {path}: ")
    assert err.count("\n") == 1
