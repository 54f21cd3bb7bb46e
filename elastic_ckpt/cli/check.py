"""``elastic-ckpt verify`` and ``elastic-ckpt latest``: whether checkpoints are whole."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from elastic_ckpt.cli import AsJson, Config, Folder, Preset, Tag, TrustPickle, app
from elastic_ckpt.cli.output import end_with, error_console, errors_end_the_command, plain, print_json, print_line
from elastic_ckpt.tools.latest import newest_whole
from elastic_ckpt.tools.opened import config_of
from elastic_ckpt.tools.verification import verify as verify_checkpoint


@app.command("verify", epilog="Example: elastic-ckpt verify /ckpt --full --tp-preset megatron-core")
def verify(
    folder: Folder,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Read every byte: CRC32 of all tensors, NaN and infinite values, copies that have drifted apart.",
        ),
    ] = False,
    tag: Tag = None,
    config: Config = None,
    preset: Preset = None,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Look for missing, mixed and damaged files, and list what is wrong, one line each.

    Without --full, metadata alone: does every file open, are all there and of one save, is every element in just one?

    Ends with 1 if anything is wrong. Notes, of what was not checked or is worth knowing, go to standard error.
    """
    with errors_end_the_command(as_json):
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle)
        threads = min(os.cpu_count() or 1, 16)
        found = verify_checkpoint(str(folder), tag, options, full, threads, False if as_json else None)
    if as_json:
        listed = {
            name: [{"code": f.kind, "message": f.message, "file": f.file, "parameter": f.parameter} for f in findings]
            for name, findings in (("findings", found.findings), ("notes", found.notes))
        }
        print_json({"ok": not found.findings, **plain(found), **listed})
    else:
        for note in found.notes:
            print_line(f"note: {note.line(found.folder)}", error_console)
        for finding in found.findings:
            print_line(finding.line(found.folder))
        if not found.findings:
            checked = f"{found.files} files, {found.tensors} tensors, {'' if found.full else 'metadata of '}"
            print_line(f"ok: {checked}{found.nbytes:,} bytes checked in {found.seconds:.2f} s")
    end_with(found=bool(found.findings))


@app.command("latest", epilog="Example: [bold]deepspeed train.py --resume $(elastic-ckpt latest /ckpt)[/]")
def latest(
    folder: Folder,
    full: Annotated[bool, typer.Option("--full", help="Compare every byte with its checksum.")] = False,
    config: Config = None,
    trust_pickle: TrustPickle = False,
    as_json: AsJson = False,
) -> None:
    """Print the path of the newest whole checkpoint of a folder, whatever its latest file says.

    Folders of tags, and those of Hugging Face's Trainer (checkpoint-20), Accelerate and Lightning. Newer ones that are
    not whole go to standard error, with the reason. Ends with 1 if none is whole.
    """
    with errors_end_the_command(as_json):
        newest, skipped = newest_whole(str(folder), config_of(config, trust_pickle=trust_pickle), full)
    is_printable = newest is not None and newest.path.isprintable()
    if as_json:
        print_json({"newest": newest, "skipped": skipped})
    else:
        for each in skipped:
            print_line(f"not whole: {each.path}: {each.problem}", error_console)
        if newest is not None and is_printable:
            print_line(newest.path)
        elif newest is not None:
            print_line(f"{newest.path}: its name has control characters: rename it, or take --json", error_console)
    end_with(found=newest is None or not (is_printable or as_json))
