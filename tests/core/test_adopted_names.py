"""Names of one checkpoint as another side has them, where wrappers alone tell them apart."""

from __future__ import annotations

from dataclasses import replace

from elastic_ckpt.core.adopted_names import adopt_names, all_names
from elastic_ckpt.core.extra_states import SavedExtraState
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFacts, TensorMetadata

EMPTY = CheckpointMetadata(SourceFacts("native", "/saved", "step4", 1, 2, "0.19.8"), (), {}, {}, ())


def saved(*names: str, ties: dict[str, str] | None = None) -> CheckpointMetadata:
    tensors = {(name, "fp32"): TensorMetadata(name, "fp32", (2,), "float32", ()) for name in names}
    extra = {"_orig_mod.a._extra_state": SavedExtraState("/saved/file", "a._extra_state", b"kept")}
    return replace(EMPTY, tensors=tensors, aliases=ties or {}, extra_states=extra)


def test_names_of_all_kinds_are_those_of_the_other_side() -> None:
    metadata = saved("_orig_mod.a.weight", "b", ties={"_orig_mod.c": "_orig_mod.a.weight"})
    assert all_names(metadata) == {"_orig_mod.a.weight", "b", "_orig_mod.c", "_orig_mod.a._extra_state"}
    named = adopt_names(metadata, {"a.weight", "b", "c", "a._extra_state"}, "in A")
    assert all_names(named) == {"a.weight", "b", "c", "a._extra_state"}
    assert named.aliases == {"c": "a.weight"}
    assert named.notes == (
        "wrapped otherwise: 3 names of the checkpoint, as _orig_mod.a._extra_state, which is a._extra_state in A",
    )


def test_names_that_agree_stay_without_a_note() -> None:
    metadata = saved("a.weight")
    assert adopt_names(metadata, {"a.weight"}) is metadata
