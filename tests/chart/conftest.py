"""The chart, rendered by both real helms. `make chart` brings them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path("deploy/helm/vlm-relay")
TOOLS = Path("build/tools")
HELMS = (TOOLS / "helm3", TOOLS / "helm4")
VALIDATOR = TOOLS / "chart" / "bin" / "kubernetes-validate"
RELEASE = "shop"

Manifest = dict[str, Any]

GPU_NODE: Mapping[str, Any] = {
    "gpu": {"count": 8, "runtimeClassName": "nvidia"},
    "cache": {"type": "hostPath", "hostPath": "/var/lib/vlm-relay"},
    "server": {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "memory": "64Gi",
        "longestGenerationSeconds": 300,
    },
}
EVERYTHING: Mapping[str, Any] = {
    "commonLabels": {"team": "vision"},
    "image": {
        "repository": "registry.example/vlm-relay",
        "digest": f"sha256:{'0' * 64}",
        "pullSecrets": [{"name": "r"}],
    },
    "redis": {"existingSecret": "redis"},
    "cache": {"type": "claim", "storageClassName": "shared"},
    "server": {
        "autoscaling": {"type": "hpa", "maxReplicas": 6},
        "podAnnotations": {"note": "server"},
        "podLabels": {"zone": "a"},
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "extraArgs": ["--grpc-port=8001"],
        "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "4"}],
        "extraEnvFrom": [{"configMapRef": {"name": "more", "optional": True}}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "extraInitContainers": [{"name": "first", "image": "busybox:1", "command": ["true"]}],
        "extraContainers": [{"name": "beside", "image": "busybox:1", "command": ["sleep", "1d"]}],
    },
    "gateway": {
        "autoscaling": {"enabled": True},
        "apiKeysSecret": "keys",
        "cpuLimit": "2",
        "extraEnv": [{"name": "TZ", "value": "UTC"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"note": "door"}},
    "ingress": {"enabled": True, "className": "nginx", "host": "vlm.example", "tlsSecret": "tls"},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"door": "yes"}}}],
        "grpcClients": [{"podSelector": {"matchLabels": {"batch": "yes"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "egress": [{"ports": [{"port": 6379, "protocol": "TCP"}]}],
    },
    "metrics": {"podMonitor": True, "rules": True, "dashboard": True, "labels": {"release": "prometheus"}},
    "tracing": {"endpoint": "http://collector.tracing:4318", "ratio": 0.1},
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}, "data": {"a": "b"}}
    ],
}
MATRIX: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "one gpu": {"gpu": {"count": 1, "memoryGib": 24}, "model": {"source": "claim", "claim": {"claimName": "models"}}},
    "eight gpus": GPU_NODE,
    "hub": {
        "gpu": {"count": 2},
        "model": {"source": "hub", "hub": {"repo": "llava-hf/llava-1.5-7b-hf", "existingSecret": "hub"}},
    },
    "model image": {"model": {"source": "image", "image": {"reference": "registry.example/llava:1"}, "path": "llava"}},
    "own profile": {
        "profile": {
            "topology": {"file": "cpu_pools.topology.txt", "stands_for": "cpu_sets"},
            "encode": {"replicas": 2, "devices": ["set:0", "set:1"], "slots": 100},
            "decode": {"replicas": 2, "devices": ["set:2", "set:3"], "kv_cache_mib": 1048576},
            "schedule": {"hysteresis": 0.15},
            "limits": {"drain_s": 7.5},
        },
        "profileFiles": {"cpu_pools.topology.txt": Path("deploy/profiles/cpu_pools.topology.txt").read_text()},
    },
    "gateway beside": {"gateway": {"placement": "beside", "apiKeysSecret": "keys"}},
    "no gateway": {"gateway": {"enabled": False}, "networkPolicy": {"enabled": False}},
    "keda": {
        "server": {"autoscaling": {"type": "keda", "prometheusAddress": "http://prometheus:9090", "inFlight": 20}}
    },
    "everything": EVERYTHING,
    "arbitrary user": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    "long name": {"fullnameOverride": "a" * 40, "serviceAccount": {"create": False, "name": "mine"}},
}


def run_helm(helm: Path, *arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """One call of helm, with values as JSON on its standard input."""
    assert helm.exists(), f"{helm} is missing: run 'make chart'"
    given = ("--values", "-") if values is not None else ()
    return subprocess.run(
        [helm, *arguments, *given], input=json.dumps(values), capture_output=True, text=True, timeout=60
    )


@cache
def rendered_text(helm: Path, case: str) -> str:
    """A case of the matrix as YAML."""
    done = run_helm(helm, "template", RELEASE, str(CHART), "--namespace", "vision", values=MATRIX[case])
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def manifests(case: str) -> list[Manifest]:
    """The objects of a case, by the newer helm."""
    return [each for each in yaml.safe_load_all(rendered_text(HELMS[1], case)) if each]


def of_kind(objects: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    """Those of a kind."""
    return [each for each in objects if each["kind"] in kinds]


def named(objects: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """The one of that kind and name."""
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def pod_specs(objects: Sequence[Manifest]) -> list[tuple[Manifest, Manifest]]:
    """Metadata and specification of every pod that is described."""
    pods = [
        (each["spec"]["template"]["metadata"], each["spec"]["template"]["spec"])
        for each in of_kind(objects, "Deployment")
    ]
    return pods + [(each["metadata"], each["spec"]) for each in of_kind(objects, "Pod")]


def containers(spec: Manifest) -> list[Manifest]:
    """Init containers and containers of a pod."""
    return [*spec.get("initContainers", []), *spec["containers"]]


@pytest.fixture(params=list(MATRIX))
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    """The objects of each case in turn."""
    return manifests(request.param)
