"""Every panel and every alert has something to look at: a real Prometheus that scrapes a loaded server and gateway."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from client import RelayClient
from client.gateway.listening import bind
from demo.pictures import draw_scene, render, to_jpeg
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, wait_until
from tests.unit.gateway.conftest import Gateway

DASHBOARD = Path("deploy/helm/vlm-relay/files/dashboard.json")
ALERTS = Path("deploy/helm/vlm-relay/files/alerts.yaml")
ON_GPUS = ("nv_gpu_", "vlm_relay_embedding_copied_bytes_total")  # nothing to see without one
LOAD_S = 6.0


class Prometheus:
    """A Prometheus that scrapes a server and a gateway twice a second, as one pod."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        assert shutil.which("prometheus"), "prometheus is missing: run 'make prometheus' as root"
        labels = {"namespace": "vision", "pod": "shop-0"}
        job = {"job_name": "vlm-relay", "static_configs": [{"targets": targets, "labels": labels}]}
        settings = {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "prometheus.log").open("w"),
        )

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now; none while it does not answer."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            query = urllib.parse.urlencode({"query": expression})
            with opener.open(f"{self.url}/api/v1/query?{query}", timeout=10) as response:
                return list(json.loads(response.read())["data"]["result"])
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                return []
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        except OSError:
            return []

    def close(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture(scope="module")
def prometheus(
    server: Server, running_gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """One that has seen a load of all kinds, streaming and not, with pictures old and new."""
    targets = [f"127.0.0.1:{server.ports.metrics}", running_gateway.url.removeprefix("http://")]
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), targets)
    try:
        assert wait_until(lambda: len(started.ask("up == 1")) == 2, 30), "nothing was scraped"
        until = time.monotonic() + LOAD_S
        address = f"127.0.0.1:{server.ports.grpc}"
        with ThreadPoolExecutor(4) as workers:
            for done in [workers.submit(_load, address, running_gateway.url, number, until) for number in range(4)]:
                done.result()
        yield started
    finally:
        started.close()


def _load(address: str, url: str, number: int, until: float) -> None:
    chance = random.Random(time.monotonic_ns())  # pictures that no cache knows
    with RelayClient(address) as client, openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as other:
        while time.monotonic() < until:
            picture = PICTURE if number == 1 else to_jpeg(render(draw_scene(chance), 336, 336))
            client.ask(QUESTION, images=[picture] if number % 2 else (), max_tokens=16, ignore_eos=True, deadline_s=60)
            other.chat.completions.create(
                model="llava", messages=[{"role": "user", "content": "Who are you?"}], max_tokens=8
            )


def expressions() -> list[tuple[str, str]]:
    """Panel and expression, with Grafana's variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (
            panel["title"],
            target["expr"].replace("$__rate_interval", "1m").replace("$namespace", ".*").replace("$pod", ".*"),
        )
        for panel in panels
        for target in panel.get("targets", [])
    ]


def test_every_panel_shows_numbers(prometheus: Prometheus) -> None:
    empty = []
    for title, expression in expressions():
        values = [float(sample["value"][1]) for sample in prometheus.ask(expression)]
        if any(name in expression for name in ON_GPUS):
            continue
        is_unused = "embedding_copy_seconds" in expression  # a CPU copies nothing between devices
        if not values or (any(math.isnan(value) for value in values) and not is_unused):
            empty.append((title, expression, values))

    assert empty == []


def test_every_metric_of_an_alert_is_there(prometheus: Prometheus) -> None:
    names = set(json.loads(_get(f"{prometheus.url}/api/v1/label/__name__/values"))["data"])
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        used = {word for word in _words(rule["expr"]) if word.startswith("vlm_relay_")}
        assert used
        assert used <= names, rule["alert"]
        prometheus.ask(rule["expr"])  # it can be evaluated


def _words(expression: str) -> set[str]:
    return set("".join(letter if letter.isalnum() or letter in "_" else " " for letter in expression).split())


def _get(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        return bytes(response.read())
