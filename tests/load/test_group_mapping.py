"""What live param groups consist of, for schedulers that ``load_checkpoint`` does not restore."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from elastic_ckpt.errors import MismatchError
from elastic_ckpt.load.group_mapping import GroupMapping
from tests.schedulers import plan_of

STATE: dict[str, Any] = {"base_lrs": [0.1, 0.2], "_last_lr": [0.01, 0.02], "last_epoch": 4}


@pytest.mark.parametrize(
    ("sources", "is_other", "expected"),
    [
        ([0, 1], False, [0.1, 0.2]),
        ([1, 0], True, [0.2, 0.1]),
        ([0, 1, 1], True, [0.1, 0.2, 0.2]),
        ([1], True, [0.2]),
        ([1, None], True, [0.2, 0.4]),
    ],
)
def test_lists_are_put_in_the_order_of_the_live_groups(
    sources: list[int | None], is_other: bool, expected: list[float]
) -> None:
    mapping = GroupMapping.of(plan_of(sources, 2))
    assert mapping.is_other == mapping.concerns(STATE) == is_other
    mapping.check(STATE)
    own = [0.3, 0.4, 0.5][: len(sources)]
    fitted = mapping.fit(STATE, {"base_lrs": own, "_last_lr": own})
    assert fitted["base_lrs"] == expected and fitted["last_epoch"] == 4
    assert STATE["base_lrs"] == [0.1, 0.2]


def test_a_state_of_as_many_entries_as_there_are_live_groups_is_left() -> None:
    mapping = GroupMapping.of(plan_of([0, 1, None], 2))
    assert not mapping.concerns({"base_lrs": [1, 2, 3]}) and mapping.concerns({"base_lrs": [1, 2]})


@pytest.mark.parametrize("state", [{"mine": [1, 2]}, {"base_lrs": [1.0, 2.0, 3.0]}])
def test_what_has_no_known_order_is_refused_without_an_argument_of_load_checkpoint(state: dict[str, Any]) -> None:
    mapping = GroupMapping.of(plan_of([1, 0], 2))
    for refuse in (mapping.check, lambda state: mapping.fit(state, {})):
        with pytest.raises(MismatchError, match="rebuilt") as caught:
            refuse(state)
        assert "as they were saved" in str(caught.value.remedy) and not any(
            each.is_data for each in caught.value.remedies
        )


@pytest.mark.parametrize(
    ("sources", "keeps_live", "groups"),
    [([(0, 1), (2,)], True, "0"), ([(0,), (1, 2)], True, "1"), ([(0,), (1,)], True, ""), ([(0, 1)], False, "")],
)
def test_groups_that_were_several_are_said_to_keep_their_live_values(
    sources: list[tuple[int, ...]], keeps_live: bool, groups: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    GroupMapping(sources, 3, [None] * len(sources), True, keeps_live).say_what_is_kept()
    said = [record.getMessage() for record in caplog.records if "keep their live values" in record.getMessage()]
    assert [text.partition("param groups ")[2].split(" ")[0] for text in said] == ([groups] if groups else [])
