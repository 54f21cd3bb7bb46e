"""What people change between two runs: a fixed list; :mod:`tests.drawn` draws more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.changes.draw import Change, Script
from tests.changes.table import Table
from tests.distributed.change_jobs import REFUSED, REMEDIED, RIGHT


def changed(what: str, ranks: int = 2, saved: Script | None = None, **loads: object) -> tuple[Change, str]:
    """A script with a few other choices, and what becomes of it."""
    saves = saved or Script()
    return Change(saves, Script(**{**vars(saves), **loads}), 2, ranks), what  # type: ignore[arg-type]


DOUBLE = Script(stage=0, quantized="double")
LORA = Script(frozen="base", adapter="default")
TWO_RATES = Script(stage=2, groups="decay", scheduler="lambda")
AT_TWO_RANKS = [
    changed(RIGHT, saved=DOUBLE, wrapper="peft"),  # what describes the base was taken for another's
    changed(RIGHT, saved=Script(stage=2, wrapper="module", quantized="eight"), wrapper="none"),
    changed(RIGHT, saved=TWO_RATES, groups="reversed"),
    changed(RIGHT, saved=TWO_RATES, groups="split"),
    changed(REMEDIED, saved=TWO_RATES, groups="one"),
    changed(REMEDIED, saved=Script(tied=True), tied=False),
    changed(REMEDIED, saved=Script(), tied=True),
    changed(RIGHT, saved=LORA, wrapper="checkpointed"),
    changed(REMEDIED, saved=LORA, adapter="both"),
    changed(RIGHT, saved=Script(stage=0, precision="bf16", stages=2), stages=1),
    changed(RIGHT, saved=Script(stages=1), stages=2),
]
AT_THREE_RANKS = [
    changed(RIGHT, 3, saved=Script(stage=2, wrapper="module", quantized="four"), wrapper="peft"),
    changed(RIGHT, 3, saved=Script(stage=3, precision="bf16", wrapper="compiled"), stage=1),
    changed(RIGHT, 3, saved=TWO_RATES, stage=3, groups="split"),
    changed(RIGHT, 3, saved=Script(stage=1, scheduler="held", groups="decay"), groups="split"),
    changed(REMEDIED, 3, saved=Script(stage=3), more="module"),
    changed(REMEDIED, 3, saved=Script(stage=2, groups="decay"), names="other"),
    changed(REMEDIED, 3, saved=Script(stage=1), rows=40),
    changed(REMEDIED, 3, saved=Script(stage=1), optimizer="sgd"),
    changed(REFUSED, 3, saved=Script(stage=2), adapter="wide", wrapper="module", scheduler="cosine"),
]


def found(table: Sequence[tuple[Change, str]], extensions_dir: str, **options: bool) -> list[str]:
    """What became of each, or what is wrong."""
    outcomes = Table(**options).run([change for change, _ in table], extensions_dir)
    return [outcome.wrong or min(outcome.counted, key=len) for outcome in outcomes]


@pytest.mark.parametrize("table", [AT_TWO_RANKS, AT_THREE_RANKS], ids=["two ranks", "three ranks"])
def test_what_another_script_loads_is_right_by_names_or_refused_with_a_remedy_that_holds(
    table: list[tuple[Change, str]], extensions_dir: str
) -> None:
    assert found(table, extensions_dir) == [what for _, what in table]


def test_what_is_not_as_saved_is_seen(extensions_dir: str) -> None:
    right = [each for each in AT_TWO_RANKS if each[1] == RIGHT][:3]
    assert all("is not as saved" in words for words in found(right, extensions_dir, spoils=True))
