"""Each entry of each file of DeepSpeed's, in turn, of each other value: read, or refused by an error that names the file.

Beside the draws of ``tests/distributed/test_malformed.py``, which go through whole folders, this is every place of one
file's tree that is no deeper than :data:`DEPTH`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import ElasticCkptError, UnforeseenError
from elastic_ckpt.formats.model_states import index_model_states, index_unpartitioned
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.shards import index_shard
from elastic_ckpt.formats.universal_optimizer import index_optimizer
from elastic_ckpt.formats.universal_states import index_state
from tests.attacks.seeds import TREES
from tests.distributed.malformed import WAYS, changed, places

DEPTH = 3
OPTIONS = StateOptions()
STACKED = [
    {"num_local_experts": 2, "ep_size": 2, "num_experts": 4, "expert_key_prefix": "moe.experts", "moe_layer_id": 0}
    | {"expert_placement": {"ranks": [{"rank": 0, "experts": [0, 1]}, {"rank": 1, "experts": [2, 3]}]}}
]
UNPARTITIONED = {
    "state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.ones(3, 2), "exp_avg_sq": torch.ones(3, 2)}},
    "param_groups": TREES["zero1"]["optimizer_state_dict"]["base_optimizer_state"]["param_groups"],
}
UNIVERSAL_OPTIMIZER = {
    **{
        key: value for key, value in TREES["zero1"]["optimizer_state_dict"].items() if key in ("zero_stage", "overflow")
    },
    "loss_scaler": TREES["zero1"]["optimizer_state_dict"]["loss_scaler"],
    "param_groups": UNPARTITIONED["param_groups"],
    "optimizer_state_dict": {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": UNPARTITIONED["param_groups"]},
    "elastic_ckpt_shared_states": {"count": torch.tensor(3.0)},
}
SOURCES: dict[str, tuple[Any, Callable[[PickledFile], Any]]] = {
    "model states": (TREES["model"], index_model_states),
    "stacked experts": (TREES["model"] | {"ds_autoep_layers": STACKED}, index_model_states),
    "unpartitioned": (TREES["model"] | {"optimizer": UNPARTITIONED}, lambda file: index_unpartitioned(file, OPTIONS)),
    "ZeRO-1": (TREES["zero1"], lambda file: index_shard(file, 0, OPTIONS)),
    "ZeRO-3": (TREES["zero3"], lambda file: index_shard(file, 0, OPTIONS)),
    "universal's optimizer": (UNIVERSAL_OPTIMIZER, lambda file: index_optimizer(file, OPTIONS)),
    "universal state": ({"param": torch.ones(3, 4), "cat_dim": 0}, index_state),
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_odd_entry_is_read_or_refused_in_words(source: str, tmp_path: Path) -> None:
    tree, index = SOURCES[source]
    folder = tmp_path / "weight"
    folder.mkdir()
    path = folder / "exp_avg.pt"
    depth = DEPTH + 3 * (source == "stacked experts")
    tried, problems = 0, set[str]()
    for place in places(tree):
        if len(place) > depth or (source == "stacked experts" and place[:1] != ("ds_autoep_layers",)):
            continue
        for way in WAYS:
            made = changed(tree, place, way)
            if made is ...:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.save(made, path)
            tried += 1
            try:
                index(open_pickled(str(path)))
            except UnforeseenError as error:
                problems.add(f"{place} <- {way}: {error}")
            except ElasticCkptError as error:
                if not error.file:
                    problems.add(f"{place} <- {way}: names no file: {error}")
            except Exception as error:  # what is to be found
                problems.add(f"{place} <- {way}: {type(error).__name__}: {error}")
    assert tried > len(WAYS) // 2
    assert sorted(problems) == []
