"""What verification finds in the files of a module's weights: of a pipeline's layers, and of tied replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import load_file

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.conversion.dcp import convert_to_dcp
from elastic_ckpt.tools.export import export
from elastic_ckpt.tools.module_files import layer_findings
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.verification import verify
from tests.attacks.seeds import TREES
from tests.unpartitioned import Model, indexed, trained

#: Names in the file of each layer and stage; the tied module is in that of layer 0.
LAYERS = ({0: ("weight",), 1: ("up.weight", "up.bias")}, {2: ("weight", "steps")})
SHAPE = (2, 3)
Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, tuple[int, Change, tuple[str, str]]] = {
    "a weight less": (1, lambda tree: tree.pop("up.bias"), ("1.up.bias", "incomplete")),
    "a set": (1, lambda tree: tree.update({"up.bias": {1}}), ("1.up.bias", "incomplete")),
    "a number": (1, lambda tree: tree.update({"up.weight": 7}), ("1.up.weight", "incomplete")),
    "another shape": (1, lambda tree: tree.update({"up.weight": torch.ones(3, 2)}), ("1.up.weight", "damaged")),
    "a dimension less": (2, lambda tree: tree.update({"weight": torch.ones(6)}), ("2.weight", "damaged")),
    "a buffer less": (2, lambda tree: tree.pop("steps"), ("2.steps", "incomplete")),
    "a tied weight less": (0, lambda tree: tree.pop("embedding"), ("tied_modules.embed.embedding", "incomplete")),
    "a tied weight of another shape": (
        0,
        lambda tree: tree.update(embedding=torch.ones(5)),
        ("tied_modules.embed.embedding", "damaged"),
    ),
}


def _pipeline(folder: Path, tp: int, changed: tuple[int, Change] | None = None) -> Any:
    """A tag's folder of two stages and some tensor-parallel ranks, of which the last one's layer is changed."""
    folder.mkdir()
    for rank in range(tp * len(LAYERS)):
        stage, tp_rank = divmod(rank, tp)
        shape = (*SHAPE[:-1], SHAPE[-1] + tp_rank)  # each rank has a shape of its own
        listed = {f"{layer}.{key}": shape for layer, keys in LAYERS[stage].items() for key in keys if key != "steps"}
        listed["tied_modules.embed.embedding"] = shape
        tree = TREES["model"] | {"module": None, "shared_params": {}, "frozen_param_shapes": {}}
        tree |= {"param_shapes": [{name: torch.Size(each) for name, each in listed.items()}]}
        tree |= {"buffer_names": ["2.steps"] if stage else [], "mp_world_size": tp}
        torch.save(tree, folder / f"mp_rank_{rank:02d}_model_states.pt")
        for layer, keys in LAYERS[stage].items():
            weights = {key: torch.ones(shape) for key in keys} | ({} if layer else {"embedding": torch.ones(shape)})
            if changed is not None and layer == changed[0] and tp_rank == tp - 1:
                changed[1](weights)
            torch.save(weights, folder / f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt")
    return look_at(str(folder.parent), folder.name)


@pytest.mark.parametrize("tp", [1, 2])
def test_whole_files_have_no_findings(tp: int, tmp_path: Path) -> None:
    assert [*layer_findings(_pipeline(tmp_path / "step", tp))] == []


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_file_of_a_layer_lacks_is_found(change: str, tp: int, tmp_path: Path) -> None:
    layer, apply, expected = CHANGES[change]
    findings = [*layer_findings(_pipeline(tmp_path / "step", tp, (layer, apply)))]
    assert {(each.parameter, each.kind) for each in findings} == {expected}
    assert all(each.level == "error" for each in findings)


def _with_optimizer(folder: Path, layer: dict[str, Any]) -> str:
    """A pipeline of one layer, with ZeRO-1 on a single rank, and a buffer and a frozen weight in the layer's file."""
    folder.mkdir()
    slices = OrderedDict({"0.w": fragment_address(numel=6, start=0)})
    optimizer = dict(TREES["zero1"]["optimizer_state_dict"])
    states = {"step": torch.tensor(4.0), "exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)}
    groups = [{"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}]
    optimizer |= {"base_optimizer_state": {"state": {0: states}, "param_groups": groups}, "group_paddings": [0]}
    optimizer |= {"single_partition_of_fp32_groups": [torch.arange(6.0)], "partition_count": [1]}
    optimizer |= {"param_slice_mappings": [slices]}
    tree = {key: each for key, each in TREES["model"].items() if key not in ("args", "client", "rng_states")}
    tree |= {"module": None, "buffer_names": ["0.steps"], "shared_params": {}, "lr_scheduler": None}
    tree |= {"frozen_param_shapes": {"0.frozen": torch.Size((3,))}, "frozen_param_fragments": {}}
    tree |= {"param_shapes": [OrderedDict({"0.w": torch.Size((6,))})], "dp_world_size": 1, "mp_world_size": 1}
    tree |= {"ds_config": {"train_batch_size": 8, "zero_optimization": {"stage": 1}}}
    torch.save(tree, folder / "mp_rank_00_model_states.pt")
    partition = {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}
    torch.save(partition, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save(layer, folder / "layer_00-model_states.pt")
    return str(folder)


LAYER = {"w": torch.arange(6.0), "steps": torch.ones(2), "frozen": torch.ones(3)}
WRITES: dict[str, Callable[[str, Path], object]] = {
    "convert": lambda folder, out: convert(open_folder(folder, None, ElasticConfig()), out),
    "convert to DCP": lambda folder, out: convert_to_dcp(open_folder(folder, None, ElasticConfig()), out),
    "export": export,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("lost", ["steps", "frozen", "shape", ""])
def test_nothing_is_written_without_what_layers_alone_have(lost: str, write: str, tmp_path: Path) -> None:
    layer = {key: each for key, each in LAYER.items() if key != lost}
    if lost == "shape":
        layer["frozen"] = torch.ones(4)
    folder, out = _with_optimizer(tmp_path / "step4", layer), tmp_path / "out"
    if not lost:
        WRITES[write](folder, out)
        return
    with pytest.raises(DamagedError) as caught:
        WRITES[write](folder, out)
    name = "0.steps" if lost == "steps" else "0.frozen"
    assert name in str(caught.value.parameter) and not out.exists()
    if write == "export" and lost == "steps":
        export(folder, out, include=["w$"])
        assert set(load_file(out / "model.safetensors")) == {"0.w"}


def test_files_that_cannot_be_read_are_left_to_who_reads_all(tmp_path: Path) -> None:
    found = _pipeline(tmp_path / "step", 1)
    (tmp_path / "step" / "layer_01-model_00-model_states.pt").write_bytes(b"x")
    (tmp_path / "step" / "mp_rank_01_model_states.pt").write_bytes(b"x")
    assert [*layer_findings(found)] == []


class Tied(Model):
    """A model whose last parameter has another name, which its state dict has too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 2, bias=False)
        self.head.weight = self.a


@pytest.mark.parametrize("entry", [[], 7, None, {1}, "text"])
def test_a_weight_whose_tied_replica_is_whole_is_not_called_ok(entry: Any, tmp_path: Path) -> None:
    model = Tied()
    optimizer = trained(model, torch.optim.AdamW(model.parameters()))
    folder = tmp_path / "step3"
    folder.mkdir()
    (tmp_path / "latest").write_text("step3")
    indexed(folder, model.state_dict(), optimizer)
    assert verify(str(tmp_path), None, ElasticConfig(), full=True).ok
    indexed(folder, {**model.state_dict(), "a": entry}, optimizer)
    result = verify(str(tmp_path), None, ElasticConfig(), full=True)
    assert not result.ok
    assert [each.parameter for each in result.unchecked] == ["a"]
