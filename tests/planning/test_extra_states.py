"""Extra states by name: as torch's ``load_state_dict`` matches them, but for modules that keep nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.core.extra_states import SavedExtraState
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import ModelLayout
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFacts
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.planning.extra_states import match_extra_states, one_value_each

EMPTY = CheckpointMetadata(SourceFacts("native", "/saved", "step4", 1, 2, "0.19.8"), (), {}, {}, ())


def saved(**states: Any) -> CheckpointMetadata:
    """Of each name, whether nothing was kept, or the file of another rank with another value."""
    made = {
        name: SavedExtraState(
            "/saved/first", name, b"" if each is None else b"kept", each if isinstance(each, str) else None
        )
        for name, each in states.items()
    }
    return replace(EMPTY, extra_states=made)


def test_names_of_one_side_count_where_something_is_kept() -> None:
    live = ModelLayout(
        extra_states={"both": True, "new": True, "new_empty": False, "was_none": True},
        extra_states_elsewhere=frozenset({"elsewhere"}),
    )
    found = match_extra_states(saved(both=1, old=1, old_none=None, was_none=None, elsewhere=1), live)
    assert found.restored.keys() == {"both", "was_none"}
    assert (found.missing, found.unexpected, found.names) == ({"new"}, {"old"}, {"both"})


def test_several_values_are_refused_unless_the_first_is_to_count() -> None:
    metadata = saved(a=1, b="/saved/second")
    with pytest.raises(MismatchError) as raised:
        one_value_each(metadata, metadata.extra_states, takes_first=False)
    assert raised.value.parameters == ("b",)
    assert "/saved/first" in str(raised.value.expected) and "/saved/second" in str(raised.value.found)
    (note,) = one_value_each(metadata, metadata.extra_states, takes_first=True)
    assert note.endswith(": b")
    only_one = {"a": metadata.extra_states["a"]}
    assert one_value_each(metadata, only_one, takes_first=False) == ()


def test_renames_are_of_these_names_too() -> None:
    renamed = rename_saved(saved(**{"old.gauge._extra_state": 1}), [(r"^old\.", "new.")])
    assert list(renamed.extra_states) == ["new.gauge._extra_state"]
    assert renamed.extra_states["new.gauge._extra_state"].entry == "old.gauge._extra_state"
