"""Arguments of the run that saved a checkpoint, for tensor-parallel rules that depend on them.

Megatron saves its ``args`` whole. gpt-neox saves eight of them, none of which decides about a layout, and beside the
checkpoint's files a folder ``configs`` with the user's configuration files as they were (``save_ds_checkpoint``,
megatron/checkpointing.py; the 20B release has it beside the tag's folder). Those are YAML, in practice JSON with
comments and commas too many; only options at the top with plain values are read, and what cannot be read is passed
over: its options are then unknown, and so are the defaults of all others.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = (str, int, float, bool, type(None))
_CONFIGS = "configs"
_ENDINGS = (".yml", ".yaml", ".json")
#: Files come from strangers: no more of them, and no bigger, than configurations are.
_MOST_FILES = 32
_MOST_BYTES = 1 << 20
#: Which option says that a dict of arguments is gpt-neox's.
_NEOX_MARK = "model_parallel_size"
#: gpt-neox's own defaults of options that decide about a layout (megatron/neox_arguments/neox_args.py).
_NEOX_DEFAULTS = {
    "activation": "gelu",
    "gpt_j_residual": False,
    "num_kv_heads": None,
    "output_layer_parallelism": "column",
}

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<comment>\#[^\n]*)|"(?P<double>(?:[^"\\\n]|\\.)*)"|'(?P<single>(?:[^'\n]|'')*)'"""
    r"""|(?P<mark>[{}\[\],]|:(?=[\s,{}\["']|$))|(?P<bare>(?:[^\s,{}\[\]:"']|:(?=\S)|(?<=\S)["'])+)"""
)
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t"}
_WORDS = {"true": True, "false": False, "null": None, "~": None}
#: (its text, whether it was quoted, whether it is punctuation)
_Token = tuple[str, bool, bool]


def run_arguments(saved: Any, folder: str) -> dict[str, Any]:
    """Plain values of a saved ``args`` (Megatron's namespace, gpt-neox's dict), and of the configuration beside it.

    Args:
        saved: the entry ``args`` of a model-states file.
        folder: the file's.
    """
    values = vars(saved) if isinstance(saved, Namespace) else saved
    if not isinstance(values, Mapping):
        return {}
    plain = {str(key): value for key, value in values.items() if isinstance(value, _PLAIN)}
    if isinstance(saved, Namespace) or _NEOX_MARK not in plain:
        return plain
    return {**_neox_options(folder), **plain}


def _neox_options(folder: str) -> dict[str, Any]:
    """Options of the configuration saved beside a checkpoint, and the defaults of those it does not mention."""
    paths = _config_files(folder)
    read = [_read_options(path) for path in paths]
    known = [options for options in read if options is not None]
    mentioned = {key for options in known for key in options}
    agreed = {key: value for options in known for key, value in options.items() if _agree(known, key, value)}
    complete = bool(paths) and len(known) == len(paths)
    defaults = {key: value for key, value in _NEOX_DEFAULTS.items() if key not in mentioned} if complete else {}
    return {**defaults, **agreed}


def _agree(configs: list[dict[str, Any]], key: str, value: Any) -> bool:
    """Whether no file says otherwise: files of several models may lie beside a release, and then nothing is known."""
    return all(repr(options.get(key, value)) == repr(value) for options in configs)


def _config_files(folder: str) -> list[str]:
    """Those of the nearest folder that has any; empty where there are too many to be one run's."""
    for parent in (folder, os.path.dirname(os.path.abspath(folder))):
        configs = os.path.join(parent, _CONFIGS)
        if os.path.isdir(configs):
            found = sorted(name for name in os.listdir(configs) if name.endswith(_ENDINGS))
            if found:
                return [os.path.join(configs, name) for name in found] if len(found) <= _MOST_FILES else []
    return []


def _read_options(path: str) -> dict[str, Any] | None:
    """Plain options at the top of one file, with underscores in their names; ``None``: it cannot be read."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MOST_BYTES:
            return None
        with open(path, encoding="utf-8") as stream:
            text = stream.read(_MOST_BYTES)
    except (OSError, ValueError):
        return None
    return parse_options(text)


def parse_options(text: str) -> dict[str, Any] | None:
    """Plain options at the top of a YAML text; ``None`` where it is not one of the forms that gpt-neox's users write.

    Of YAML, this knows flow mappings (``{...}``, over any number of lines) and flat block mappings (``key: value`` at
    the beginning of a line; indented lines, and lists, belong to the option above and are passed over).
    """
    try:
        tokens = list(_tokens(text))
        pairs = _flow(tokens) if tokens and tokens[0] == ("{", False, True) else _block(text)
        return {key.replace("-", "_"): value for key, value in pairs}
    except ValueError:
        return None


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"cannot be read at character {position}")
        position = match.end()
        if match["double"] is not None:
            yield re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), match["double"]), True, False
        elif match["single"] is not None:
            yield match["single"].replace("''", "'"), True, False
        elif match["mark"] is not None:
            yield match["mark"], False, True
        elif match["bare"] is not None:
            yield match["bare"], False, False


def _flow(tokens: list[_Token]) -> Iterator[tuple[str, Any]]:
    """The pairs with plain values of ``{key: value, ...}``."""
    depth, key = 0, None
    words: list[_Token] = []
    nested = False
    for number, (text, _, is_mark) in enumerate(tokens):
        if is_mark and text in "{[":
            depth += 1
            nested = nested or depth > 1
        elif is_mark and text in "}]":
            depth -= 1
        elif depth == 1 and is_mark and text == ":":
            key, words = _name(words), []
        elif depth == 1 and not is_mark:
            words.append(tokens[number])
        if is_mark and ((depth == 1 and text == ",") or depth == 0):
            if key is not None and not nested:
                yield key, _value(words)
            key, words, nested = None, [], False
        if depth == 0:
            if number != len(tokens) - 1:
                raise ValueError("goes on after its end")
            return
    raise ValueError("does not end")


def _block(text: str) -> Iterator[tuple[str, Any]]:
    """The pairs with plain values of lines ``key: value``."""
    for line in text.splitlines():
        tokens = list(_tokens(line))
        if not tokens or line[0].isspace() or line.startswith(("- ", "---")):
            continue
        if len(tokens) < 2 or tokens[0][2] or tokens[1] != (":", False, True):
            raise ValueError("neither an option nor a part of one")
        values = tokens[2:]
        if values and not any(is_mark and mark != ":" for mark, _, is_mark in values):
            yield tokens[0][0], _value(values)


def _name(words: list[_Token]) -> str:
    if len(words) != 1:
        raise ValueError("an option without a name")
    return words[0][0]


def _value(words: list[_Token]) -> Any:
    if len(words) == 1 and not words[0][1]:
        return _scalar(words[0][0])
    return " ".join(text for text, _, _ in words) if words else None


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
