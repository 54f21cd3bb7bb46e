"""``elastic-ckpt doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from rich.markup import escape

from elastic_ckpt.cli import AsJson, app
from elastic_ckpt.cli.output import end_with, print_json, print_wide, table
from elastic_ckpt.engines import privates, versions

_EXAMPLE = "Example: elastic-ckpt doctor"
_VERDICTS = {-1: "too old", 0: "supported", 1: "not tried"}


@dataclass(frozen=True)
class Diagnosis:
    """What was found in this environment.

    Attributes:
        versions: by name, the version found, if any; the supported range; the verdict.
        privates, missing: number of private names of DeepSpeed that this version must have, and those it lacks.
        known_bugs: of this version of DeepSpeed.
    """

    versions: dict[str, tuple[str | None, str, str]]
    privates: int
    missing: tuple[str, ...]
    known_bugs: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether ``elastic_ckpt.install()`` succeeds."""
        return not self.missing and all(verdict in ("supported", "not tried") for *_, verdict in self.versions.values())


def diagnose() -> Diagnosis:
    """Look at the installed versions; imports DeepSpeed unless it is too old."""
    found = {}
    for each in versions.REQUIREMENTS:
        installed = each.found
        verdict = "not installed" if installed is None else _VERDICTS[each.compare(installed)]
        found[each.name] = (installed, f"{each.oldest} to {each.newest}", verdict)
    deepspeed, _, verdict = found["DeepSpeed"]
    usable = verdict in ("supported", "not tried")
    return Diagnosis(
        versions=found,
        privates=sum(len(each.names) for each in privates.needed()) if usable else 0,
        missing=tuple(privates.missing()) if usable else (),
        known_bugs=tuple(versions.known_bugs(deepspeed)),
    )


@app.command("doctor", epilog=_EXAMPLE)
def doctor(as_json: AsJson = False) -> None:
    """Tell whether elastic_ckpt works with the installed versions of DeepSpeed, torch and Python.

    Exit code 1: install() would fail.
    """
    found = diagnose()
    if as_json:
        print_json({"ok": found.ok, **vars(found)})
        end_with(found=not found.ok)
        return
    rows = table("Versions", "", "found", "tried", "")
    for name, (installed, tried, verdict) in found.versions.items():
        rows.add_row(name, installed or "-", tried, verdict)
    facts = table("DeepSpeed")
    facts.add_row("private names", f"{found.privates - len(found.missing)} of {found.privates} found")
    for name in found.missing:
        facts.add_row("missing", escape(name))
    for bug in found.known_bugs:
        facts.add_row("known bug", escape(bug))
    print_wide([rows, facts])
    end_with(found=not found.ok)
