"""`make kube-play IMAGE=...`: what the chart renders really runs, as root, by `podman kube play`.

The CPU profile with the gateway beside the server in one pod: it must answer a question with a picture as user 10001
with a read-only root, lose nothing while it drains, stop within its grace period, and answer again after a restart.

Podman is no kubelet: it knows neither probes by HTTP nor hooks, so they are taken out and carried out from here, by
the very addresses that the manifest names; and it makes no memory-backed volumes, so /dev/shm is a tmpfs of the host,
of the size that the manifest says.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.chart.conftest import CHART, HELMS, run_helm

PICTURE, ANSWER = Path("demo/picture.jpg"), "a red circle to the left of a blue square"
# Where this machine's limits are below podman's own defaults, containers could not start with those.
SETTINGS = """[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
PODMAN_ENV = {"STORAGE_DRIVER": "vfs", **os.environ}
HEALTH, DOOR = "http://127.0.0.1:8003", "http://127.0.0.1:9000"
READY_S = 300.0
POD = "play-vlm-relay-server"

Manifest = dict[str, Any]


def main(image: str) -> int:
    """Plays the chart with an image; the exit status."""
    repository, _, tag = image.rpartition(":")
    values = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "gateway": {"placement": "beside"},
        "server": {"longestGenerationSeconds": 60},
    }
    done = run_helm(HELMS[1], "template", "play", str(CHART), values=values)
    assert done.returncode == 0, done.stderr
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "containers.conf")
        settings.write_text(SETTINGS)
        PODMAN_ENV["CONTAINERS_CONF"] = str(settings)
        shared_memory = Path(folder, "shm")
        objects, pod = _for_podman(done.stdout, shared_memory)
        shm_size = pod["shm_size"].removesuffix("i")
        shared_memory.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={shm_size},mode=1777", "shm", shared_memory], check=True)
        manifest = Path(folder, "chart.yaml")
        manifest.write_text(yaml.safe_dump_all(objects))
        try:
            _play(manifest, pod)
        finally:
            _podman("kube", "down", str(manifest), check=False)
            subprocess.run(["umount", shared_memory], check=False)
    return 0


