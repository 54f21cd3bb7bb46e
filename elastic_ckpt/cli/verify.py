"""``elastic-ckpt verify``."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.markup import escape

from elastic_ckpt.cli import AsJson, Config, Folder, Preset, Tag, TrustPickle, app
from elastic_ckpt.cli.output import console, end_with, error_console, errors_end_the_command, plain, print_json
from elastic_ckpt.tools.opened import config_of
from elastic_ckpt.tools.verification import verify as verify_checkpoint

_EXAMPLE = "Example: elastic-ckpt verify /ckpt --full --tp-preset megatron-core"


@app.command("verify", epilog=_EXAMPLE)
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
        options = config_of(config, tp_preset=preset, trust_pickle=trust_pickle or None)
        threads = min(os.cpu_count() or 1, 16)
        found = verify_checkpoint(str(folder), tag, options, full, threads, False if as_json else None)
    if as_json:
        listed = {
            name: [{"code": f.kind, "message": f.message, "file": f.file, "parameter": f.parameter} for f in findings]
            for name, findings in (("findings", found.findings), ("notes", found.notes))
        }
        print_json({"ok": not found.findings, **plain(found), **listed})
        end_with(found=bool(found.findings))
        return
    for note in found.notes:
        error_console.print(f"note: {escape(note.line(found.folder))}", soft_wrap=True, highlight=False)
    for finding in found.findings:
        console.print(escape(finding.line(found.folder)), soft_wrap=True, highlight=False)
    if not found.findings:
        what = "" if found.full else "metadata of "
        checked = f"{found.files} files, {found.tensors} tensors, {what}{found.nbytes:,} bytes checked"
        console.print(f"ok: {checked} in {found.seconds:.2f} s", soft_wrap=True, highlight=False)
    end_with(found=bool(found.findings))
