"""Partitions of whole quantization blocks: what is wrapped, the padding, and what is refused. Training is in ``test_optimizers.py``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from elastic_ckpt.errors import ConfigError
from elastic_ckpt.patches import aligned_partitions as patch

ASKS = SimpleNamespace(_param_dict={"elastic_checkpoint": {"align_partitions": 8}})


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    patch.unwatch_alignment()
    yield
    patch.unwatch_alignment()


def test_each_private_is_wrapped_once_and_comes_back() -> None:
    before = [vars(owner)[name] for owner, name, _ in patch._wrapped()]
    patch.watch_alignment()
    patch.align_engine(SimpleNamespace(_param_dict={"elastic_checkpoint": {"mode": "auto"}}))
    assert [vars(owner)[name] for owner, name, _ in patch._wrapped()] == before
    patch.align_engine(ASKS)
    wrapped = [vars(owner)[name] for owner, name, _ in patch._wrapped()]
    assert not any(one is other for one, other in zip(before, wrapped, strict=True))
    patch.align_engine(ASKS)
    assert [vars(owner)[name] for owner, name, _ in patch._wrapped()] == wrapped
    patch.unwatch_alignment()
    assert [vars(owner)[name] for owner, name, _ in patch._wrapped()] == before


@pytest.mark.parametrize(("numel", "world_size", "padding"), [(10, 2, 6), (16, 2, 0), (17, 3, 7), (0, 2, 0)])
def test_a_parameter_is_padded_to_whole_blocks_on_every_rank(
    numel: int, world_size: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch.align_engine(ASKS)
    init = Init.__new__(Init)
    monkeypatch.setattr(comm, "get_world_size", lambda group=None: world_size)
    setattr(init, patch._ATTRIBUTE, 8)
    param = SimpleNamespace(ds_numel=numel, ds_persist=False, ds_process_group=None)
    assert init._padding_size(param) == padding
    setattr(init, patch._ATTRIBUTE, 0)
    assert init._padding_size(param) == -numel % world_size  # DeepSpeed's own


@pytest.mark.parametrize(("numel", "multiple"), [(0, 4), (8, 16), (5, 20)])
def test_a_flat_buffer_is_padded_to_whole_blocks_on_every_rank(numel: int, multiple: int) -> None:
    """DeepSpeed asks for two elements of each of two ranks."""
    patch.align_engine(ASKS)
    asked: list[int] = []
    optimizer = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    with patch._aligned_to(numel):
        patch._flatten(lambda self, tensors, alignment: asked.append(alignment), optimizer, [], 4)
    assert asked == [multiple]


@pytest.mark.parametrize(
    ("stage", "option"),
    [(1, "round_robin_gradients"), (3, "zero_quantized_weights"), (3, "zero_hpz_partition_size")],
)
def test_options_that_partition_by_other_code_are_refused_by_name(stage: int, option: str) -> None:
    names = ("round_robin_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights")
    names += ("zero_quantized_gradients", "use_all_reduce_for_fetch_params")
    values = {**dict.fromkeys(names, False), "reduce_scatter": True, "zero_hpz_partition_size": 1}
    zero = SimpleNamespace(**{**values, option: 2})
    engine = SimpleNamespace(_config=SimpleNamespace(zero_config=zero), zero_optimization_stage=lambda: stage)
    with pytest.raises(ConfigError, match=option):
        patch._refuse_other_paths(engine, 8)
