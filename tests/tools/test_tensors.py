"""``elastic_ckpt.open``: what is there by name, and that a tensor costs no bytes but its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import ListedChunks, StorageChunk
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import CheckpointMetadata, SavedParameter, SourceFacts, SourceFile, TensorMetadata
from elastic_ckpt.core.shard_specs import ShardSpec
from elastic_ckpt.errors import DamagedError, MismatchError, NotFoundError
from elastic_ckpt.planning.state_errors import refuse_unreadable_states
from elastic_ckpt.tools.comparison import compare
from elastic_ckpt.tools.logical import CheckpointTensors
from elastic_ckpt.tools.opened import OpenedCheckpoint, open_folder
from tests.unpartitioned import STATES, Model, indexed, trained


class Tied(Model):
    """The model with a second name for a parameter, and one that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.a
        self.c.requires_grad_(False)


@pytest.fixture
def trained_model(tmp_path: Path) -> tuple[Tied, torch.optim.Optimizer]:
    """The model and the optimizer whose checkpoint, without ZeRO, is ``tmp_path / "step"``."""
    model = Tied()
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(named)
    state = trained(model, optimizer, idle=["b"])
    (tmp_path / "step").mkdir()
    indexed(tmp_path / "step", model.state_dict(), state)
    (tmp_path / "latest").write_text("step")
    return model, optimizer


def test_it_is_a_mapping_of_the_state_dict(trained_model: tuple[Tied, Any], tmp_path: Path) -> None:
    checkpoint = elastic_ckpt.open(tmp_path)
    expected = trained_model[0].state_dict()
    assert set(checkpoint) == expected.keys() and len(checkpoint) == len(expected)
    for name, value in checkpoint.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
    assert checkpoint["scale"].shape == () and "again" in checkpoint and "d" not in checkpoint
    checkpoint["a"].zero_()
    assert torch.equal(checkpoint["a"], expected["a"]), "another access, another tensor"
    Tied().load_state_dict(dict(checkpoint))


