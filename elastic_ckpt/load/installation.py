"""What a training script calls: ``install``, after a check of versions that imports nothing of DeepSpeed; flags."""

from __future__ import annotations

import argparse
import importlib
from contextlib import suppress
from functools import cache
from typing import Any

from elastic_ckpt import config
from elastic_ckpt.engines import versions

_FLAG = "--universal-checkpoint"
#: A common misspelling, which a script that parses only known arguments would silently ignore.
_WRONG_FLAG = "--universal_checkpoint"


def install() -> None:
    """Make every DeepSpeed engine of this process load checkpoints of any topology.

    Call it once, before or after ``deepspeed.initialize`` (before it, if ``"align_partitions"`` is set); idempotent.
    ``PipelineEngine`` inherits the patched method. Of versions that were not tried, it warns.

    Raises:
        UnsupportedError: torch, DeepSpeed or Python is too old, or an untried DeepSpeed lacks a name that is patched.
    """
    _check_versions()
    _hook().patch_engine()


def uninstall() -> None:
    """Undo :func:`install`, unless another wrapper is around the patch."""
    _hook().unpatch_engine()


def _hook() -> Any:
    importlib.import_module("deepspeed")  # may itself install: see elastic_ckpt.load.startup
    return importlib.import_module("elastic_ckpt.load.hook")


@cache
def _check_versions() -> None:
    versions.refuse_older()
    versions.warn_of_newer()


class _SetFlag(argparse.Action):
    """Stores the value in the namespace, and for every engine of this process."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, given: str | None = None
    ) -> None:
        if given == _WRONG_FLAG:
            parser.error(f"unknown argument {given}: did you mean {_FLAG}?")
        value = self.const if self.nargs == 0 else values
        setattr(namespace, self.dest, value)
        config.flags["mode" if self.nargs else "trust_pickle"] = value


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
        group.add_argument(_WRONG_FLAG, action=_SetFlag, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    group.add_argument(
        "--elastic-trust-pickle",
        action=_SetFlag,
        nargs=0,
        const=True,
        default=False,
        help="let checkpoint files run code while they are read; only for files you trust",
    )
    return parser
