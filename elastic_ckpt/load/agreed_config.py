"""The configuration of one load, on which all ranks agree."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from elastic_ckpt import distributed, errors
from elastic_ckpt.config import ElasticConfig, read_config
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.training_state import LoadArguments


def agreed_config(engine: Any, arguments: LoadArguments) -> ElasticConfig:
    """The configuration; :class:`ConfigError` on every rank if it is wrong, or ranks disagree about it. Collective."""
    configs: list[ElasticConfig] = []
    mine: dict[str, Any] = {}

    def digest() -> bytes:
        configs.append(read_config(compat.ds_config(engine)))
        mine.update(_meaning(arguments, configs[0]), use_node_local_storage=bool(engine.use_node_local_storage()))
        return hashlib.sha256(repr(mine).encode()).digest()

    def call() -> tuple[dict[str, Any], str, Any]:
        """With what two paths of one folder have in common."""
        try:
            path = os.path.realpath(arguments.load_dir)
            # asks the system: whether two spellings are of one folder
            status = os.stat(arguments.load_dir)
            return mine, path, (status.st_dev, status.st_ino, status.st_mtime_ns)
        except (OSError, TypeError, ValueError):  # of no folder, or of what is none
            return mine, str(arguments.load_dir), None

    if len(set(distributed.all_gather("read the configuration", digest))) == 1:
        return configs[0]
    (first, path, inode), *others = distributed.all_gather("read the configuration", call)
    for rank, (other, other_path, other_inode) in enumerate(others, 1):
        differ = {key for key, value in first.items() if other[key] != value}
        if first["use_node_local_storage"] or path == other_path or (inode is not None and inode == other_inode):
            differ.discard("load_dir")
        if keys := sorted(differ):
            problem = f"ranks call load_checkpoint with different arguments or options: {', '.join(keys)}"
            here, there = ({key: values[key] for key in keys} for values in (first, other))
            expected = f"{here}, as on rank 0"
            found = f"{there} on rank {rank}"
            remedy = "give every rank the same arguments and the same DeepSpeed config"
            raise errors.ConfigError(problem, None, expected, found, remedy=remedy, rank=rank)
    return configs[0]


def _meaning(arguments: LoadArguments, config: ElasticConfig) -> dict[str, Any]:
    """Arguments and options in a form that is equal where they mean the same."""
    load_dir = arguments.load_dir
    tag = arguments.tag
    if isinstance(load_dir, (str, os.PathLike)):
        load_dir = os.path.normpath(load_dir)
    elif config.mode != "off":
        problem = "load_checkpoint was given no folder"
        expected = "load_dir as a str or a Path"
        remedy = "give the folder that save_checkpoint was given; without one, do not call load_checkpoint"
        raise errors.ConfigError(problem, None, expected, repr(load_dir)[:200], remedy=remedy)
    return {
        **{key: bool(value) for key, value in vars(arguments).items()},
        "others": arguments.others,
        "load_dir": load_dir,
        "tag": None if tag is None else os.path.normpath(str(tag)),
        **config.model_dump(exclude={"report", "storage_options"}),
        "storage_options": f"digest {hashlib.sha256(repr(config.storage_options).encode()).hexdigest()[:8]}",
    }
