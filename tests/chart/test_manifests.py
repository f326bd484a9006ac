"""What a real API server, kubelet or controller would reject or stumble over, and schemas do not see."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from launcher.__main__ import _parser
from launcher.server import EXIT_TIMEOUT_S
from python_backend.transport.layout import SegmentLayout
from scheduler.deployment import plan_for
from scheduler.profile import Profile, parse_profile
from tests.chart.conftest import MATRIX, RELEASE, Manifest, containers, manifests, named, of_kind, pod_specs

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
GIVEN = {"models", "hub", "keys", "redis", "tls", "r", "more"}  # what the matrix refers to and an operator makes


def test_names_are_dns_labels_and_used_once(objects: list[Manifest]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]

    assert [name for _, name in names if not DNS_LABEL.fullmatch(name)] == []
    assert len(set(names)) == len(names)


def test_port_names_fit_and_are_unique_in_their_pod(objects: list[Manifest]) -> None:
    for _, spec in pod_specs(objects):
        ports = [port for each in containers(spec) for port in each.get("ports", [])]
        assert all(PORT_NAME.fullmatch(port["name"]) for port in ports)
        assert len({port["name"] for port in ports}) == len(ports) == len({port["containerPort"] for port in ports})


def test_a_deployments_selector_matches_its_own_pods_and_no_others(objects: list[Manifest]) -> None:
    for deployment in of_kind(objects, "Deployment"):
        wanted = deployment["spec"]["selector"]["matchLabels"].items()
        chosen = [meta for meta, _ in pod_specs(objects) if wanted <= meta["labels"].items()]
        assert chosen == [deployment["spec"]["template"]["metadata"]]


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "NetworkPolicy"])
def test_a_selector_chooses_the_pods_of_one_deployment(kind: str, objects: list[Manifest]) -> None:
    for each in of_kind(objects, kind):
        selector = each["spec"].get("podSelector", each["spec"].get("selector"))
        wanted = selector.get("matchLabels", selector).items()
        chosen = [
            meta["labels"]["app.kubernetes.io/component"]
            for meta, _ in pod_specs(objects)
            if wanted <= meta["labels"].items()
        ]
        assert len(chosen) == 1, (each["metadata"]["name"], chosen)


def test_services_and_probes_name_ports_that_the_pods_have(objects: list[Manifest]) -> None:
    for service in of_kind(objects, "Service"):
        wanted = service["spec"]["selector"].items()
        (spec,) = [spec for meta, spec in pod_specs(objects) if wanted <= meta["labels"].items()]
        names = {port["name"] for each in spec["containers"] for port in each.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for _, spec in pod_specs(objects):
        for each in containers(spec):
            names = {port["name"] for port in each.get("ports", [])}
            probes = [each.get(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")]
            hook = each.get("lifecycle", {}).get("preStop")
            gets = [probe["httpGet"] for probe in [*probes, hook] if probe and "httpGet" in probe]
            assert {get["port"] for get in gets} <= names


def test_network_policies_open_ports_that_are_there_and_never_the_health_port(objects: list[Manifest]) -> None:
    for policy in of_kind(objects, "NetworkPolicy"):
        wanted = policy["spec"]["podSelector"]["matchLabels"].items()
        (spec,) = [spec for meta, spec in pod_specs(objects) if wanted <= meta["labels"].items()]
        names = {port["name"] for each in spec["containers"] for port in each.get("ports", [])}
        opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
        assert opened
        assert opened <= names - {"health"}
        assert all(rule.get("ports") for rule in policy["spec"]["ingress"])  # a rule without ports opens all


def test_every_mount_has_its_volume_and_every_volume_a_mount(objects: list[Manifest]) -> None:
    for _, spec in pod_specs(objects):
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        mounts = {mount["name"] for each in containers(spec) for mount in each.get("volumeMounts", [])}
        assert len(set(volumes)) == len(volumes)
        assert mounts == set(volumes)
        for each in containers(spec):
            paths = [mount["mountPath"] for mount in each.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)


def test_an_environment_variable_is_set_once(objects: list[Manifest]) -> None:
    for _, spec in pod_specs(objects):
        for each in containers(spec):
            names = [variable["name"] for variable in each.get("env", [])]
            assert len(set(names)) == len(names)


def test_gpus_are_asked_for_alike_in_requests_and_limits(objects: list[Manifest]) -> None:
    for _, spec in pod_specs(objects):
        for each in containers(spec):
            resources = each.get("resources", {})
            extended = [
                {name: count for name, count in resources.get(part, {}).items() if "/" in name}
                for part in ("requests", "limits")
            ]
            assert extended[0] == extended[1]


def test_what_is_referred_to_is_rendered_or_given(objects: list[Manifest]) -> None:
    made = {each["metadata"]["name"] for each in of_kind(objects, "ConfigMap", "PersistentVolumeClaim")}
    for reference in _references(objects):
        assert reference in made | GIVEN
    accounts = {each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")} | {"mine"}
    assert {spec["serviceAccountName"] for _, spec in pod_specs(objects)} <= accounts


def _references(value: Any) -> list[str]:
    """Names of ConfigMaps, Secrets and claims that anything refers to."""
    if isinstance(value, list):
        return [name for item in value for name in _references(item)]
    if not isinstance(value, dict):
        return []
    found = []
    for key, inner in value.items():
        if (
            key in ("configMap", "configMapRef", "secretKeyRef", "secretRef")
            and isinstance(inner, dict)
            and "name" in inner
        ):
            found.append(inner["name"])
        elif key == "claimName" and isinstance(inner, str):
            found.append(inner)
        found += _references(inner)
    return found


def test_autoscalers_and_budgets_agree(objects: list[Manifest]) -> None:
    deployments = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Deployment")}
    scalers = of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
    for scaler in scalers:
        spec = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in spec  # each upgrade would set them back
    assert sum("replicas" not in spec for spec in deployments.values()) == len(scalers)
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] >= 1  # or no node could ever be drained


def test_our_containers_run_without_root_and_write_to_no_image(objects: list[Manifest]) -> None:
    for _, spec in pod_specs(objects):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for each in containers(spec):
            if each["name"] in ("first", "beside"):  # the matrix's own
                continue
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "/tmp" in {mount["mountPath"] for mount in each["volumeMounts"]}


def test_every_command_line_is_one_that_the_command_takes(objects: list[Manifest]) -> None:
    lines = [each["command"] for _, spec in pod_specs(objects) for each in containers(spec) if "command" in each]
    ours = [line[1:] for line in lines if line[0] == "vlm-relay"]

    assert {line[0] for line in ours} >= {"serve", "build", "ask"}
    for line in ours:
        _parser().parse_args(line)  # or it exits


@pytest.mark.parametrize("case", MATRIX)
def test_the_profile_is_read_and_shared_memory_memory_and_grace_follow_it(case: str, tmp_path: Path) -> None:
    objects = manifests(case)
    name = _fullname(case)
    files = named(objects, "ConfigMap", f"{name}-profile")["data"]
    profile = parse_profile(files["profile.toml"], "profile")
    spec = named(objects, "Deployment", f"{name}-server")["spec"]["template"]["spec"]
    (server,) = [each for each in spec["containers"] if each["name"] == "server"]
    (shm,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]

    shm_mib = int(shm["sizeLimit"].removesuffix("Mi"))
    memory_mib = int(server["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert shm_mib >= _store_mib(profile) + 200  # Triton's regions
    assert memory_mib >= shm_mib + 6144
    assert server["resources"]["requests"]["memory"] == server["resources"]["limits"]["memory"]
    leave_s = int(server["lifecycle"]["preStop"]["httpGet"]["path"].rsplit("=", 1)[1])
    assert spec["terminationGracePeriodSeconds"] >= leave_s + profile.limits.drain_s + EXIT_TIMEOUT_S + 10
    assert profile.model.artifacts == "/var/cache/vlm-relay"


def _fullname(case: str) -> str:
    override = MATRIX[case].get("fullnameOverride")
    return str(override) if override else f"{RELEASE}-vlm-relay"


def _store_mib(profile: Profile) -> float:
    encode = profile.encode
    layout = SegmentLayout(encode.slots, profile.model.embedding_kib << 10, 8 * encode.slots)
    return encode.replicas * layout.total_bytes / 2**20


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_profile_made_for_gpus_finds_its_place_on_them(count: int, tmp_path: Path) -> None:
    from tests.chart.conftest import CHART, HELMS, run_helm

    done = run_helm(HELMS[1], "template", RELEASE, str(CHART), values={"gpu": {"count": count}})
    text = done.stdout.split("profile.toml: |\n")[1].split("---")[0]
    text = "\n".join(line.removeprefix("    ") for line in text.splitlines())
    recorded = "\n".join(
        ["\t" + "\t".join(f"GPU{i}" for i in range(count)) + "\tCPU Affinity\tNUMA Affinity"]
        + [
            f"GPU{i}\t" + "\t".join(" X " if i == j else "NV18" for j in range(count)) + "\t0-63\t0"
            for i in range(count)
        ]
    )
    (tmp_path / "topology.txt").write_text(recorded + "\n")
    assert tomllib.loads(text)
    text += '\n[topology]\nfile = "topology.txt"\ngpu_name = "NVIDIA H100 80GB HBM3"\n'
    path = tmp_path / "profile.toml"

    plan = plan_for(parse_profile(text, str(path)), path)

    assert len(plan.decoders) == count
    assert len(plan.encoders) == max(1, count // 2)
