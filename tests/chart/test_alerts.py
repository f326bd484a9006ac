"""Alerts fire when they should and lead to a section of the runbook; `make prometheus` installs promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ALERTS = Path("deploy/helm/vlm-relay/files/alerts.yaml")
CASES = Path("tests/chart/alerts_test.yaml")
RUNBOOK = Path("deploy/runbook.md")


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One call; its output is both streams."""
    assert shutil.which("promtool"), "promtool is missing: run 'make prometheus' as root"
    return subprocess.run(
        ["promtool", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )


def rules() -> list[dict[str, dict[str, str]]]:
    """All alerts."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    done = promtool("test", "rules", str(CASES))

    assert done.returncode == 0, done.stdout


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {each["alertname"] for case in cases for each in case["alert_rule_test"] if each.get("exp_alerts")}

    assert fired == {rule["alert"] for rule in rules()}


def test_each_alert_leads_to_a_section_of_the_runbook() -> None:
    headings = re.findall(r"^## (.+)$", RUNBOOK.read_text(), re.MULTILINE)
    anchors = {f"{RUNBOOK}#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')}" for heading in headings}

    assert {rule["annotations"]["runbook"] for rule in rules()} <= anchors


def test_the_dashboard_is_what_its_rows_say() -> None:
    done = subprocess.run([sys.executable, "deploy/helm/dashboard.py", "--check"], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
