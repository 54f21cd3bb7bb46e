"""``elastic-ckpt doctor``."""

from __future__ import annotations

import os
from typing import Any

from rich.markup import escape

from elastic_ckpt.cli import AsJson, app
from elastic_ckpt.cli.output import end_with, print_json, print_wide, table
from elastic_ckpt.config import VARIABLE
from elastic_ckpt.engines import privates, versions
from elastic_ckpt.load import startup

_EXAMPLE = "Example: elastic-ckpt doctor"
_VERDICTS = {-1: "too old", 0: "tried", 1: "not tried"}
_USABLE = ("tried", "not tried")


def diagnose() -> dict[str, Any]:
    """What was found in this environment; imports DeepSpeed unless it is too old.

    ``ok``: whether ``elastic_ckpt.install()`` succeeds. ``versions``: by name, the version found, the range that was
    tried, the verdict. ``loads``: those tried on this release of DeepSpeed, and whether they pass. ``privates``,
    ``missing``: number of private names of DeepSpeed that it must have, and those it lacks. ``enabled``, ``variable``:
    files of ``elastic-ckpt enable``, and the value of ``ELASTIC_CKPT``.
    """
    found: dict[str, tuple[str | None, str, str]] = {}
    for each in versions.REQUIREMENTS:
        installed = each.found
        verdict = "not installed" if installed is None else _VERDICTS[each.compare(installed)]
        verdict = "not tried" if verdict == "tried" and not each.was_tried(installed or "") else verdict
        found[each.name] = (installed, f"{each.oldest} to {each.newest}", verdict)
    deepspeed, _, verdict = found["DeepSpeed"]
    needed = privates.needed() if verdict in _USABLE else []
    missing = privates.missing() if needed else []
    return {
        "ok": all(verdict in _USABLE for *_, verdict in found.values()) and not privates.missing(for_install=True),
        "versions": found,
        "loads": versions.cells_of(deepspeed) or {} if deepspeed else {},
        "privates": sum(len(each.names) for each in needed),
        "missing": missing,
        "known_bugs": versions.known_bugs(deepspeed),
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
    passed, failed = ([name for name, passes in found["loads"].items() if passes is which] for which in (True, False))
    variable = found["variable"]
    lines = [
        ("loads that pass", "; ".join(passed) or "none was tried on this release"),
        *([("loads that fail", "; ".join(failed))] if failed else []),
        ("private names", f"{found['privates'] - len(found['missing'])} of {found['privates']} found"),
        *(("missing", name) for name in found["missing"]),
        *(("known bug", bug) for bug in found["known_bugs"]),
        ("enabled", "\n".join(map(str, found["enabled"])) or "no (elastic-ckpt enable)"),
        *([(VARIABLE, f"{variable}{', which turns it off' * (variable == '0')}")] if variable is not None else []),
    ]
    for name, text in lines:
        facts.add_row(name, escape(text))
    print_wide([rows, facts])
    end_with(found=not found["ok"])
