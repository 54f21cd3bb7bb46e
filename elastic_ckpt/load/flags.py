"""Command-line flags of a training script, and how they enter a DeepSpeed config."""

from __future__ import annotations

import argparse
import base64
import copy
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import hjson
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

from elastic_ckpt.config import CONFIG_KEY, set_flags
from elastic_ckpt.errors import ConfigError

_FLAG = "--universal-checkpoint"
#: A common misspelling, which a script that parses only known arguments would silently ignore.
_WRONG_FLAG = "--universal_checkpoint"
#: Destination of a flag -> the option that it sets.
_OPTIONS = {
    "universal_checkpoint": "mode",
    "elastic_trust_pickle": "trust_pickle",
}


class _WrongFlag(argparse.Action):
    """Reports the right flag."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, __: Any, option_string: str | None = None) -> None:
        parser.error(f"unknown argument {option_string}: did you mean {_FLAG}?")


class _SetFlag(argparse.Action):
    """Stores the value in the namespace, and for every engine of this process."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: str | None = None
    ) -> None:
        value = self.const if self.nargs == 0 else values
        setattr(namespace, self.dest, value)
        set_flags(**{_OPTIONS[self.dest]: value})


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add elastic_ckpt's flags to a training script's parser, beside ``deepspeed.add_config_arguments``.

    Parsing sets them for the whole process; they override the DeepSpeed config. A parser with its own
    ``--universal-checkpoint``, such as Megatron-DeepSpeed's, keeps it: :func:`with_arguments` reads either.

    Returns:
        The same parser.
    """
    # whatever the parser does about conflicts: with "resolve", its own flag would be removed
    group = parser.add_argument_group("elastic_ckpt", "loading checkpoints of any topology", conflict_handler="error")
    with suppress(argparse.ArgumentError):  # it has its own
        group.add_argument(
            _FLAG,
            action=_SetFlag,
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
        nargs=0,
        const=True,
        default=False,
        help="let checkpoint files run code while they are read; only for files you trust",
    )
    return parser


def with_arguments(ds_config: Mapping[str, Any] | str | Path | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """A DeepSpeed config with the mode of ``--universal-checkpoint``; its other entries stay.

    For scripts that build their config themselves, such as Megatron-DeepSpeed; ``"checkpoint"`` is extended, not
    replaced.

    Args:
        ds_config: the config, in any form that DeepSpeed takes: an object, the path of its JSON file, or the file's
            text in base64; or nothing. It is not changed.
        arguments: parsed arguments; ``universal_checkpoint`` may be a mode, or ``True`` of a parser's own flag.

    Returns:
        A new config, for ``deepspeed.initialize(config=...)``; ``args.deepspeed_config`` must be ``None`` then.

    Raises:
        ConfigError: it cannot be read, or its ``"checkpoint"`` or ``"elastic_checkpoint"`` is not an object.
    """
    made = copy.deepcopy(dict(ds_config or {})) if isinstance(ds_config, Mapping | None) else _read(str(ds_config))
    given = getattr(arguments, "universal_checkpoint", None)
    if not given:
        return made
    mode = "auto" if given is True else given
    if mode != "auto":
        _section(made, CONFIG_KEY)["mode"] = mode
    elif CONFIG_KEY in made:
        _section(made, CONFIG_KEY).pop("mode", None)  # the default, and Accelerate replaces "auto" by its own values
    if mode != "off":
        _section(made, "checkpoint")["load_universal"] = True
    return made


def _read(source: str) -> dict[str, Any]:
    """Like DeepSpeed, comments included."""
    try:
        is_file = os.path.exists(source)
        text = Path(source).read_bytes() if is_file else base64.urlsafe_b64decode(source)
        config = hjson.loads(text.decode(), object_pairs_hook=dict_raise_error_on_duplicate_keys)
        if isinstance(config, dict):
            return config
        found = f"{type(config).__name__} in {source!r}"
    except (OSError, ValueError) as error:
        found = f"{source!r}: {error}"
    raise ConfigError(
        "the DeepSpeed config cannot be read",
        expected="an object, the path of a JSON file that holds one, or the text of such a file in base64",
        found=found,
    )


def _section(ds_config: dict[str, Any], key: str) -> dict[str, Any]:
    section = ds_config.setdefault(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f'"{key}" in the DeepSpeed config must be an object', expected="{...}", found=repr(section))
    return section
