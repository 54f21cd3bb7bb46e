"""Conversion to ``torch.distributed.checkpoint``: chunks, names, and what DCP's writer would lose in silence."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.values import LeftInFile, TensorValue
from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.tools.comparison import compare
from elastic_ckpt.tools.conversion.dcp import convert_to_dcp
from elastic_ckpt.tools.opened import OpenedCheckpoint, open_folder
from tests.formats.dcp_folders import Net, save, state_dicts, trained


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model, optim = state_dicts()
    return save(tmp_path / "source", {"model": model, "optim": optim})


def opened(folder: Path, **options: Any) -> OpenedCheckpoint:
    return open_folder(str(folder), None, ElasticConfig(**options))


def test_what_is_written_is_what_was_read(tmp_path: Path, source: Path) -> None:
    report = convert_to_dcp(opened(source), tmp_path / "out", progress=False)
    assert compare(opened(source), opened(tmp_path / "out"), threads=1, progress=False).differences == ()
    assert sorted(os.listdir(tmp_path / "out")) == [".metadata", "__0_0.distcp"]
    assert report.files == 1 and any("lr scheduler" in note for note in report.notes)


def test_hyperparameters_that_are_not_read_are_refused_before_anything_is_written(tmp_path: Path, source: Path) -> None:
    found = opened(source)
    groups = tuple({**group, "mine": LeftInFile("a tensor")} for group in found.metadata.groups)
    metadata = replace(found.metadata, groups=groups)
    with pytest.raises(UnsupportedError, match=r"arrays or objects \(mine\)"):
        convert_to_dcp(replace(found, checkpoint=replace(found.checkpoint, metadata=metadata)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Eager:
    """Asks for all tensors before any is written, as DCP's loader for machines with an accelerator may."""

    def __init__(self, resolve: Any, **_: Any) -> None:
        self.resolve, self.items = resolve, []

    def add(self, _: int, item: Any) -> None:
        self.items.append(item)

    def start_loading(self) -> None:
        self.loaded = [(self.resolve(item), item) for item in self.items]

    def values(self) -> Any:
        return iter(self.loaded)


