"""`make chart-audit`: every finding of checkov in the rendered chart has its reason here, or the exit status is 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.chart.conftest import CHART, HELMS, MATRIX, RELEASE, TOOLS, run_helm

CASES = ("default", "eight gpus", "gateway beside", "everything")
TEST_POD = "Pod.vision.shop-vlm-relay-test-ask"

# By check, or by check and resource where the reason holds for that one only.
REASONS = {
    "CKV_K8S_11": "CPU limits: a throttled decoder stalls everybody; server.cpuLimit and gateway.cpuLimit set them",
    "CKV_K8S_43": "digest: image.digest sets it; the default names a release's tag",
    "CKV_K8S_15": "pull policy: a tag of ours is never moved; image.pullPolicy sets it",
    "CKV_K8S_35": "secrets in the environment: API keys and the Redis URL are read there, by design of both programs",
    f"CKV_K8S_8 {TEST_POD}": "liveness: the test pod ends by itself",
    f"CKV_K8S_9 {TEST_POD}": "readiness: nobody sends to the test pod",
    f"CKV2_K8S_6 {TEST_POD}": "network policy: nothing listens in the test pod",
}
FOREIGN = ("extraInitContainers", "extraContainers", "extraObjects")  # what the matrix adds is not the chart's


def findings(case: str) -> list[tuple[str, str, str]]:
    """Check, its words and the resource, of each finding in a case of the matrix."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_helm(HELMS[1], "template", RELEASE, str(CHART), "--namespace", "vision", values=_own(MATRIX[case]))
        Path(folder, "chart.yaml").write_text(done.stdout)
        command = [TOOLS / "checkov" / "bin" / "checkov", "--directory", folder, "--framework", "kubernetes"]
        command += ["--skip-download", "--quiet", "--compact", "--output", "json"]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0, report["summary"]
    return [(each["check_id"], each["check_name"], each["resource"]) for each in report["results"]["failed_checks"]]


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _own(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in FOREIGN
    }


def main() -> int:
    """Prints what is found; the exit status."""
    num_unexplained, used = 0, set()
    for case in CASES:
        for check, words, resource in findings(case):
            key = next((key for key in (check, f"{check} {resource}") if key in REASONS), None)
            used.add(key)
            num_unexplained += key is None
            if key is None:
                print(f"{case}: {check} {words}: {resource}", file=sys.stderr)
    for key in REASONS.keys() - used:
        print(f"the reason for {key} is not needed any more", file=sys.stderr)
    print(f"{num_unexplained} findings without a reason in {len(CASES)} cases; {len(used - {None})} kinds with one")
    return 1 if num_unexplained or REASONS.keys() - used else 0


if __name__ == "__main__":
    sys.exit(main())
