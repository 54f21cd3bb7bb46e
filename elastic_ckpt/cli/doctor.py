"""``elastic-ckpt doctor``."""

from __future__ import annotations

import os
from typing import Any

from rich.markup import escape

from elastic_ckpt.cli import AsJson, app
from elastic_ckpt.cli.output import end_with, print_json, print_wide, table
from elastic_ckpt.config import VARIABLE
from elastic_ckpt.engines import versions
from elastic_ckpt.load import startup

_EXAMPLE = "Example: elastic-ckpt doctor"
_VERDICTS = {-1: "too old", 0: "tried", 1: "not tried"}
_USABLE = ("tried", "not tried")


def diagnose() -> dict[str, Any]:
    """What was found in this environment.

    ``ok``: whether ``elastic_ckpt.install()`` succeeds. ``versions``: by name, the version found, the range that was
    tried, the verdict. ``known_bugs``: of this version of DeepSpeed. ``enabled``, ``variable``: files of
    ``elastic-ckpt enable``, and the value of ``ELASTIC_CKPT``.
    """
    found: dict[str, tuple[str | None, str, str]] = {}
    for each in versions.REQUIREMENTS:
        verdict = "not installed" if each.found is None else _VERDICTS[each.compare(each.found)]
        found[each.name] = (each.found, f"{each.oldest} to {each.newest}", verdict)
    return {
        "ok": all(verdict in _USABLE for *_, verdict in found.values()),
        "versions": found,
        "known_bugs": versions.known_bugs(found["DeepSpeed"][0]),
        "enabled": startup.enabled(),
        "variable": os.environ.get(VARIABLE),
    }


@app.command("doctor", epilog=_EXAMPLE)
def doctor(as_json: AsJson = False) -> None:
    """Tell whether elastic_ckpt works with the installed versions of DeepSpeed, torch and Python.

    Exit code 1: install() would fail.
    """
    found = diagnose()
    if as_json:
        print_json(found)
        end_with(found=not found["ok"])
        return
    rows = table("Versions", "", "found", "tried", "")
    for name, (installed, tried, verdict) in found["versions"].items():
        rows.add_row(name, installed or "-", tried, verdict)
    facts = table("Environment")
    variable = found["variable"]
    lines = [
        *(("known bug", bug) for bug in found["known_bugs"]),
        ("enabled", "\n".join(map(str, found["enabled"])) or "no (elastic-ckpt enable)"),
        *([(VARIABLE, f"{variable}{', which turns it off' * (variable == '0')}")] if variable is not None else []),
    ]
    for name, text in lines:
        facts.add_row(name, escape(text))
    print_wide([rows, facts])
    end_with(found=not found["ok"])
