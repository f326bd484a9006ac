"""A profile becomes a plan, and a plan is read back as it was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.placement import place
from scheduler.plan import PLAN_FILE, Plan, PlanRefused, Replica, read_plan
from scheduler.profile import DecodeTable, EncodeTable, Profile, parse_profile


@pytest.mark.parametrize(
    ("num_encoders", "num_decoders", "encoders", "decoders"),
    [
        (1, 1, ["clip_encoder"], ["llava_decoder"]),
        (2, 1, ["clip_encoder_0", "clip_encoder_1"], ["llava_decoder"]),
        (1, 3, ["clip_encoder"], ["llava_decoder_0", "llava_decoder_1", "llava_decoder_2"]),
    ],
)
def test_one_replica_keeps_its_models_name_and_several_are_numbered(
    num_encoders: int, num_decoders: int, encoders: list[str], decoders: list[str]
) -> None:
    profile = Profile(encode=EncodeTable(replicas=num_encoders), decode=DecodeTable(replicas=num_decoders))

    plan = place(profile)

    assert plan.encoders == tuple(Replica(name=name, device="cpu") for name in encoders)
    assert plan.decoders == tuple(Replica(name=name, device="cpu") for name in decoders)


def test_a_plan_carries_what_the_profile_says() -> None:
    profile = parse_profile(
        "[model]\ncheckpoint = '/c'\nartifacts = '/a'\n[encode]\nslots = 7\n[decode]\nthreads = 3\n"
        "[limits]\nmax_images = 2",
        "p.toml",
    )

    plan = place(profile)

    assert (plan.checkpoint, plan.artifacts) == ("/c", "/a")
    assert (plan.encode, plan.decode, plan.limits) == (profile.encode, profile.decode, profile.limits)


replicas = st.lists(
    st.builds(
        Replica,
        name=st.from_regex(r"[a-z_]{1,12}(_[0-9])?", fullmatch=True),
        device=st.sampled_from(["cpu", "cuda:0", "cuda:7"]),
        cpus=st.lists(st.integers(0, 255), max_size=4).map(tuple),
    ),
    max_size=3,
).map(tuple)


@given(st.text(max_size=20), replicas, replicas, st.floats(0.1, 1e6), st.booleans())
def test_a_plan_is_read_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: str,
    encoders: tuple[Replica, ...],
    decoders: tuple[Replica, ...],
    lease_s: float,
    compiles: bool,
) -> None:
    profile = Profile(encode=EncodeTable(lease_s=lease_s), decode=DecodeTable(compile=compiles))
    plan = Plan(
        checkpoint=checkpoint,
        artifacts="build",
        encoders=encoders,
        decoders=decoders,
        encode=profile.encode,
        decode=profile.decode,
        limits=profile.limits,
    )
    folder = tmp_path_factory.mktemp("repository")
    (folder / PLAN_FILE).write_text(plan.to_json())

    assert read_plan(folder) == plan


def test_a_missing_plan_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(PlanRefused) as refused:
        read_plan(tmp_path)
    assert str(refused.value) == (
        f"plan {tmp_path / PLAN_FILE}: No such file or directory; write it with 'python -m scheduler render'"
    )


def test_a_plan_of_another_version_is_refused_by_key(tmp_path: Path) -> None:
    values = json.loads(place(Profile()).to_json())
    del values["checkpoint"]
    values["added_later"] = 1
    (tmp_path / PLAN_FILE).write_text(json.dumps(values))

    with pytest.raises(PlanRefused) as refused:
        read_plan(tmp_path)
    assert "checkpoint: field required" in str(refused.value)
    assert "unknown key added_later" in str(refused.value)
