"""`python -m tests.golden.refresh`: writes the golden repositories, and `model_repository` itself, anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scheduler.deployment import read_topology
from scheduler.explain import explain
from scheduler.placement import place
from scheduler.plan import PLAN_FILE, Plan
from scheduler.profile import read_profile
from scheduler.render import render, write

GOLDEN = Path(__file__).resolve().parent
ROOT = GOLDEN.parents[1]
REPOSITORY = ROOT / "model_repository"
PROFILES = ROOT / "deploy" / "profiles"
NAMES = ("cpu", "cpu_pools", "one_gpu", "two_gpu", "eight_gpu", "pools")
EXPLANATION = "explain.txt"

GPU_NAMES = {
    "one_gpu": "NVIDIA L40S",
    "two_gpu": "NVIDIA A100-SXM4-80GB",
    "eight_gpu": "NVIDIA H100 80GB HBM3",
}


def plan_of(name: str) -> Plan:
    """The plan of a profile on its recorded machine: `topologies/` for those with GPUs."""
    path = (GOLDEN if name == "pools" else PROFILES) / f"{name}.toml"
    profile = read_profile(path)
    recorded = GOLDEN / "topologies" / f"{name}.txt"
    if name in GPU_NAMES:
        table = profile.topology.model_copy(update={"gpu_name": GPU_NAMES[name]})
        profile = profile.model_copy(update={"topology": table})
    return place(profile, read_topology(profile, path, recorded if recorded.exists() else None))


def texts_of(name: str) -> dict[str, str]:
    """What the golden folder of a profile must hold: text by path."""
    plan = plan_of(name)
    configs = {f"{model.name}/config.pbtxt": model.config for model in render(plan, REPOSITORY)}
    return {**configs, PLAN_FILE: plan.to_json(), EXPLANATION: explain(plan) + "\n"}


def main() -> None:
    """Writes all of them; files that no profile renders any more are removed."""
    for name in NAMES:
        texts = texts_of(name)
        for path in (GOLDEN / name).rglob("*"):
            if path.is_file() and path.relative_to(GOLDEN / name).as_posix() not in texts:
                path.unlink()
        for relative, text in texts.items():
            path = GOLDEN / name / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    write(plan_of("cpu"), REPOSITORY, REPOSITORY)
    subprocess.run(
        [sys.executable, "deploy/helm/write_values.py"], check=True
    )  # the chart's schema has the profile's keys


if __name__ == "__main__":
    main()
