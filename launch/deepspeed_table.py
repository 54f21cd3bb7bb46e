"""Which of DeepSpeed's own tests pass without elastic_ckpt, and of these with it: a table in docs/compatibility.md."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

BEGIN, END = "<!-- written by launch/deepspeed_tests.sh -->\n", "<!-- end of DeepSpeed's tests -->\n"
#: Tests of what elastic_ckpt does otherwise on purpose, and what that is.
INTENDED = {
    "test_elastic_checkpoint_change_dp": "expects DeepSpeed's refusal of another data-parallel degree, which loads",
}


def outcomes(path: Path) -> dict[str, str]:
    """``passed``, ``failed`` or ``skipped``, by test."""
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def reason_of(test: str) -> str | None:
    """Why a test is meant to fail with elastic_ckpt."""
    return next((reason for name, reason in INTENDED.items() if name in test), None)


def table(without: dict[str, str], with_elastic: dict[str, str]) -> tuple[str, list[str]]:
    """The table, and the tests that elastic_ckpt breaks. Tests that ran only once do not count."""
    passing = [test for test, outcome in without.items() if outcome == "passed" and test in with_elastic]
    failing = [test for test in passing if with_elastic[test] != "passed"]
    broken = [test for test in failing if reason_of(test) is None]
    ran, failed, wrong = (
        Counter(Path(test.partition("::")[0]).name for test in each) for each in (passing, failing, broken)
    )
    lines = [
        "| file | pass without elastic_ckpt | of these, fail with it on purpose | are broken by it |",
        "| --- " * 4 + "|",
    ]
    lines += [f"| {name} | {ran[name]} | {failed[name] - wrong[name]} | {wrong[name]} |" for name in sorted(ran)]
    return "".join(f"{line}\n" for line in lines), broken


def main(without: Path, with_elastic: Path, page: Path) -> int:
    """Replace the table in ``page``; 1 if elastic_ckpt breaks a test."""
    text, broken = table(outcomes(without), outcomes(with_elastic))
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")
    print("\n".join([text, *broken]))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
