"""One line a file on the terminal: how many of its tests passed, and how long they took, also where workers share them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

NAME = "one line a file"


@dataclass
class _File:
    waiting: set[str] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def line(self, name: str) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"{name:<60} {self.seconds:6.1f} s  {counts}"


class LinePerFile:
    """Takes the place of pytest's dots; failures and the summary at the end stay pytest's own.

    Args:
        terminal: pytest's reporter.
    """

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._files: dict[str, _File] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What runs in this process."""
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """What runs in workers; each collects everything."""
        self._expect(ids)

    def _expect(self, ids: list[str]) -> None:
        for nodeid in ids:
            self._files.setdefault(nodeid.partition("::")[0], _File()).waiting.add(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count it; print the file's line behind its last test."""
        name = report.nodeid.partition("::")[0]
        file = self._files.setdefault(name, _File())
        file.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            file.outcomes[report.outcome] += 1
        if report.when == "teardown":
            file.waiting.discard(report.nodeid)
            if not file.waiting:
                self._terminal.write_line(file.line(name), red="failed" in file.outcomes)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> object:
        """No letter for each test."""
        category, _, word = yield
        return category, "", word
