"""``zero/optimizer_state.pt``: its numbers are judged as those of other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.values import LeftInFile
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.universal_optimizer import OptimizerFile, index_optimizer
from elastic_ckpt.tools.comparison import compare, open_both
from tests.formats.universal_folders import written

HUGE = 10**400


def _read(folder: Path, states: dict[str, Any], options: StateOptions = StateOptions(), **group: Any) -> OptimizerFile:  # noqa: B008
    """What is read of a file from stage 3, whose flat tensor has these states."""
    groups = [{"lr": 0.1, "params": [0], **group}]
    tree = {"zero_stage": 3, "param_groups": groups, "optimizer_state_dict": {"state": {0: states}}}
    torch.save(tree, folder / "optimizer_state.pt")
    return index_optimizer(open_pickled(str(folder / "optimizer_state.pt")), options)


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7), torch.tensor(7.0)])
def test_the_step_of_a_flat_tensor_is_a_number(step: Any, tmp_path: Path) -> None:
    assert _read(tmp_path, {"step": step, "beta": torch.tensor(0.5)}).scalars == {0: {"step": 7, "beta": 0.5}}


@pytest.mark.parametrize(
    "step",
    [True, -1, 1 << 70, HUGE, float("nan"), float("inf"), "7", None, [7], {"a": 7}, 7j, torch.tensor(float("nan"))],
)
def test_what_counts_no_steps_is_damage(step: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError) as caught:
        _read(tmp_path, {"step": step})
    assert caught.value.file == str(tmp_path / "optimizer_state.pt") and "step" in str(caught.value.expected)
    without = StateOptions(are_restored=False)
    assert _read(tmp_path, {"step": step}, without).groups[0]["lr"] == 0.1


@pytest.mark.parametrize("value", ["text", [7], {"a": 7}, 7j])
def test_a_state_that_is_no_number_is_damage_unless_the_user_says_what_it_is(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="not what DeepSpeed writes"):
        _read(tmp_path, {"own": value})
    declared = StateOptions(schema={"own": "fresh"})
    assert _read(tmp_path, {"own": value}, declared).scalars == {0: {}}


@pytest.mark.parametrize("key", ["lr", "initial_lr", "eps", "weight_decay", "betas", "amsgrad"])
@pytest.mark.parametrize("number", [1 << 70, -HUGE])
def test_a_hyperparameter_beyond_64_bits_is_damage(key: str, number: int, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="not what DeepSpeed writes"):
        _read(tmp_path, {"step": 7}, **{key: (0.9, number) if key == "betas" else number})


@pytest.mark.parametrize("value", [HUGE, [1, (HUGE,)], {"a": -HUGE}])
def test_one_of_another_optimizer_is_left_in_the_file(value: Any, tmp_path: Path) -> None:
    """``diff`` compares it with others."""
    (group,) = _read(tmp_path, {"step": 7}, own=value).groups
    assert isinstance(group["own"], LeftInFile) and "bits" in str(group["own"])
    for name, own in (("a", 0.5), ("b", value)):
        (tmp_path / name).mkdir()
        zero = written(tmp_path / name)
        torch.save(
            {"zero_stage": 1, "param_groups": [{"lr": 0.1, "params": [0], "own": own}]}, zero / "optimizer_state.pt"
        )
    left, right, without = open_both(str(tmp_path / "a"), str(tmp_path / "b"), ElasticConfig())
    (difference,) = compare(left, right, 1, False, without).differences
    assert difference.key == "own"
