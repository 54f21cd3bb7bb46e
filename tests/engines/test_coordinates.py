"""Tensor-parallel layouts that live parameters record."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

from elastic_ckpt.core.strided import fused
from elastic_ckpt.engines.coordinates import _arguments, _layout


def recorded(shape: tuple[int, ...], **record: Any) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(shape))
    setattr(param, DS_AUTOTP_UC_META, {"partition_dim": 0, "logical_shape": None, "sub_param_sizes": None, **record})
    return param


@pytest.mark.parametrize("whole", [(64, 8), (64,)])
def test_sub_parameters_of_autotp_are_cut_each_by_itself(whole: tuple[int, ...]) -> None:
    """As DeepSpeed 0.18 to 0.19.6 records them, without a map of all shards."""
    param = recorded((32, *whole[1:]), logical_shape=whole, sub_param_sizes=(32, 16, 16))
    assert _layout(param, "", 2).layout == fused(whole, 0, [[16, 16], [8, 8], [8, 8]])


@pytest.mark.parametrize(
    "record", [{}, {"logical_shape": (64, 8)}, {"logical_shape": (4, 16, 8), "sub_param_sizes": (32, 32)}]
)
def test_what_autotp_records_otherwise_is_left_to_shapes_and_rules(record: dict[str, Any]) -> None:
    assert _layout(recorded((32, 8), **record), "", 2).layout is None


def test_a_parameter_marked_by_the_older_name_alone_is_sharded_whatever_the_default_of_the_newer_one() -> None:
    """As T5's ``lm_head.bias`` is, to which Megatron's training loop gives the defaults of all parameters."""
    param = torch.nn.Parameter(torch.zeros(144))
    param.model_parallel, param.partition_dim, param.tensor_model_parallel = True, 0, False
    assert _layout(param, "megatron.model", 2).dim == 0
    param.model_parallel = False
    assert _layout(param, "megatron.model", 2).dim == -1


def test_arguments_are_those_of_the_run_where_the_module_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.global_vars", SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(heads=8)))
    engine = SimpleNamespace(module=torch.nn.Linear(1, 1))
    for args, expected in ((None, {"heads": 8}), (SimpleNamespace(heads=4), {"heads": 4})):
        engine.module.neox_args = args
        assert _arguments(engine) == expected
