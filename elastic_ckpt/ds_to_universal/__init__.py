"""A drop-in for ``deepspeed.checkpoint.ds_to_universal``, which controllers call between two topologies.

    python -m elastic_ckpt.ds_to_universal --input_folder run/step100 --output_folder run/step100_universal

It checks the checkpoint, which a job loads as it is, and makes the output folder a link to it. ``--really`` converts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_ckpt.config import read_config
from elastic_ckpt.core.text import counted, printable
from elastic_ckpt.errors import DamagedError, UnsupportedError, printable_errors
from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.inspection import UNCHECKED
from elastic_ckpt.tools.opened import locate, open_checkpoint
from elastic_ckpt.tools.verification import verify

_IGNORED = "accepted for compatibility, and ignored"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of DeepSpeed's converter, and ``--really``."""
    parser = argparse.ArgumentParser(
        prog="python -m elastic_ckpt.ds_to_universal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input_folder", required=True, help="folder of a tag")
    parser.add_argument("--output_folder", required=True, help="folder to create")
    parser.add_argument("--num_extract_workers", type=int, default=4, help=_IGNORED)
    parser.add_argument("--num_merge_workers", type=int, default=2, help="with --really: tensors in memory at a time")
    parser.add_argument("--keep_temp_folder", action="store_true", help=_IGNORED)
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="do not check the checkpoint")
    parser.add_argument("--inject_missing_state", action="store_true", help=_IGNORED)
    parser.add_argument("--really", action="store_true", help="convert, for jobs that run without elastic_ckpt")
    return parser.parse_args(words)


@printable_errors()
def main(args: Any) -> None:
    """Check a checkpoint and link it, or convert it; ``args`` are DeepSpeed's, ``really`` may be missing.

    Raises :class:`ElasticCkptError` if the checkpoint is not whole, or cannot be converted.
    """
    config = read_config({})
    target = Path(os.path.abspath(args.output_folder))
    found = locate(args.input_folder, None)
    if args.strict and (findings := verify(found.folder, None, config).problems):
        others = len(findings) - 1
        more = f" (and {counted(others, 'more finding')}: elastic-ckpt verify)" if others else ""
        first = findings[0]
        if first.level == UNCHECKED:
            problem = f"the checkpoint could not be checked: {first.text}{more}"
            raise UnsupportedError(problem, first.file or found.folder, first.expected, first.found)
        raise DamagedError(f"the checkpoint is not complete: {first.text}{more}", first.file or found.folder)
    with suppress(OSError):  # unless it is an empty folder, as some controllers make it
        target.rmdir()
    if getattr(args, "really", False):
        report = convert(open_checkpoint(found, config), target, args.num_merge_workers)
        for line in (f"converted to {target}: {counted(report.tensors, 'tensor')}", *report.notes):
            print(printable(line))
        return
    linked = f"it exists already, and stays as it is: {target}"
    if not os.path.lexists(target):  # asks the system: a link to what was written
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(os.path.relpath(found.folder, target.parent), target_is_directory=True)
        linked = f"a link to what is loaded, which must stay: {target} -> {found.folder}"
    print(printable(f"nothing needs converting: with elastic_ckpt, jobs of other topologies load {found.folder}"))
    print(printable(linked))