def test_a_tensor_without_its_bytes_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = opened(save(tmp_path / "source", {"model": {"large": torch.ones(5000), "small": torch.ones(1)}}))
    monkeypatch.setattr(filesystem, "_SerialCpuLoader", Eager)
    with pytest.raises(ElasticCkptError, match="did not write these items"):
        convert_to_dcp(checkpoint, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_dcp_loads_it_into_the_state_dicts_of_a_live_model(tmp_path: Path, source: Path) -> None:
    convert_to_dcp(opened(source), tmp_path / "out", progress=False)
    torch.manual_seed(9)
    net = Net()
    groups = [{"params": [net.first.weight], "lr": 5.0}, {"params": [net.first.bias], "lr": 5.0}]
    model, optim = get_state_dict(net, torch.optim.AdamW(groups))
    dcp.load({"model": model, "optim": optim}, checkpoint_id=tmp_path / "out")
    expected_model, expected_optim = state_dicts()
    assert all(torch.equal(model[name], value) for name, value in expected_model.items())
    for name, state in expected_optim["state"].items():
        assert all(torch.equal(optim["state"][name][key], value) for key, value in state.items())
    assert [group["lr"] for group in optim["param_groups"]] == [0.1, 0.2]


def test_names_follow_the_rules_for_renames(tmp_path: Path, source: Path) -> None:
    convert_to_dcp(opened(source, rename=[("^first", "hidden")]), tmp_path / "out", progress=False)
    assert "hidden.weight" in opened(tmp_path / "out").checkpoint.metadata.parameters


def test_an_error_inside_dcp_is_an_error_and_leaves_no_checkpoint(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    checkpoint = opened(source)
    monkeypatch.setattr("elastic_ckpt.tools.logical.LogicalReader.read", fail)
    with pytest.raises(ElasticCkptError, match=r"(?s)could not be written.*No space left"):
        convert_to_dcp(checkpoint, tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == [source]


def test_what_this_layout_cannot_express_is_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    model, optim = get_state_dict(net, optimizer)
    for state in optim["state"].values():
        state["codes"] = state["exp_avg"].to(torch.uint8)
    checkpoint = opened(save(tmp_path / "source", {"model": model, "optim": optim}))
    with pytest.raises(UnsupportedError, match="cannot be converted to torch"):
        convert_to_dcp(checkpoint, tmp_path / "out", progress=False)


def rewritten(opened: OpenedCheckpoint, **changes: Any) -> OpenedCheckpoint:
    """An open checkpoint with other metadata."""
    return replace(opened, checkpoint=replace(opened.checkpoint, metadata=replace(opened.metadata, **changes)))


DEEPSPEED = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"type": "AdamW"}, True),
        ({"type": "Adam"}, True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, False),
        ({"type": "OneBit"}, None),
        (None, None),
    ],
)
def test_weight_decay_stays_what_it_was_or_is_left_out(
    tmp_path: Path, source: Path, config: Any, expected: bool | None
) -> None:
    torch.save({"ds_config": {"optimizer": config}}, tmp_path / "model_states.pt")
    checkpoint = rewritten(opened(source), groups=(DEEPSPEED, {**DEEPSPEED, "lr": 0.2, "weight_decay": 0.0}))
    checkpoint = replace(
        checkpoint,
        found=replace(checkpoint.found, format="native"),
        checkpoint=replace(checkpoint.checkpoint, model_path=str(tmp_path / "model_states.pt")),
    )
    report = convert_to_dcp(checkpoint, tmp_path / "out", progress=False)
    first, second = opened(tmp_path / "out").metadata.groups
    for group in (first, second):
        assert group.get("decoupled_weight_decay") is expected
        assert group.get("amsgrad") is (None if expected is None else False)
    (note,) = (note for note in report.notes if "amsgrad" in note)
    assert note.startswith("left out" if expected is None else "hyperparameters that the checkpoint lacks")
    net = Net()
    groups = [{"params": [net.first.weight]}, {"params": [net.first.bias]}]
    model, optim = get_state_dict(net, torch.optim.Adam(groups))
    loading: dict[str, Any] = {"state_dict": {"model": model, "optim": optim}, "checkpoint_id": tmp_path / "out"}
    if expected is None:
        with pytest.raises(CheckpointException, match="param_groups"):
            dcp.load(**loading)
        dcp.load(**loading, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    else:
        dcp.load(**loading)
    assert optim["param_groups"][0]["decoupled_weight_decay"] is bool(expected)
    assert optim["param_groups"][0]["lr"] == 0.1


def test_another_optimizer_gets_no_hyperparameters_of_adam(tmp_path: Path, source: Path) -> None:
    lamb = {**DEEPSPEED, "max_coeff": 10.0, "min_coeff": 0.01}
    convert_to_dcp(rewritten(opened(source), groups=(lamb, {**lamb, "lr": 0.2})), tmp_path / "out", progress=False)
    assert set(opened(tmp_path / "out").metadata.groups[0]) == set(lamb)


def test_scalar_states_keep_their_form(tmp_path: Path, source: Path) -> None:
    checkpoint = opened(source)
    scalars = (("count", 2**24 + 1), ("product", TensorValue("float64", (), (0.1,))), ("step", 3))
    parameters = {name: replace(saved, scalars=scalars) for name, saved in checkpoint.metadata.parameters.items()}
    convert_to_dcp(rewritten(checkpoint, parameters=parameters), tmp_path / "out", progress=False)
    found = opened(tmp_path / "out").metadata
    expected = (*scalars[:-1], ("step", TensorValue("float32", (), (3.0,))))
    assert all(repr(saved.scalars) == repr(expected) for saved in found.parameters.values())
