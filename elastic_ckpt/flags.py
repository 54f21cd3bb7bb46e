"""Flags for a training script's command line, and how they get into a DeepSpeed config."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_ckpt.config import CONFIG_KEY, set_flags
from elastic_ckpt.errors import ConfigError

_FLAG = "--universal-checkpoint"
#: What people type in its place; a script that parses only known arguments would pass over it in silence.
_WRONG_FLAG = "--universal_checkpoint"


class _WrongFlag(argparse.Action):
    """Answers with the right flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"unknown argument {option_string}: did you mean {_FLAG}?")


class _SetFlag(argparse.Action):
    """Stores the value in the namespace, as usual, and for every engine of this process."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        setattr(namespace, self.dest, value)
        set_flags(**{self.metavar_key: value})

    def __init__(self, *, key: str, **arguments: Any) -> None:
        self.metavar_key = key
        super().__init__(**arguments)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add elastic_ckpt's flags to a training script's parser, beside ``deepspeed.add_config_arguments``.

    Parsing sets them for the whole process; they win over the DeepSpeed config. A parser that has a
    ``--universal-checkpoint`` of its own, as Megatron-DeepSpeed's has, keeps it: :func:`with_arguments` reads either.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("elastic_ckpt", "loading checkpoints of any topology")
    with suppress(argparse.ArgumentError):  # it has one of its own
        group.add_argument(
            _FLAG,
            action=_SetFlag,
            key="mode",
            nargs="?",
            const="auto",
            choices=("auto", "require", "off"),
            help="elastic loading: auto (the default when the flag is bare), require, or off; prefers a universal "
            "checkpoint where a native one is there too",
        )
    with suppress(argparse.ArgumentError):
        group.add_argument(_WRONG_FLAG, action=_WrongFlag, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    group.add_argument(
        "--elastic-trust-pickle",
        action=_SetFlag,
        key="trust_pickle",
        nargs=0,
        const=True,
        default=False,
        help="let checkpoint files run code while they are read; only for files you trust",
    )
    group.add_argument(
        "--elastic-read-threads", action=_SetFlag, key="read_threads", type=int, help="threads that read, on each rank"
    )
    return parser


def with_arguments(ds_config: Mapping[str, Any] | str | Path | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """A DeepSpeed config that says what ``--universal-checkpoint`` said. What the config has besides stays.

    For scripts that make their config themselves, as Megatron-DeepSpeed does: ``"checkpoint"`` is added to, not
    replaced.

    Args:
        ds_config: the config, the path of its JSON file, or nothing; not changed.
        arguments: of the command line; ``universal_checkpoint`` may be a mode, or ``True`` of a parser's own flag.

    Returns:
        A new config, for ``deepspeed.initialize(config=...)``.

    Raises:
        ConfigError: ``"checkpoint"`` or ``"elastic_checkpoint"`` is no object.
    """
    held = ds_config if isinstance(ds_config, Mapping) or ds_config is None else json.loads(Path(ds_config).read_text())
    made: dict[str, Any] = copy.deepcopy(dict(held or {}))
    given = getattr(arguments, "universal_checkpoint", None)
    if not given:
        return made
    mode = "auto" if given is True else given
    _section(made, CONFIG_KEY)["mode"] = mode
    if mode != "off":
        _section(made, "checkpoint")["load_universal"] = True
    return made


def _section(ds_config: dict[str, Any], key: str) -> dict[str, Any]:
    section = ds_config.setdefault(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f'"{key}" in the DeepSpeed config must be an object', expected="{...}", found=repr(section))
    return section
