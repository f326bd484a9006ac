"""A profile is read as it is written, or refused with file, key, value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.profile import Profile, ProfileRefused, parse_profile, read_profile

ROOT = Path(__file__).resolve().parents[3]


def test_an_empty_profile_has_all_defaults() -> None:
    assert parse_profile("", "p.toml") == Profile()


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "profiles").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_profile_is_accepted(path: Path) -> None:
    assert isinstance(read_profile(path), Profile)


def test_whole_numbers_may_stand_for_seconds() -> None:
    assert parse_profile("[limits]\nstall_s = 60", "p.toml").limits.stall_s == 60.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[encode]\nreplica = 2", "unknown key encode.replica"),
        ("[encoder]\nreplicas = 2", "unknown key encoder"),
        ("[encode]\nreplicas = 0", "encode.replicas: input should be greater than or equal to 1 (given 0)"),
        ("[encode]\nmax_batch = 65", "encode.max_batch: input should be less than or equal to 64 (given 65)"),
        ("[encode]\nreplicas = '2'", "encode.replicas: input should be a valid integer (given '2')"),
        ("[encode]\nreplicas = true", "encode.replicas: input should be a valid integer (given True)"),
        ("[encode]\nreplicas = 1.5", "encode.replicas: input should be a valid integer (given 1.5)"),
        ("[encode]\ndtype = 'int8'", "encode.dtype: input should be 'float16' or 'float32' (given 'int8')"),
        ("[decode]\ncompile = 1", "decode.compile: input should be a valid boolean (given 1)"),
        (
            "[encode]\nredis_url = 'http://:secret@host'",
            "encode.redis_url: an address of Redis begins with redis://, rediss://, unix://",
        ),
        ("[limits]\nstall_s = 0", "limits.stall_s: input should be greater than 0 (given 0)"),
        ("[limits]\nstall_s = nan", "limits.stall_s: input should be greater than 0 (given nan)"),
        ("[limits]\nmax_images = -1", "limits.max_images: input should be greater than or equal to 1 (given -1)"),
        ("[model]\ncheckpoint = 3", "model.checkpoint: input should be a valid string (given 3)"),
        ("encode = 3", "encode: input should be a valid dictionary or instance of EncodeTable (given 3)"),
        (
            "[encode]\nreplica = 2\n[decode]\nthreads = 0",
            "unknown key encode.replica; decode.threads: input should be greater than or equal to 1 (given 0)",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(text: str, told: str) -> None:
    with pytest.raises(ProfileRefused) as refused:
        parse_profile(text, "p.toml")
    assert str(refused.value) == f"profile p.toml: {told}"


def test_what_is_not_toml_is_refused_with_its_place() -> None:
    with pytest.raises(ProfileRefused, match=r"^profile p\.toml: not TOML: .*line 2, column 5"):
        parse_profile("[encode]\na = = 2", "p.toml")


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"# \xff")
    for path, told in (
        (tmp_path / "missing.toml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (broken, "not UTF-8: invalid start byte at byte 2"),
    ):
        with pytest.raises(ProfileRefused) as refused:
            read_profile(path)
        assert str(refused.value) == f"profile {path}: {told}"
