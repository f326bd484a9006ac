"""The container's entrypoint: a profile by the GPUs there are, a place to write, and one clear line when it cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PROFILES = ROOT / "deploy" / "profiles"


def enter(folder: Path, *words: str, num_gpus: int | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the entrypoint with a vlm-relay that says how it was called, and an nvidia-smi that counts."""
    tools = folder / "bin"
    tools.mkdir()
    scripts = {"vlm-relay": 'echo "$@"; echo "home $HOME"'}
    if num_gpus is not None:
        scripts["nvidia-smi"] = "\n".join(f"echo 'GPU {index}: NVIDIA H200 (UUID: GPU-1)'" for index in range(num_gpus))
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    state = {"VLM_RELAY_STATE": str(folder)} if "VLM_RELAY_STATE" not in variables else {}
    return subprocess.run(
        ["sh", str(ROOT / "docker" / "entrypoint.sh"), *words],
        env={"PATH": f"{tools}:/usr/bin:/bin", **state, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("num_gpus", "profile"), [(None, "cpu"), (0, "cpu"), (1, "one_gpu"), (2, "two_gpu"), (8, "eight_gpu")]
)
def test_the_profile_follows_from_the_gpus(tmp_path: Path, num_gpus: int | None, profile: str) -> None:
    done = enter(tmp_path, num_gpus=num_gpus)

    assert done.stdout.splitlines() == [
        f"serve --profile {PROFILES / profile}.toml --artifacts {tmp_path}/artifacts --host 0.0.0.0",
        f"home {tmp_path}",
    ]


def test_what_the_operator_says_is_passed_on(tmp_path: Path) -> None:
    done = enter(
        tmp_path,
        *("up", "--http-port", "0"),
        VLM_RELAY_PROFILE=str(PROFILES / "cpu_pools.toml"),
        VLM_RELAY_CHECKPOINT="/check point",
        VLM_RELAY_HOST="127.0.0.1",
    )

    assert done.stdout.splitlines()[0] == (
        f"up --profile {PROFILES / 'cpu_pools.toml'} --artifacts {tmp_path}/artifacts --host 127.0.0.1 "
        "--checkpoint /check point --http-port 0"
    )


def test_other_commands_get_no_options_of_the_server(tmp_path: Path) -> None:
    assert enter(tmp_path, "gateway", "--url", "relay:8001").stdout.splitlines()[0] == "gateway --url relay:8001"


@pytest.mark.parametrize(
    ("num_gpus", "variables", "told"),
    [
        (3, {}, "entrypoint: no profile for 3 GPUs; set VLM_RELAY_PROFILE"),
        (None, {"VLM_RELAY_PROFILE": "/missing"}, "entrypoint: VLM_RELAY_PROFILE: /missing is not a file"),
        (
            None,
            {"VLM_RELAY_STATE": "/missing"},
            f"entrypoint: VLM_RELAY_STATE: /missing cannot be written by user {os.getuid()}",
        ),
    ],
)
def test_what_is_wrong_is_one_clear_line(
    tmp_path: Path, num_gpus: int | None, variables: dict[str, str], told: str
) -> None:
    done = enter(tmp_path, num_gpus=num_gpus, **variables)

    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{told}\n")


def test_the_compose_file_hardens_both_services_and_waits_longer_than_a_drain() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]

    assert set(services) == {"relay", "gateway"}
    for service in services.values():
        assert (service["user"], service["read_only"], service["cap_drop"]) == ("1000:0", True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert services["relay"]["stop_grace_period"] == "60s"
    assert "ports" not in services["relay"]  # only the gateway is reached from outside


def test_the_image_keeps_no_secret_and_runs_as_no_root() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()

    assert "USER 1000:0" in text
    assert not any(word in text.upper() for word in ("PASSWORD", "TOKEN", "API_KEY", "SECRET"))
