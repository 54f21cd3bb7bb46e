"""Writes docs/configuration.md from the configuration's model, and the tables of docs/commands.md from the commands.

``python docs/reference.py``
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from rich.text import Text
from typer.models import OptionInfo, ParamMeta
from typer.utils import get_params_from_function

from elastic_ckpt.cli import COMMANDS, app, summary
from elastic_ckpt.config import ElasticConfig, Reading

PAGE = Path(__file__).with_name("configuration.md")
COMMANDS_PAGE = Path(__file__).with_name("commands.md")
_HEAD = """\
# Configuration

<!-- Written by docs/reference.py from elastic_ckpt/config.py: change it there. -->

All options are optional. They go under the top-level key `"elastic_checkpoint"` of the DeepSpeed config. An unknown
key is an error that names the nearest valid one. [Flags and a variable](getting-started.md#options) override the mode.
"""
#: The sections of the page: the title, the options and an example.
GROUPS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("Which loader runs", ("mode", "pretrained"), {"mode": "require"}),
    ("What is reported", ("report", "sheet", "on_change"), {"report": "load.json", "on_change": "error"}),
    (
        "Damaged and missing files",
        ("verify", "on_damage", "wait_for_files", "fallback_dirs"),
        {"on_damage": 1000, "wait_for_files": 60, "fallback_dirs": ["/lustre/run"]},
    ),
    (
        "Names and optimizer states",
        ("rename", "added_rows", "param_groups", "states", "convert_optimizer", "align_partitions"),
        {"rename": [["^module\\.(.*)", "\\1"]], "param_groups": "keep_live", "states": {"my_cache": "fresh"}},
    ),
    (
        "Tensor parallelism",
        ("tp_preset", "tp_rules", "replicated_params"),
        {
            "tp_rules": [{"pattern": ".*qkv.weight", "kind": "column", "sub_parameters": [2, 1, 1]}],
            "replicated_params": "first",
        },
    ),
    ("Untrusted files", ("trust_pickle", "on_unreadable_entry"), {"on_unreadable_entry": "skip"}),
    (
        "Storage and reading",
        ("storage_options", "reading"),
        {"storage_options": {"endpoint": "http://minio:9000"}, "reading": {"threads": 8, "storage": "network"}},
    ),
]


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(map(_group, *zip(*GROUPS, strict=True)))


def _group(title: str, options: tuple[str, ...], example: dict[str, Any]) -> str:
    lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in example.items()]
    text = f'\n## {title}\n\n```json\n{{\n  "elastic_checkpoint": {{\n' + ",\n".join(lines) + "\n  }\n}\n```\n"
    for name in options:
        text += _option(ElasticConfig, name)
    if "reading" in options:
        text += "".join(_option(Reading, name, "reading.") for name in Reading.model_fields)
    return text


def _option(model: type[BaseModel], name: str, where: str = "") -> str:
    """An option: its name, its type and default, what it does, and its values as a list if they are described so."""
    field, schema = model.model_fields[name], model.model_json_schema()["properties"][name]
    default = "{}" if name == "reading" else json.dumps(field.default)
    names = "|".join(re.findall(r'`"(\w+)"`', _type(schema)))
    first, *values = (
        re.split(rf"(?:^|[;:.] )(?=(?:{names}): )", str(field.description)) if names else [field.description]
    )
    text = f"\n### `{where}{name}`\n\nDefault: `{default}`. Type: {_type(schema)}.\n"
    if first:
        text += f"\n{first[0].upper()}{first[1:]}{':' if values else '.'}\n"
    if values:
        text += "\n" + "".join(re.sub(r"^(\w+):(.*)", r'- `"\1"`:\2', value) + ".\n" for value in values)
    return text


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


#: A parameter that as many commands have is described once.
_SHARED_BY = 4


def commands_page() -> str:
    """The page of commands, whose text is written by hand, with each command's arguments and options as they are."""
    found = {name: _parameters(name) for name in COMMANDS}
    counts = Counter(row for rows in found.values() for row in rows.values())
    shared = {name: row for rows in found.values() for name, row in rows.items() if counts[row] >= _SHARED_BY}
    overview = "".join(f"| [`{name}`](#{name}) | {summary(name)} |\n" for name in COMMANDS)
    text = _written(COMMANDS_PAGE.read_text(encoding="utf-8"), "overview", f"| command | |\n|---|---|\n{overview}")
    text = _written(text, "shared", _PARAMETERS + "".join(shared.values()))
    for name, rows in found.items():
        text = _written(text, name, _command(name, rows, shared))
    return text


def _written(text: str, name: str, block: str) -> str:
    """A page with another text between the marks of a name."""
    mark, end = f"<!-- written by docs/reference.py: {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(mark)
    return f"{before}{mark}{block}{end}{rest.split(end, 1)[1]}"


_PARAMETERS = "| argument or option | meaning |\n|---|---|\n"


def _info(name: str) -> Any:
    importlib.import_module(f"elastic_ckpt.cli.{COMMANDS[name]}")
    return next(info for info in app.registered_commands if info.name == name)


def _parameters(name: str) -> dict[str, str]:
    """Each argument and option of a command, and its row of a table."""
    parameters = get_params_from_function(_info(name).callback).values()
    return {_names(each): f"| {_names(each)} | {_meaning(each)} |\n" for each in parameters}


def _command(name: str, rows: dict[str, str], shared: dict[str, str]) -> str:
    arguments = [each.strip("`") for each in rows if "--" not in each]
    own = "".join(row for each, row in rows.items() if each not in shared)
    also = [each for each in rows if each in shared and "--" in each]
    options = " [OPTIONS]" * any("--" in each for each in rows)
    text = f"`elastic-ckpt {' '.join([name, *arguments])}{options}`\n\n"
    text += f"{_plain(inspect.getdoc(_info(name).callback)).strip()}\n"
    text += f"\n{_PARAMETERS}{own}" if own else ""
    return text + (f"\n[Shared options](#shared-options): {', '.join(also)}.\n" if also else "")


def _metavar(parameter: ParamMeta) -> str:
    return str(parameter.default.metavar or parameter.name.upper())


def _names(parameter: ParamMeta) -> str:
    is_option = isinstance(parameter.default, OptionInfo)
    return ", ".join(f"`{name}`" for name in (parameter.default.param_decls if is_option else [_metavar(parameter)]))


def _meaning(parameter: ParamMeta) -> str:
    info, choices = parameter.default, get_args(parameter.annotation)
    words = [f"`{choice}`" for choice in choices if isinstance(choice, str)]
    described = _plain(info.help) + (f" One of {', '.join(words)}." if words else "")
    return described + ("" if info.default in (None, False, ...) else f" Default: `{info.default}`.")


def _plain(text: str | None) -> str:
    """Without rich's markup."""
    return Text.from_markup(text or "").plain.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    COMMANDS_PAGE.write_text(commands_page(), encoding="utf-8")
