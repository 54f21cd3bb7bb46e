"""Command-line flags of a training script."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

from elastic_ckpt import config

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
        config.flags[_OPTIONS[self.dest]] = value


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add elastic_ckpt's flags to a training script's parser, beside ``deepspeed.add_config_arguments``.

    Parsing sets them for the whole process; they override the DeepSpeed config. A parser with its own
    ``--universal-checkpoint``, such as Megatron-DeepSpeed's, keeps it.

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
