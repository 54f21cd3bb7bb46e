"""Exports as safetensors: the header, the files that tensors are in, selection, conversion, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
import transformers
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, SavedParameter
from elastic_ckpt.core.values import TensorValue
from elastic_ckpt.errors import ConfigError, ElasticCkptError, MismatchError, NotFoundError, UnsupportedError
from elastic_ckpt.tools import export as exporting
from elastic_ckpt.tools.export import converted, of_adapter, optimizer_facts
from elastic_ckpt.tools.logical import LogicalTensor
from tests.formats.dcp_folders import save
from tests.unpartitioned import Model, indexed, trained

INDEX = "model.safetensors.index.json"


def test_values_are_rounded_but_never_become_infinite() -> None:
    values = torch.tensor([1.0 + 2**-12, float("inf"), float("nan"), 65504.0])
    half = converted(values, "float16", "w")
    assert torch.equal(half.nan_to_num(0.5, 7.0), values.half().nan_to_num(0.5, 7.0))
    assert torch.equal(converted(values, "bfloat16", "w")[:2], values.bfloat16()[:2])
    for dtype, value in (("float16", 65520.0), ("bfloat16", torch.finfo(torch.float32).max)):
        with pytest.raises(MismatchError, match=f"too large for {dtype}") as error:
            converted(torch.tensor([0.0, -value]), dtype, "layer.weight")
        assert error.value.parameter == "layer.weight"


def test_the_dtype_is_that_of_parameters() -> None:
    tensors = [
        LogicalTensor("w", MASTER, (2,), "float32"),
        LogicalTensor("base", FROZEN, (2,), "bfloat16"),
        LogicalTensor("packed", FROZEN, (2,), "uint8"),
        LogicalTensor("mean", BUFFER, (2,), "float32"),
    ]
    assert [exporting._dtype_of(one, None, {BUFFER}) for one in tensors] == [one.dtype for one in tensors]
    halves = [exporting._dtype_of(one, "fp16", {BUFFER}) for one in tensors]
    assert halves == ["float16", "float16", "uint8", "float32"]


@pytest.mark.parametrize(("name", "dtype"), [("w", torch.complex128), ("__metadata__", torch.float32)])
def test_what_the_format_cannot_hold_is_named(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {name: torch.ones(2, dtype=dtype)}})
    with pytest.raises(UnsupportedError, match="cannot hold") as error:
        elastic_ckpt.export(source, tmp_path / "out", progress=False)
    assert error.value.parameter == name and [path.name for path in tmp_path.iterdir()] == ["source"]


class Tied(Model):
    """The model with a second name for a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = self.a


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tied]:
    """A checkpoint without ZeRO, as DeepSpeed writes it."""
    folder, model = tmp_path / "checkpoints" / "step", Tied()
    folder.mkdir(parents=True)
    state = trained(model, torch.optim.AdamW(model.parameters()))
    names = {number: name for number, (name, _) in enumerate(model.named_parameters())}
    state["param_groups"][0]["param_names"] = list(names.values())
    indexed(folder, model.state_dict(), state)
    (tmp_path / "checkpoints" / "latest").write_text("step")
    return tmp_path / "checkpoints", model


def test_a_checkpoint_becomes_one_file(saved: tuple[Path, Tied], tmp_path: Path) -> None:
    folder, model = saved
    report = elastic_ckpt.export(folder, tmp_path / "new" / "out")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == ["model.safetensors"]
    again = Tied()
    for param in again.parameters():
        torch.nn.init.zeros_(param)
    missing, unexpected = load_model(again, tmp_path / "new" / "out" / "model.safetensors")
    assert not missing and not unexpected and again.twin is again.a
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert report.tensors == 5 and report.files == 1 and report.nbytes > 0
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "any", tmp_path / "new" / "out" / "model.safetensors")}
    assert len(modes) == 1, "whoever may read other files may read these"
    assert any("twin = a" in note for note in report.notes)


def test_transformers_loads_it(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    (tmp_path / "step").mkdir()
    optimizer = torch.optim.AdamW(model.named_parameters())
    optimizer.step()
    indexed(tmp_path / "step", model.state_dict(), optimizer.state_dict())
    report = elastic_ckpt.export(tmp_path / "step", tmp_path / "out", max_shard_size="2KB")
    assert report.files > 1 and any("lm_head.weight = transformer.wte.weight" in note for note in report.notes)
    config.save_pretrained(tmp_path / "out")
    again, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def test_shards_with_an_index(saved: tuple[Path, Tied], tmp_path: Path) -> None:
    folder, model = saved
    elastic_ckpt.export(folder, tmp_path / "out", max_shard_size=30)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = {path.name for path in (tmp_path / "out").iterdir()} - {INDEX}
    assert set(index["weight_map"].values()) == files and len(files) > 2
    expected = {name: value for name, value in model.state_dict().items() if name != "twin"}
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], expected[name])


