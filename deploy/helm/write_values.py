"""Writes what the chart says of its values: values.yaml, values.schema.json and README.md, all from `values.py`.

python deploy/helm/write_values.py            # writes the three files
python deploy/helm/write_values.py --check    # exit status 1 when one of them is not what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from values import Chart, Values

from scheduler.profile import Profile

CHART = Path(__file__).with_name("vlm-relay")
HEADER = "# Written by deploy/helm/write_values.py from values.py, where the keys, defaults and reasons stand.\n"


def schema() -> dict[str, Any]:
    """The JSON schema of the values, that of the profile included; any table may carry `global`, which helm adds."""
    made = _plain(Chart.model_json_schema(by_alias=True))
    made["$schema"] = "http://json-schema.org/draft-07/schema#"
    made["properties"]["global"] = {"type": "object"}
    profile = Profile.model_json_schema()
    made["definitions"].update({f"profile{name}": _plain(body) for name, body in profile["$defs"].items()})
    tables = {
        name: {"$ref": f"#/definitions/profile{body['$ref'].rsplit('/', 1)[1]}"}
        for name, body in profile["properties"].items()
    }
    made["properties"]["profile"] = {
        "type": "object",
        "description": Chart.model_fields["profile"].description,
        "properties": tables,
        "additionalProperties": False,
    }
    return made


def _plain(body: Any) -> Any:
    """What pydantic makes, in the words of draft 7 and without its titles and defaults."""
    if isinstance(body, list):
        return [_plain(item) for item in body]
    if not isinstance(body, dict):
        return body
    plain = {}
    for name, value in body.items():
        if name in ("title", "default") and not isinstance(value, dict):
            continue
        if name == "default":
            continue
        if name == "properties":
            value = {key: {k: v for k, v in each.items() if k != "title"} for key, each in value.items()}
        if name == "$ref":
            value = value.replace("#/$defs/", "#/definitions/")
        plain["definitions" if name == "$defs" else name] = _plain(value)
    return plain


def values_yaml() -> str:
    """The default values with their reasons."""
    lines = [HEADER]
    _write_table(Chart(), lines, "")
    return "\n".join(lines) + "\n"


def _write_table(table: Values, lines: list[str], indent: str) -> None:
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, Values):
            lines += ["", f"{indent}# {type(value).__doc__}", f"{indent}{name}:"]
            _write_table(value, lines, indent + "  ")
        else:
            lines += [f"{indent}{name}: {json.dumps(value)}  # {field.description}"]


def readme() -> str:
    """The reference of all values, behind what README.head.md says."""
    rows = ["| key | default | |", "| --- | --- | --- |"]
    _add_rows(Chart(), rows, "")
    return CHART.with_name("README.head.md").read_text() + "\n" + "\n".join(rows) + "\n"


def _add_rows(table: Values, rows: list[str], prefix: str) -> None:
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, Values):
            _add_rows(value, rows, f"{prefix}{name}.")
        else:
            text = (field.description or "").replace("|", "\\|")
            rows.append(f"| `{prefix}{name}` | `{json.dumps(value)}` | {text} |")


def main(argv: Sequence[str]) -> int:
    """Writes or checks the files; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when a file is not what it should be")
    arguments = parser.parse_args(argv)
    texts = {
        "values.yaml": values_yaml(),
        "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        "README.md": readme(),
    }
    stale = [name for name, text in texts.items() if not _is_written(CHART / name, text)]
    if not arguments.check:
        for name in stale:
            (CHART / name).write_text(texts[name])
    elif stale:
        print(f"{', '.join(stale)}: not what the definition says; run 'python {sys.argv[0]}'", file=sys.stderr)
        return 1
    return 0


def _is_written(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
