"""Writes docs/configuration.md from the model that reads the configuration: ``python docs/reference.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_ckpt.config import ElasticConfig

PAGE = Path(__file__).with_name("configuration.md")
_HEAD = """\
# Configuration

<!-- Written by docs/reference.py from elastic_ckpt/config.py: change it there. -->

Everything is optional, and goes under one top-level key of the DeepSpeed config. A key that does not exist is an error
that names the nearest one.

```json
{"elastic_checkpoint": {"mode": "require", "report_path": "load.json"}}
```

| key | default | type | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    properties = ElasticConfig.model_json_schema()["properties"]
    for name, field in ElasticConfig.model_fields.items():
        described = (field.description or "").replace("|", "\\|")
        yield f"| `{name}` | `{json.dumps(field.default)}` | {_type(properties[name])} | {described} |\n"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "$ref" in schema:  # the README has a section on rules
        return "[rule](../README.md#rules)"
    return _type_of_plain(schema)


def _type_of_plain(schema: dict[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(_type(each) for each in schema['prefixItems'])}]"
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        return f"object of {_type(schema['additionalProperties'])}"
    limits = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join([schema["type"], *limits])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
