"""Arguments of the run that saved a checkpoint, for tensor-parallel rules that depend on them.

Megatron saves its ``args`` whole. gpt-neox saves eight of them, none of which decides about a layout, and beside the
checkpoint's files a folder ``configs`` with the user's configuration files as they were (``save_ds_checkpoint``,
megatron/checkpointing.py; the 20B release has it beside the tag's folder). Those are YAML; only options at the top with
plain values are read. Where a file cannot be read, its options are unknown, and so are the defaults of all others.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

_PLAIN = (str, int, float, bool, type(None))
_CONFIGS = "configs"
_ENDINGS = (".yml", ".yaml", ".json")
#: Files come from strangers: no more of them, and no bigger, than configurations are.
_MOST_FILES = 32
_MOST_BYTES = 1 << 18
#: Which option says that a dict of arguments is gpt-neox's.
_NEOX_MARK = "model_parallel_size"
#: gpt-neox's own defaults of options that decide about a layout (megatron/neox_arguments/neox_args.py).
_NEOX_DEFAULTS = {
    "activation": "gelu",
    "gpt_j_residual": False,
    "num_kv_heads": None,
    "output_layer_parallelism": "column",
}


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
    """Plain options at the top of a YAML text; ``None`` where it is not a mapping of names.

    Nothing but plain scalars is constructed: aliases and merge keys of a hostile file would grow exponentially.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            return None
        return dict(_options(loader, node))
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    finally:
        loader.dispose()


def _options(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Iterator[tuple[str, Any]]:
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode) or not name.value:
            raise ValueError("an option without a name")
        if isinstance(value, yaml.ScalarNode):
            plain = loader.construct_object(value)
            if isinstance(plain, _PLAIN):
                yield name.value.replace("-", "_"), plain
