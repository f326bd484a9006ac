"""The shipped profiles render as their golden files say, and Triton can read every config."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from scheduler.plan import PLAN_FILE, read_plan
from tests.golden.refresh import GOLDEN, NAMES, PROFILES, plan_of, texts_of


def golden(name: str) -> dict[str, str]:
    """The golden files of a profile: text by path."""
    folder = GOLDEN / name
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_every_shipped_profile_has_its_golden_files() -> None:
    assert {path.stem for path in PROFILES.glob("*.toml")} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_renders_as_its_golden_files_say(name: str) -> None:
    assert texts_of(name) == golden(name)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/*/config.pbtxt")), ids=lambda path: "/".join(path.parts[-3:-1]))
def test_triton_reads_every_golden_config(path: Path) -> None:
    config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())

    assert config.name == path.parent.name
    assert config.backend == "python"
    assert len(config.instance_group) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_process_reads_the_golden_plan(name: str) -> None:
    assert (GOLDEN / name / PLAN_FILE).exists()
    assert read_plan(GOLDEN / name) == plan_of(name)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("cpu", {"clip_encoder": ("cpu", ()), "llava_decoder": ("cpu", ())}),
        (
            "cpu_pools",
            {
                "clip_encoder_0": ("cpu", (0,)),
                "clip_encoder_1": ("cpu", (0,)),
                "llava_decoder_0": ("cpu", (1,)),
                "llava_decoder_1": ("cpu", (1,)),
            },
        ),
        ("one_gpu", {"clip_encoder": ("cuda:0", ()), "llava_decoder": ("cuda:0", ())}),
        ("two_gpu", {"clip_encoder": ("cuda:0", ()), "llava_decoder": ("cuda:1", ())}),
        (
            "eight_gpu",
            {
                **{f"clip_encoder_{index}": (f"cuda:{gpu}", ()) for index, gpu in enumerate((0, 1, 4, 5))},
                **{f"llava_decoder_{gpu}": (f"cuda:{gpu}", ()) for gpu in range(8)},
            },
        ),
    ],
)
def test_each_replica_stands_where_the_profile_means_it(
    name: str, devices: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    plan = plan_of(name)

    assert {each.name: (each.device, each.cpus) for each in (*plan.encoders, *plan.decoders)} == devices
