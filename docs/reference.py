"""Writes docs/configuration.md from the model that reads the configuration, and docs/commands.md from the commands.

``python docs/reference.py``
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from rich.text import Text
from typer.models import ArgumentInfo, OptionInfo, ParamMeta
from typer.utils import get_params_from_function

from elastic_ckpt.cli import COMMANDS, app, summary
from elastic_ckpt.config import ElasticConfig, Reading

PAGE = Path(__file__).with_name("configuration.md")
COMMANDS_PAGE = Path(__file__).with_name("commands.md")
_HEAD = """\
# Configuration

<!-- Written by docs/reference.py from elastic_ckpt/config.py: change it there. -->

Everything is optional, and goes under one top-level key of the DeepSpeed config. A key that does not exist is an error
that names the nearest one.

```json
{"elastic_checkpoint": {"mode": "require", "report": "load.json"}}
```

| key | default | type | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    for model, where in ((ElasticConfig, ""), (Reading, "reading.")):
        properties = model.model_json_schema()["properties"]
        for name, field in model.model_fields.items():
            described = (field.description or "").replace("|", "\\|")
            default = "{}" if name == "reading" else json.dumps(field.default)
            yield f"| `{where}{name}` | `{default}` | {_type(properties[name])} | {described} |\n"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "$ref" in schema:  # a page has a section on rules
        return "object" if schema["$ref"].endswith("Reading") else "[rule](tensor-parallel.md#rules)"
    return _type_of_plain(schema)


def _type_of_plain(schema: dict[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(_type(each) for each in schema['prefixItems'])}]"
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if "additionalProperties" in schema:
        values = schema["additionalProperties"]
        return "object" if values is True else f"object of {_type(values)}"
    limits = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join([schema["type"], *limits])


_COMMANDS_HEAD = """\
# Commands

<!-- Written by docs/reference.py from elastic_ckpt/cli/: change it there. -->

`elastic-ckpt COMMAND`, or `python -m elastic_ckpt COMMAND`. [The command line](command-line.md) shows what they print.

Exit codes: 0, success; 1, a finding (damage, a difference, a load that would be refused); 2, wrong usage; 3, the
checkpoint cannot be read.

| command | |
|---|---|
"""


def commands_page() -> str:
    """Every command, with its arguments and options."""
    overview = "".join(f"| [`{name}`](#{name}) | {summary(name)} |\n" for name in COMMANDS)
    return _COMMANDS_HEAD + overview + "".join(map(_command, COMMANDS))


def _command(name: str) -> str:
    importlib.import_module(f"elastic_ckpt.cli.{COMMANDS[name]}")
    info = next(info for info in app.registered_commands if info.name == name)
    assert info.callback is not None
    parameters = get_params_from_function(info.callback).values()
    arguments = [_metavar(each) for each in parameters if isinstance(each.default, ArgumentInfo)]
    example = _plain(info.epilog).removeprefix("Example: ")
    return (
        f"\n## {name}\n\n`elastic-ckpt {' '.join([name, *arguments, '[OPTIONS]'])}`\n\n"
        f"{_plain(inspect.getdoc(info.callback)).strip()}\n\nExample: `{example}`\n\n"
        "| argument or option | default | meaning |\n|---|---|---|\n" + "".join(map(_parameter, parameters))
    )


def _metavar(parameter: ParamMeta) -> str:
    return str(parameter.default.metavar or parameter.name.upper())


def _parameter(parameter: ParamMeta) -> str:
    info, choices = parameter.default, get_args(parameter.annotation)
    is_option = isinstance(info, OptionInfo)
    names = ", ".join(f"`{name}`" for name in info.param_decls) if is_option else f"`{_metavar(parameter)}`"
    words = [f"`{choice}`" for choice in choices if isinstance(choice, str)]
    described = _plain(info.help) + (f" One of {', '.join(words)}." if words else "")
    default = "" if info.default in (None, False, ...) else f"`{info.default}`"
    return f"| {names} | {default} | {described} |\n"


def _plain(text: str | None) -> str:
    """Without rich's markup."""
    return Text.from_markup(text or "").plain.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    COMMANDS_PAGE.write_text(commands_page(), encoding="utf-8")
