"""What DeepSpeed's own loader is not left: members in another order, and files of two saves on two ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.engines.training_state import LoadArguments
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.load import fallback
from elastic_ckpt.load.flow import LoadCall


class Pair(torch.nn.Module):
    """Two parameters of one shape, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(2, 3))
        self.c = torch.nn.Parameter(torch.zeros(5))


def same_members(saved: dict[str, Any], live: str, shapes: list[tuple[int, ...]]) -> bool:
    model = Pair()
    engine = SimpleNamespace(module=model, param_names={param: name for name, param in model.named_parameters()})
    states = {number: {"exp_avg": TensorRef("float32", shape, shape, 0)} for number, shape in enumerate(shapes)}
    file = PickledFile("/x", 0, {"optimizer": {"state": states}})
    return fallback._same_members(engine, file, saved, [getattr(model, name) for name in live])


@pytest.mark.parametrize(
    ("names", "live", "shapes", "same"),
    [
        (["a", "b"], "ab", [(2, 3), (2, 3)], True),
        (["a", "b"], "ba", [(2, 3), (2, 3)], False),
        (None, "ab", [(2, 3), (2, 3)], True),
        (None, "ba", [(2, 3), (2, 3)], False),  # not in the order of the module, as the save presumably was
        (None, "ac", [(2, 3), (2, 3)], False),
        (None, "ac", [(2, 3), (5,)], True),
    ],
)
def test_without_zero_states_are_given_by_position_to_the_same_members_alone(
    names: list[str] | None, live: str, shapes: list[tuple[int, ...]], same: bool
) -> None:
    saved = {"params": list(range(len(live))), **({"param_names": names} if names else {})}
    assert same_members(saved, live, shapes) == same


@pytest.mark.parametrize(("other", "right"), [((20, "0.19.8"), True), ((10, "0.19.8"), False), (None, False)])
def test_each_model_parallel_ranks_files_must_be_of_the_same_save(
    monkeypatch: pytest.MonkeyPatch, other: Any, right: bool
) -> None:
    files = sort_names(["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"], is_universal=False)
    found: Any = SimpleNamespace(files=files, by_rank=True)
    call = LoadCall(None, LoadArguments("/x"), ElasticConfig())
    one_save = lambda check_steps: (20, "0.19.8")  # noqa: E731
    fitting = SimpleNamespace(fits=lambda: True, weights_alone=False, one_save=one_save)
    monkeypatch.setattr(fallback, "_Comparison", lambda *_: fitting)
    monkeypatch.setattr(fallback.distributed, "all_gather", lambda doing, work: [work(), other])
    assert fallback.deepspeed_loads_it_right(call, found, check_steps=False) == right


@pytest.mark.parametrize(
    ("stage", "step", "scaled", "mixed"),
    [
        (3, 7, None, False),
        (3, 8, None, True),
        (1, 6, None, True),
        (1, 3, None, False),
        (3, 3, None, True),
        (3, 8, 7, False),
        (1, 7, 6, True),
    ],
)
def test_counters_and_states_of_two_saves_are_not_left_to_it(
    stage: int, step: int, scaled: int | None, mixed: bool
) -> None:
    comparison = object.__new__(fallback._Comparison)
    comparison.stage, comparison.with_states = stage, True
    scaler = None if scaled is None else SimpleNamespace(dynamic=True, cur_iter=scaled)
    state = {"base_optimizer_state": {"state": {0: {"step": step}}}, "loss_scaler": scaler}
    model = PickledFile("/x", 0, {"global_steps": 7, "skipped_steps": 0, "ds_version": "0.19.8"})
    assert comparison._is_mixed(model, [PickledFile("/y", 0, {"optimizer_state_dict": state})]) == mixed
