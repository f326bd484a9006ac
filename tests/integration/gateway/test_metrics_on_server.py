"""What deploy/metrics.md says is what a loaded server and gateway expose, name by name, in both directions."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from client import InvalidRequest, RelayClient
from launcher.server import Server
from python_backend.metrics import METRICS
from tests.integration.observe import PICTURE, QUESTION, metric, wait_until
from tests.unit.gateway.conftest import Gateway

DOCUMENT = Path("deploy/metrics.md")
ON_GPUS = {"vlm_relay_embedding_copied_bytes_total"}  # labelled by a route that a CPU has not
_ROW = re.compile(r"^\| `(vlm_relay_\w+)` \| (counter|gauge|histogram) \|([^|]*)\|")
BUILT_IN = {"model", "version", "le"}


@dataclass(frozen=True)
class Family:
    """One metric as documented or as exposed."""

    kind: str
    labels: frozenset[str]


def documented() -> dict[str, Family]:
    """The rows of the document's tables."""
    rows = [_ROW.match(line) for line in DOCUMENT.read_text().splitlines()]
    return {row[1]: Family(row[2], frozenset(re.findall(r"`(\w+)`", row[3]))) for row in rows if row}


def exposed(url: str) -> dict[str, Family]:
    """The families at an address."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("vlm_relay_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels}
            found[name] = Family(family.type, frozenset(labels - BUILT_IN))
    return found


@pytest.fixture
def load(client_of_openai: openai.OpenAI, client: RelayClient, server: Server) -> None:
    """One of everything: a question with an image twice, one without, a wrong one; and the metrics have heard of it."""
    before = metric(server, "vlm_relay_generated_tokens_total")
    for _ in range(2):
        client.ask(QUESTION, images=[PICTURE], max_tokens=4, ignore_eos=True)
    with pytest.raises(InvalidRequest):
        client.ask(QUESTION, images=[b"no image"])
    client_of_openai.chat.completions.create(model="llava", messages=[{"role": "user", "content": "Who are you?"}])
    assert wait_until(lambda: metric(server, "vlm_relay_generated_tokens_total") > before + 8)


@pytest.mark.usefixtures("load")
def test_every_metric_is_documented_and_every_documented_one_is_there(server: Server, gateway: Gateway) -> None:
    found = exposed(f"http://127.0.0.1:{server.ports.metrics}/metrics") | exposed(f"{gateway.url}/metrics")

    told = {name: family for name, family in documented().items() if name not in ON_GPUS}
    assert found == told


def test_the_document_and_the_definitions_agree() -> None:
    defined = {name: Family(each.kind, frozenset(each.labels)) for name, each in METRICS.items()}

    assert {name: family for name, family in documented().items() if "_gateway_" not in name} == defined
