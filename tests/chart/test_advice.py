"""What `vlm-relay advise --target` prints for the chart is what the chart takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from scheduler.advise.__main__ import main
from scheduler.profile import parse_profile
from tests.chart.conftest import CHART, HELMS, RELEASE, named, run_helm


@pytest.mark.parametrize("helm", HELMS, ids=lambda path: path.name)
def test_advised_values_are_rendered_as_they_say(helm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--gpus", "2", "--gpu", "A100-SXM4-80GB", "--seeds", "1", "--horizon", "2", "--quick"]
    assert main([*machine, "--target", "30"]) == 0
    fragment = yaml.safe_load(capsys.readouterr().out.partition("Helm values (deploy/helm/vlm-relay):\n")[2])

    done = run_helm(helm, "template", RELEASE, str(CHART), values=fragment)

    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    server = named(objects, "Deployment", f"{RELEASE}-vlm-relay-server")
    assert server["spec"]["replicas"] == fragment["server"]["replicas"] > 1
    (container,) = [each for each in server["spec"]["template"]["spec"]["containers"] if each["name"] == "server"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    files = named(objects, "ConfigMap", f"{RELEASE}-vlm-relay-profile")["data"]
    profile = parse_profile(files["profile.toml"], "rendered")
    for table, values in fragment["profile"].items():
        assert {name: getattr(getattr(profile, table), name) for name in values} == values
