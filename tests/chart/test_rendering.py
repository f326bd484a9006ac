"""Both helms lint, render and package the chart; schemas of three Kubernetes versions accept what they render."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chart.conftest import CHART, HELMS, MATRIX, RELEASE, VALIDATOR, rendered_text, run_helm

OPERATORS = ("monitoring.coreos.com/", "keda.sh/")  # kinds of their own, which Kubernetes' schemas do not have


@pytest.mark.parametrize("helm", HELMS, ids=lambda path: path.name)
@pytest.mark.parametrize("case", MATRIX)
def test_helm_lints_strictly(helm: Path, case: str) -> None:
    done = run_helm(helm, "lint", "--strict", str(CHART), values=MATRIX[case])

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", MATRIX)
def test_both_helms_render_the_same(case: str) -> None:
    old, new = (sorted(part.strip() for part in rendered_text(helm, case).split("---\n")) for helm in HELMS)

    assert old == new


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
def test_kubernetes_accepts_what_is_rendered(version: str, tmp_path: Path) -> None:
    files = []
    for case in MATRIX:
        parts = [part for part in rendered_text(HELMS[1], case).split("---\n") if not any(o in part for o in OPERATORS)]
        files.append(tmp_path / f"{case}.yaml")
        files[-1].write_text("---\n".join(parts))
    done = subprocess.run(
        [VALIDATOR, "--strict", "--no-warn", "-k", version, *files], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if not line.startswith("INFO"))


@pytest.mark.parametrize("helm", HELMS, ids=lambda path: path.name)
def test_the_chart_is_packaged(helm: Path, tmp_path: Path) -> None:
    done = run_helm(helm, "package", str(CHART), "--destination", str(tmp_path))

    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tgz")
    assert run_helm(helm, "template", RELEASE, str(archive), values={}).returncode == 0


def test_values_schema_and_reference_are_what_the_definition_says() -> None:
    done = subprocess.run([sys.executable, "deploy/helm/write_values.py", "--check"], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("helm", HELMS, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"server": {"replicas": "two"}}, "replicas"),
        ({"server": {"replicas": -1}}, "replicas"),
        ({"server": {"replica": 2}}, "replica"),
        ({"server": {"memory": 6}}, "memory"),
        ({"server": {"memory": "6GB"}}, "memory"),
        ({"server": {"autoscaling": {"type": "vpa"}}}, "type"),
        ({"gateway": {"placement": "inside"}}, "placement"),
        ({"gpu": {"count": 1.5}}, "count"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"tracing": {"ratio": 2}}, "ratio"),
        ({"service": {"port": 70000}}, "port"),
        ({"fullnameOverride": "Not_A_Name"}, "fullnameOverride"),
        ({"profile": {"decode": {"max_sequence": 4}}}, "max_sequence"),
        ({"profile": {"decode": {"dtype": "int4"}}}, "dtype"),
        ({"profile": {"decoder": {}}}, "decoder"),
        ({"gpu": {"count": 1, "memoryGib": 8}}, "gpu.memoryGib: 8 GiB leave"),
        ({"model": {"source": "claim"}}, "model.claim.claimName: the claim with the checkpoint is needed"),
        ({"model": {"source": "hub"}}, "model.hub.repo: the repository is needed"),
        ({"model": {"source": "image"}}, "model.image.reference: the image is needed"),
        ({"cache": {"type": "hostPath"}}, "cache.hostPath: the folder on the node is needed"),
        ({"ingress": {"enabled": True}}, "ingress.host: a host name is needed"),
        ({"server": {"autoscaling": {"type": "keda"}}}, "server.autoscaling.prometheusAddress: the address"),
        ({"server": {"autoscaling": {"minReplicas": 5}}}, "server.autoscaling.maxReplicas: 4 is below minReplicas, 5"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(helm: Path, values: dict[str, Any], told: str) -> None:
    done = run_helm(helm, "template", RELEASE, str(CHART), values=values)

    assert done.returncode != 0
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 8, done.stderr