def _for_podman(text: str, shared_memory: Path) -> tuple[list[Manifest], Manifest]:
    """Pod and ConfigMap as podman takes them, and what was taken out: hook, probe, grace period, size."""
    objects = [each for each in yaml.safe_load_all(text) if each and each["kind"] in ("Deployment", "ConfigMap")]
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    objects.remove(deployment)
    spec = deployment["spec"]["template"]["spec"]
    spec["hostNetwork"] = True
    spec["restartPolicy"] = "OnFailure"  # podman starts an init container that has ended again, too
    # As a kubelet does: at each start of the pod. Those that run once are removed before they have ended (4.3).
    annotations = {"io.podman.annotations.init.container.type": "always"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    metadata = {"name": POD, "labels": labels, "annotations": annotations}
    objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    (server,) = [each for each in spec["containers"] if each["name"] == "server"]
    pod = {
        "hook": server["lifecycle"]["preStop"]["httpGet"]["path"],
        "ready": server["readinessProbe"]["httpGet"]["path"],
        "grace_s": spec["terminationGracePeriodSeconds"],
    }
    for container in spec["containers"]:
        for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"):
            container.pop(name, None)
    for volume in spec["volumes"]:
        if volume["name"] == "shm":
            pod["shm_size"] = volume.pop("emptyDir")["sizeLimit"]
            volume["hostPath"] = {"path": str(shared_memory)}
    return objects, pod


def _play(manifest: Path, pod: Manifest) -> None:
    began = time.monotonic()
    _podman("kube", "play", str(manifest))
    _wait("ready", lambda: _get(HEALTH + pod["ready"])[0] == 200)
    _say(f"ready {time.monotonic() - began:.1f} s after kube play")
    _check_container()
    answer = _ask()
    assert answer == ANSWER, answer
    _say(f"answered through the gateway: {ANSWER}")

    _drain(pod)
    began = time.monotonic()
    _podman("pod", "stop", "--time", str(pod["grace_s"]), POD)
    seconds = time.monotonic() - began
    codes = _podman("ps", "--all", "--filter", f"pod={POD}", "--format", "{{.Names}} {{.ExitCode}}").split("\n")
    assert all(line.endswith(" 0") for line in codes if line.startswith(f"{POD}-")), codes
    assert seconds < pod["grace_s"], seconds
    _say(f"stopped {seconds:.1f} s after SIGTERM, of {pod['grace_s']} s allowed; exit code 0")

    began = time.monotonic()
    _podman("pod", "start", POD)
    _wait("ready again", lambda: _get(HEALTH + pod["ready"])[0] == 200)
    assert _ask() == ANSWER, "another answer after the restart"
    _say(f"answers again {time.monotonic() - began:.1f} s after a restart")


def _check_container() -> None:
    """It runs as the manifest says: another user, nothing writable but its volumes."""
    name = f"{POD}-server"
    user = _podman("exec", name, "id", "-u").strip()
    assert user == "10001", user
    touched = subprocess.run(
        ["podman", "exec", name, "touch", "/opt/here"], env=PODMAN_ENV, capture_output=True, text=True
    )
    assert "Read-only file system" in touched.stderr, touched.stderr
    status = _podman("exec", name, "cat", "/proc/1/status")
    capabilities = re.search(r"CapEff:\s+(\w+)", status)
    assert capabilities is not None
    assert int(capabilities[1], 16) == 0, capabilities[1]
    _say("user 10001, read-only root, no capabilities")


def _drain(pod: Manifest) -> None:
    """Streams run, the hook is called: they end whole, and new requests are refused with a hint."""
    answers: list[str] = []
    streams = [threading.Thread(target=lambda: answers.append(_ask(max_tokens=400, ignore_eos=True))) for _ in range(4)]
    for stream in streams:
        stream.start()
    time.sleep(0.3)
    hook: list[tuple[int, str]] = []
    order = threading.Thread(target=lambda: hook.append(_get(HEALTH + pod["hook"], 120)))
    order.start()
    _wait("not ready", lambda: _get(HEALTH + pod["ready"])[0] == 503, 10)
    assert _ask(), "a pod that leaves must still serve for a while"
    order.join()
    assert hook[0][0] == 200, hook
    for stream in streams:
        stream.join()
    assert len(answers) == 4
    assert len(set(answers)) == 1
    status, body = _post({"model": "llava", "messages": [{"role": "user", "content": "Who are you?"}]})
    assert status == 429, (status, body)
    assert "retry after" in body, body
    _say(f"drained: 4 streams ended whole, then {status}: {json.loads(body)['error']['message']}")


def _ask(**options: Any) -> str:
    url = f"data:image/jpeg;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    content = [{"type": "text", "text": "What is in the picture?"}, {"type": "image_url", "image_url": {"url": url}}]
    status, body = _post({"model": "llava", "messages": [{"role": "user", "content": content}], **options})
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["message"]["content"]).strip()


def _post(body: Manifest) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{DOOR}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return _open(request, 120)


def _get(url: str, timeout_s: float = 10) -> tuple[int, str]:
    return _open(urllib.request.Request(url), timeout_s)


def _open(request: urllib.request.Request, timeout_s: float) -> tuple[int, str]:
    """Status and body; 0 when nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def _wait(what: str, condition: Callable[[], bool], timeout_s: float = READY_S) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            print(_podman("pod", "logs", POD, check=False)[-4000:], file=sys.stderr)
            raise TimeoutError(f"not {what} after {timeout_s:g} s")
        time.sleep(0.3)


def _podman(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["podman", *arguments], env=PODMAN_ENV, capture_output=True, text=True, timeout=600)
    if check and done.returncode != 0:
        raise RuntimeError(f"podman {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
    return done.stdout + ("" if check else done.stderr)


def _say(text: str) -> None:
    print(f"kube-play: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "localhost/vlm-relay:latest"))
