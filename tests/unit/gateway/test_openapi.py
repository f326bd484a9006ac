"""Whatever a client sends that fits the gateway's own description, or does not: never our fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.schemas import BaseSchema

from client.gateway.settings import Settings
from tests.unit.gateway.conftest import Gateway, running_upstream

EXAMPLES = 40
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def described() -> Iterator[BaseSchema]:
    """The description of a gateway whose server answers everything."""
    with running_upstream() as upstream:
        upstream.answers("a ", "car")
        gateway = Gateway(Settings(url=upstream.address, max_body_mib=1))
        yield schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
        gateway.close()


def test_every_operation_is_tried(described: BaseSchema) -> None:
    found = {(each.ok().method.upper(), each.ok().path) for each in described.get_all_operations()}

    assert found == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*each, GenerationMode.POSITIVE) for each in OPERATIONS]
    + [(*each, GenerationMode.NEGATIVE) for each in OPERATIONS if each[0] == "POST"],
)
def test_nothing_that_is_sent_is_answered_with_a_5xx(
    described: BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = described[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        response = case.call()
        assert response.status_code < 500, (response.status_code, response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    check()