def test_optimizer_states_are_those_of_the_optimizer(
    trained_model: tuple[Tied, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, optimizer = trained_model
    checkpoint = elastic_ckpt.open(tmp_path / "step")
    for name in ("a", "again", "scale"):
        state, expected = checkpoint.optimizer_state(name), optimizer.state[model.get_parameter(name)]
        assert state.keys() == expected.keys() == {"step", *STATES}
        assert all(torch.equal(value, expected[key]) for key, value in state.items())
        assert all(value.dtype == expected[key].dtype for key, value in state.items())
    assert checkpoint.optimizer_state("b") == {}, "it never got a gradient"
    with pytest.raises(KeyError, match="no optimizer owned 'c'"):
        checkpoint.optimizer_state("c")


def test_names_are_as_the_rules_of_a_load_rename_them(trained_model: tuple[Tied, Any], tmp_path: Path) -> None:
    config = ElasticConfig(rename=[("^a(.*)", r"model.a\1")])
    checkpoint, plain = elastic_ckpt.open(tmp_path, config=config), elastic_ckpt.open(tmp_path)
    assert set(checkpoint) == {"model.a", "model.again", *plain} - {"a", "again"}
    assert torch.equal(checkpoint["model.again"], plain["a"])
    assert torch.equal(checkpoint.optimizer_state("model.a")["exp_avg"], plain.optimizer_state("a")["exp_avg"])
    elastic_ckpt.export(tmp_path, tmp_path / "out", config=config, include=["model.again"], optimizer=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"model.a"}
    assert load_file(tmp_path / "out" / "optimizer.safetensors").keys() == {f"{key}.model.a" for key in STATES}
    assert compare(open_folder(str(tmp_path), None, config), open_folder(str(tmp_path), None, config), 1, False).equal
    difference = compare(open_folder(str(tmp_path), None, config), open_folder(str(tmp_path), None, ElasticConfig()), 1)
    assert {each.name for each in difference.differences} >= {"a", "model.a"}
    with pytest.raises(MismatchError, match="gives two saved parameters one name"):
        elastic_ckpt.open(tmp_path, config=ElasticConfig(rename=[("^[ab]$", "same")]))


def test_unknown_names_are_key_errors_with_the_nearest(trained_model: Any, tmp_path: Path) -> None:
    checkpoint = elastic_ckpt.open(tmp_path, tag="step")
    with pytest.raises(KeyError, match="has no tensor 'scales'; there are scale"):
        checkpoint["scales"]
    with pytest.raises(KeyError, match="has no tensor 'nothing'"):
        checkpoint.optimizer_state("nothing")
    assert checkpoint.get("nothing") is None
    with pytest.raises(NotFoundError, match="no DeepSpeed checkpoint"):
        elastic_ckpt.open(tmp_path / "nowhere")


def test_only_the_bytes_of_the_tensor_are_read(
    trained_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = elastic_ckpt.open(tmp_path)
    checkpoint.optimizer_state("a")  # reads metadata that weights do not need
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(preadv(*arguments)) or read[-1])
    monkeypatch.setattr("builtins.open", lambda *_, **__: pytest.fail("a file is opened for more than the tensor"))
    checkpoint["a"]
    assert sum(read) == 6 * 4
    checkpoint.optimizer_state("a")
    assert sum(read) == 3 * 6 * 4


@pytest.mark.parametrize(
    ("companions", "found"),
    [({}, "state1"), ({"absmax1": torch.ones(1), "qmap1": torch.zeros(256)}, "qmap1 in")],
    ids=["no scales", "a damaged map"],
)
def test_weights_are_read_where_states_cannot_be(
    companions: dict[str, torch.Tensor], found: str, tmp_path: Path
) -> None:
    model = Model()
    state = trained(model, torch.optim.AdamW([{"params": [model.a, model.b]}, {"params": [model.scale, model.c]}]))
    state["state"][0] |= {"state1": torch.zeros(2, 3, dtype=torch.uint8), **companions}
    (tmp_path / "step").mkdir()
    indexed(tmp_path / "step", model.state_dict(), state)
    checkpoint = elastic_ckpt.open(tmp_path / "step")
    assert torch.equal(checkpoint["b"], model.b)
    with pytest.raises(DamagedError, match="does not have the scales") as caught:
        elastic_ckpt.open(tmp_path / "step").optimizer_state("b")
    assert found in str(caught.value)
    fresh = elastic_ckpt.open(tmp_path / "step", config=ElasticConfig(states={"state1": "fresh"}))
    assert fresh.optimizer_state("a").keys() == {"step", *STATES}


def sharded(folder: Path, **config: Any) -> CheckpointTensors:
    """Two tensor-parallel ranks' ``cut``, ``copied`` and ``unknown``, of which only the last has no rule."""
    folder.mkdir()
    shards = {"cut": ([0.0, 1.0], [2.0, 3.0]), "copied": ([4.0, 5.0], [4.0, 6.0]), "unknown": ([7.0, 8.0], [9.0, 9.0])}
    tensors, parameters, nbytes = {}, {}, bytearray()
    for name, values in shards.items():
        sources = []
        for value in values:
            sources.append(ListedChunks((StorageChunk(FlatRange(0, 2), 0, len(nbytes)),)))
            nbytes += torch.tensor(value).numpy().tobytes()
        shape = (2, 1) if name == "unknown" else (2,)
        parameters[name] = SavedParameter(shape, 0, ())
        tensors[name, "fp32"] = TensorMetadata(name, "fp32", shape, "float32", tuple(sources), shards=(shape, shape))
    (folder / "a").write_bytes(nbytes)
    facts = SourceFacts("native", str(folder), "step", 1, 1, "0.19.8", tp=2)
    metadata = CheckpointMetadata(facts, (SourceFile(str(folder / "a"), len(nbytes)),), parameters, tensors, ({},))
    rules = [ShardSpec(pattern="cut", kind="column"), ShardSpec(pattern="copied", kind="replicated")]
    checkpoint: Any = SimpleNamespace(metadata=metadata)
    return CheckpointTensors(OpenedCheckpoint(None, checkpoint, ElasticConfig(tp_rules=rules, **config)))  # type: ignore[arg-type]


def test_shards_are_joined_and_copies_compared_one_tensor_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = sharded(tmp_path / "strict")
    assert set(checkpoint) == {"cut", "copied", "unknown"}
    assert checkpoint["cut"].tolist() == [0.0, 1.0, 2.0, 3.0]
    for name, says in (("copied", "copies of replicated parameters differ"), ("unknown", "unknown")):
        with pytest.raises(MismatchError, match=says) as error:
            checkpoint[name]
        assert error.value.parameter == name
    assert sharded(tmp_path / "first", replicated_params="first")["copied"].tolist() == [4.0, 5.0]
    assert "the first was taken" in caplog.text


def test_states_of_only_some_parameters_are_an_error(trained_model: Any, tmp_path: Path) -> None:
    metadata = open_folder(str(tmp_path), None, ElasticConfig()).checkpoint.metadata
    assert "b" in metadata.parameters and ("b", "exp_avg") not in metadata.tensors
    partitioned = replace(metadata, source=replace(metadata.source, zero_stage=1))
    with pytest.raises(DamagedError, match="no optimizer state of this parameter") as error:
        refuse_unreadable_states(partitioned)
    assert error.value.parameter == "b"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_of_torch_distributed_checkpoint_are_opened_and_exported_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "dcp")
    checkpoint = elastic_ckpt.open(tmp_path / "dcp")
    assert checkpoint.keys() == weights.keys()
    assert all(torch.equal(checkpoint[name], value) for name, value in weights.items())
    expected = optimizer.state[model.weight]
    assert all(torch.equal(value, expected[key]) for key, value in checkpoint.optimizer_state("weight").items())
    elastic_ckpt.export(tmp_path / "dcp", tmp_path / "out", optimizer=True)
    assert all(torch.equal(v, weights[name]) for name, v in load_file(tmp_path / "out" / "model.safetensors").items())
    assert load_file(tmp_path / "out" / "optimizer.safetensors").keys() >= {"exp_avg.weight", "exp_avg_sq.bias"}
