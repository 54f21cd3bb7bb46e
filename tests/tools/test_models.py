"""Models that nobody has to have: their published sizes, and their shards by their own preset."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.models import ModelName, model_metadata
from elastic_ckpt.tools.virtual import Topology, VirtualJob

#: Llama-2-70B's, and those of benchmarks/models/104b.json.
NUMELS = {"70b": 68_976_648_192, "104b": 103_950_090_240}


@pytest.mark.parametrize("name", get_args(ModelName))
def test_a_model_has_its_parameters_and_each_rank_its_share(name: ModelName) -> None:
    metadata = model_metadata(name)
    assert sum(math.prod(saved.shape) for saved in metadata.parameters.values()) == NUMELS[name]
    assert sum(file.nbytes for file in metadata.files) == 12 * NUMELS[name]
    job = VirtualJob(metadata, Topology(8, 8, 4, 1), LoadOptions.of(ElasticConfig()))
    (note,) = (each for each in job.planned(100)[1].notes if "preset" in each)
    assert '"megatron-deepspeed-interleaved"' in note
    whole = {
        each for each in metadata.parameters if job.layouts[each].shapes[0] == metadata.tensors[each, MASTER].shape
    }
    assert whole == {
        each for each in whole if "norm" in each or each.endswith(("dense.bias", "4h_to_h.bias")) or "position" in each
        or each.split(".")[0] in ("34", "82")
    }  # fmt: skip
    assert "5.mlp.dense_h_to_4h.weight" not in whole and "5.self_attention.query_key_value.weight" not in whole
