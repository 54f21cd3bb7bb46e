"""The DeepSpeed config, features and arguments of the run that saved a checkpoint; rules of shards may depend on them.

Megatron saves its ``args`` whole. gpt-neox saves eight of them, none about layouts, and beside the checkpoint's files a
folder ``configs`` with the user's YAML files (``save_ds_checkpoint``, megatron/checkpointing.py; the 20B release has it
beside the tag's folder), of which only top-level options with plain values are read. If a file cannot be read, its
options are unknown, and so are the defaults of all others.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import yaml

from elastic_ckpt.core.training_state import ONE_BIT_OPTIMIZERS, Features
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.pickled import PickledFile

_ONE_BIT_STATES = {"worker_error", "server_error", "momentum_accumulator", "lamb_coeff_freeze", "scaling_coeff"}
_PLAIN = (str, int, float, bool, type(None))
_ENDINGS = (".yml", ".yaml", ".json")
#: Limits for untrusted files, above any real configuration.
_MOST_FILES = 32
_MOST_BYTES = 1 << 18
#: The option that identifies a dict of arguments as gpt-neox's.
_NEOX_MARK = "model_parallel_size"
#: gpt-neox's defaults of options that decide about layouts (megatron/neox_arguments/neox_args.py).
_NEOX_DEFAULTS = {
    "activation": "gelu",
    "gpt_j_residual": False,
    "num_kv_heads": None,
    "output_layer_parallelism": "column",
}


def saved_config(file: PickledFile) -> Mapping[str, Any] | None:
    """The DeepSpeed config in a model-states file; ``None``: not saved, or only its path."""
    config = file.tree.get("ds_config") if isinstance(file.tree, Mapping) else None
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return None  # a path on the machine that saved it: the config is unknown, not empty
    return config if isinstance(config, Mapping) else None


def config_section(file: PickledFile, key: str) -> Mapping[str, Any]:
    """One section of the config, such as ``zero_optimization``; empty if unknown."""
    section = (saved_config(file) or {}).get(key)
    return section if isinstance(section, Mapping) else {}


def features_in(file: PickledFile) -> Features:
    """The features of a model-states or optimizer-states file. Local."""
    tree = file.tree if isinstance(file.tree, Mapping) else {}
    experts = tree.get("num_experts") or ()
    states = _base_state(file).get("state")
    keys = [set(each) for each in states.values() if isinstance(each, Mapping)] if isinstance(states, Mapping) else []
    optimizer = str(config_section(file, "optimizer").get("type", "")).lower()
    mics = config_section(file, "zero_optimization").get("mics_shard_size", 0)
    return Features(
        experts=tuple(experts) if isinstance(experts, (list, tuple)) else (experts,),
        expert_groups=tuple(sorted({str(group.get("name")) for group in base_groups(file) if group.get("moe")})),
        one_bit=optimizer in ONE_BIT_OPTIMIZERS or any(_ONE_BIT_STATES & each for each in keys),
        mics=max(mics, 0) if isinstance(mics, int) else 0,
    )


def base_groups(file: PickledFile) -> list[Mapping[str, Any]]:
    """The base optimizer's param groups in a file; empty without an optimizer."""
    return [group for group in _base_state(file).get("param_groups") or () if isinstance(group, Mapping)]


def _base_state(file: PickledFile) -> Mapping[str, Any]:
    """The base optimizer's ``state_dict``, wherever the ZeRO stage puts it."""
    tree = file.tree if isinstance(file.tree, Mapping) else {}
    state = tree.get("optimizer_state_dict", tree.get("optimizer"))
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    return state if isinstance(state, Mapping) else {}


def refuse_features(features: Features, file: str) -> None:
    """Raise :class:`UnsupportedError` for what cannot be restored at another topology, by name."""
    if features.names:
        raise UnsupportedError(
            f"the checkpoint was saved with {features.names}, whose parameters or states are not laid out as ZeRO's "
            "and cannot be cut for another topology yet",
            file=file,
            expected="a run of plain ZeRO",
            found=features.names,
            remedy="resume it with the number of ranks, the layout and the optimizer that saved it",
        )


def run_arguments(saved: Any, folder: str) -> dict[str, Any]:
    """Plain values of the saved ``args`` (Megatron's namespace, gpt-neox's dict) and of the configuration beside it."""
    values = vars(saved) if isinstance(saved, Namespace) else saved
    if not isinstance(values, Mapping):
        return {}
    plain = {str(key): value for key, value in values.items() if isinstance(value, _PLAIN)}
    if isinstance(saved, Namespace) or _NEOX_MARK not in plain:
        return plain
    return {**_neox_options(folder), **plain}


def _neox_options(folder: str) -> dict[str, Any]:
    """Options of the configuration beside a checkpoint, and the defaults of those that it does not set.

    An option on which files disagree is unknown: configurations of several models may have been released together.
    """
    read = [_read_options(path) for path in _config_files(folder)]
    options: dict[str, Any] = {} if not read or None in read else dict(_NEOX_DEFAULTS)
    known = [each for each in read if each is not None]
    for key in dict.fromkeys(key for each in known for key in each):  # in an order that is the same on all ranks
        values = [each[key] for each in known if key in each]
        options.pop(key, None)
        if len(set(map(repr, values))) == 1:
            options[key] = values[0]
    return options


def _config_files(folder: str) -> list[str]:
    """Files of the nearest ``configs`` folder that has any; empty if there are too many to be one run's."""
    for parent in (folder, os.path.dirname(os.path.abspath(folder))):
        configs = os.path.join(parent, "configs")
        names = sorted(os.listdir(configs)) if os.path.isdir(configs) else []
        paths = [os.path.join(configs, name) for name in names if name.endswith(_ENDINGS)]
        if paths:
            return paths if len(paths) <= _MOST_FILES else []
    return []


def _read_options(path: str) -> dict[str, Any] | None:
    """The plain options in one file; ``None``: it cannot be read."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MOST_BYTES:
            return None
        with open(path, encoding="utf-8") as stream:
            return parse_options(stream.read(_MOST_BYTES))
    except (OSError, ValueError):
        return None


def parse_options(text: str) -> dict[str, Any] | None:
    """Plain top-level options of a YAML text, with underscores in their names; ``None``: it is no mapping of names.

    Only plain scalars are constructed: aliases and merge keys of a hostile file would grow exponentially.
    """
    options = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            return None
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode) or not name.value:
                return None
            if isinstance(value, yaml.ScalarNode) and isinstance(plain := loader.construct_object(value), _PLAIN):
                options[name.value.replace("-", "_")] = plain
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return options
