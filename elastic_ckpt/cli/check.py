"""``elastic-ckpt verify`` and ``elastic-ckpt latest``: whether checkpoints are whole."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from elastic_ckpt.cli.output import EXIT_FOUND, Answer, Folder, Tag, plain, reads_checkpoint
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.latest import newest_whole
from elastic_ckpt.tools.verification import verify as verify_checkpoint


@reads_checkpoint("verify", epilog="Example: elastic-ckpt verify /ckpt --full --tp-preset megatron-core")
def verify(
    config: ElasticConfig,
    folder: Folder,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Read every byte: CRC32 of all tensors, NaN and infinite values, copies that have drifted apart.",
        ),
    ] = False,
    tag: Tag = None,
) -> Answer:
    """Look for missing, mixed and damaged files, and list what is wrong, one line each.

    Without --full, metadata alone: does every file open, are all there and of one save, is every element in just one?

    Ends with 1 if anything is wrong. Notes, of what was not checked or is worth knowing, go to standard error.
    """
    found = verify_checkpoint(str(folder), tag, config, full, threads=min(os.cpu_count() or 1, 16), show_progress=None)
    listed = {
        name: [{"code": f.kind, "message": f.message, "file": f.file, "parameter": f.parameter} for f in findings]
        for name, findings in (("findings", found.findings), ("notes", found.notes))
    }
    checked = f"{found.files} files, {found.tensors} tensors, {'' if full else 'metadata of '}{found.nbytes:,} bytes"
    lines = [finding.line(found.folder) for finding in found.findings]
    return Answer(
        {"ok": not found.findings, **plain(found), **listed},
        lines or [f"ok: {checked} checked in {found.seconds:.2f} s"],
        [f"note: {note.line(found.folder)}" for note in found.notes],
        exit_code=EXIT_FOUND if found.findings else 0,
    )


@reads_checkpoint("latest", epilog="Example: [bold]deepspeed train.py --resume $(elastic-ckpt latest /ckpt)[/]")
def latest(
    config: ElasticConfig,
    folder: Folder,
    full: Annotated[bool, typer.Option("--full", help="Compare every byte with its checksum.")] = False,
) -> Answer:
    """Print the path of the newest whole checkpoint of a folder, whatever its latest file says.

    Folders of tags, and those of Hugging Face's Trainer (checkpoint-20), Accelerate and Lightning. Newer ones that are
    not whole go to standard error, with the reason. Ends with 1 if none is whole.
    """
    newest, skipped = newest_whole(str(folder), config, full)
    notes, path = [f"not whole: {each.path}: {each.problem}" for each in skipped], newest.path if newest else ""
    if not path.isprintable():
        notes, path = [*notes, f"{path}: its name has control characters: rename it"], ""
    return Answer({"newest": newest, "skipped": skipped}, [path] if path else [], notes, EXIT_FOUND if not path else 0)
