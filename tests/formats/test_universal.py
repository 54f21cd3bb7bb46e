"""Parameters of universal checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.grid import Grid
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.universal import _parameters, _refuse_unlisted
from elastic_ckpt.formats.universal_files import StateFile
from tests.formats.test_grid import model


def test_without_an_optimizer_file_only_parameters_with_states_have_a_step() -> None:
    shard = replace(model(["trained", "idle"]), counters={"global_steps": 5, "skipped_steps": 1})
    ref = TensorRef("float32", (1,), (1,), 64)
    named = [("trained", MASTER), ("trained", "exp_avg"), ("idle", MASTER)]
    states = {at: StateFile(at[1], 99, ref, None) for at in named}
    found = _parameters([shard], None, states, Grid(((0,),)))
    assert {name: saved.scalars for name, saved in found.items()} == {"trained": (("step", 4.0),), "idle": ()}


def test_states_that_no_model_states_file_lists_are_refused_and_buffers_are_not() -> None:
    ref = TensorRef("float32", (1,), (1,), 64)
    named = [("trained", MASTER), ("trained", "exp_avg"), ("a buffer", MASTER)]
    states = {at: StateFile(at[1], 99, ref, None) for at in named}
    _refuse_unlisted(model(["trained"]), states, {"trained"})
    with pytest.raises(DamagedError, match="do not list all parameters"):
        _refuse_unlisted(model([]), states, set())
