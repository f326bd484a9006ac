"""What a server's metrics say."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def read_samples(url: str) -> list[Sample]:
    """All samples of all families, as they are now; Triton's are up to half a second old."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