def test_a_selection_in_another_dtype(saved: tuple[Path, Tied], tmp_path: Path) -> None:
    folder, model = saved
    words = [str(folder), str(tmp_path / "out"), "--dtype", "bf16", "--include", "^twin$", "--include", "[bc]$"]
    result = CliRunner().invoke(app, ["export", *words, "--exclude", "c", "--json"])
    assert result.exit_code == 0, result.output
    found = load_file(tmp_path / "out" / "model.safetensors")
    report = json.loads(result.stdout)
    assert found.keys() == {"a", "b"} and report["tensors"] == 2
    assert "float32 is rounded to bfloat16" in report["notes"]
    assert all(torch.equal(found[name], getattr(model, name).bfloat16()) for name in found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapter": "default"}, "no tensors of this PEFT adapter"),
        ({"include": ["nowhere"]}, "matches no tensor"),
        ({"exclude": ["nowhere"]}, "matches no tensor"),
        ({"include": ["("]}, "not a regular expression"),
        ({"exclude": [""]}, "nothing to export"),
        ({"dtype": "fp8"}, "cannot have this dtype"),
        ({"max_shard_size": "big"}, "not a shard size"),
        ({"max_shard_size": "2GiB"}, "not a shard size"),
    ],
)
def test_wrong_usage_writes_nothing(options: Any, says: str, saved: tuple[Path, Tied], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        elastic_ckpt.export(saved[0], tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_an_export_that_fails_leaves_nothing_behind(
    saved: tuple[Path, Tied], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    write, calls = exporting.save_file, []

    def dies(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        write(*arguments)

    monkeypatch.setattr(exporting, "save_file", dies)
    with pytest.raises(ElasticCkptError, match=r"(?s)could not be written.*No space left"):
        elastic_ckpt.export(folder, tmp_path / "out", max_shard_size=30)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    monkeypatch.undo()
    elastic_ckpt.export(folder, tmp_path / "out", max_shard_size=30)
    with pytest.raises(ConfigError, match="cannot be written there"):
        elastic_ckpt.export(folder, tmp_path / "out")
    result = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 2 and "a new folder outside the checkpoint" in result.stderr


def test_optimizer_states_lie_beside_the_weights(saved: tuple[Path, Tied], tmp_path: Path) -> None:
    folder, _ = saved
    words = [str(folder), str(tmp_path / "out"), "--optimizer", "--dtype", "bf16", "--exclude", "^b$", "--json"]
    result = CliRunner().invoke(app, ["export", *words, "--max-shard-size", "0KB"])
    assert result.exit_code == 0, result.output
    index = json.loads((tmp_path / "out" / "optimizer.safetensors.index.json").read_text())
    opened = elastic_ckpt.open(folder)
    states = {name: opened.optimizer_state(name) for name in ("a", "scale", "c")}
    assert index["weight_map"].keys() == {f"{key}.{name}" for name in states for key in ("exp_avg", "exp_avg_sq")}
    for name, file in index["weight_map"].items():
        key, _, param = name.partition(".")
        found = load_file(tmp_path / "out" / file)[name]
        assert found.dtype == torch.float32 and torch.equal(found, states[param][key])
    assert json.loads(result.stdout)["tensors"] == 4 + 6, "the buffer too"
    with safetensors.safe_open(tmp_path / "out" / min(set(index["weight_map"].values())), "pt") as reader:
        facts = {key: json.loads(value) for key, value in reader.metadata().items() if key != "format"}
    assert facts["scalars"] == {name: {"step": 3.0} for name in states}
    (group,) = facts["param_groups"]
    assert group["params"] == ["a", "scale", "c"] and group["lr"] == 1e-3 and group["betas"] == [0.9, 0.999]


def test_hyperparameters_of_any_kind_are_written_as_text() -> None:
    metadata: Any = SimpleNamespace(parameters={}, groups=[{"lr": 0.5, "of": {torch.float32: (torch.bfloat16, 1)}}])
    groups = json.loads(optimizer_facts(metadata, ())["param_groups"])
    assert groups == [{"lr": 0.5, "of": {"torch.float32": ["torch.bfloat16", 1]}, "params": []}]


def test_numbers_that_json_has_not_are_written_as_text() -> None:
    scalars = (("count", TensorValue("complex64", (), (2j,))), ("phase", TensorValue("complex64", (2,), (1j, 2.0))))
    parameters = {"w": SavedParameter((1,), 0, scalars)}
    metadata: Any = SimpleNamespace(parameters=parameters, groups=[{"lr": 0.5, "of": 1j}])
    facts = optimizer_facts(metadata, ("w",))
    assert json.loads(facts["scalars"]) == {"w": {"count": "2j", "phase": ["1j", "(2+0j)"]}}
    assert json.loads(facts["param_groups"]) == [{"lr": 0.5, "of": "1j", "params": ["w"]}]


def test_no_optimizer_states_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    model = Tied()
    state = torch.optim.AdamW(model.named_parameters()).state_dict()
    indexed(tmp_path / "step", model.state_dict(), state)
    with pytest.raises(NotFoundError, match="no optimizer states"):
        elastic_ckpt.export(tmp_path / "step", tmp_path / "out", optimizer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def trained_dcp(folder: Path, module: torch.nn.Module) -> Path:
    """A folder of torch.distributed.checkpoint with a module, one step of AdamW on what requires gradients."""
    optimizer = torch.optim.AdamW([param for param in module.parameters() if param.requires_grad])
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    model, optim = get_state_dict(module, optimizer)
    return save(folder, {"model": model, "optim": optim})


class Adapted(torch.nn.Module):
    """A linear layer as PEFT wraps it, and other layers, one of them called like the adapter."""

    def __init__(self, trained: str) -> None:
        super().__init__()
        self.q = torch.nn.Module()
        self.q.base_layer = torch.nn.Linear(3, 3)
        self.q.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2, bias=False) for name in ("default", "second")})
        self.q.lora_B = torch.nn.ModuleDict({name: torch.nn.Linear(2, 3, bias=False) for name in ("default", "second")})
        self.default = torch.nn.Linear(3, 3)
        for name, param in self.named_parameters():
            param.requires_grad_("lora_" in name or bool(trained and name.endswith(trained)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        q = self.q
        out = q.base_layer(inputs) + sum(q.lora_B[name](q.lora_A[name](inputs)) for name in ("default", "second"))
        return self.default(out)


def test_an_adapter_is_what_peft_adds_and_the_trained_biases(tmp_path: Path) -> None:
    source = trained_dcp(tmp_path / "source", Adapted("base_layer.bias"))
    elastic_ckpt.export(source, tmp_path / "out", adapter="default", progress=False)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == {"q.base_layer.bias", "q.lora_A.weight", "q.lora_B.weight"}


def test_trained_parameters_that_the_adapter_lacks_are_refused(tmp_path: Path) -> None:
    source = trained_dcp(tmp_path / "source", Adapted("default.weight"))
    with pytest.raises(ConfigError, match="were trained too") as error:
        elastic_ckpt.export(source, tmp_path / "out", adapter="default", progress=False)
    assert error.value.parameter == "default.weight"
    elastic_ckpt.export(source, tmp_path / "out", adapter="second", exclude=["^default"], progress=False)
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == {"q.lora_A.weight", "q.lora_B.weight"}


def test_names_of_the_base_model_are_no_adapters(tmp_path: Path) -> None:
    names = ("layers.0.weight", "encoder.default.weight", "a.modules_to_save.default.weight", "b.ia3_l.default")
    weights = {name: LogicalTensor(name, FROZEN, (1,), "float32") for name in names}
    assert list(of_adapter(weights, "default", "here")) == ["a.weight", "b.ia3_l"]
    with pytest.raises(ConfigError, match="no tensors of this PEFT adapter"):
        of_adapter(weights, "0", "here")


def test_buffers_that_the_checkpoint_does_not_tell_are_not_rounded(tmp_path: Path) -> None:
    source = trained_dcp(tmp_path / "source", torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    report = elastic_ckpt.export(source, tmp_path / "out", dtype="bf16", progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["1.running_mean"].dtype == torch.float32 and found["1.weight"].dtype == torch.bfloat16
    assert any("does not tell buffers" in note and "1.running_mean" in note for note in report.notes)
    elastic_ckpt.export(source, tmp_path / "weights", progress=False)
    report = elastic_ckpt.export(tmp_path / "weights", tmp_path / "half", dtype="bf16", progress=False)
    assert any("are rounded too" in note for note in report.notes)
