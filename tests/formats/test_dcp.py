"""Folders that torch's own ``torch.distributed.checkpoint`` writes, as metadata: entries, chunks, damage, attacks."""

from __future__ import annotations

import os
import pickle
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3
from torch.distributed.checkpoint.filesystem import _StorageInfo

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import ModelLayout, WholeTensor
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.core.values import left_in_file
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.classification import FRESH
from elastic_ckpt.formats.dcp_entries import sort_entries
from elastic_ckpt.formats.dcp_metadata import read_dcp_file, read_dcp_metadata
from elastic_ckpt.formats.detect import find_checkpoint
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import find_drift, judge_drift
from elastic_ckpt.planning.planner import compare_replicas
from elastic_ckpt.planning.state_errors import state_errors
from elastic_ckpt.planning.ties import adopt_live_kinds, adopt_live_names
from elastic_ckpt.sharding.resolve import ReshardPlan
from elastic_ckpt.tools.verification import verify
from tests.attacks.guard import guarded
from tests.formats.dcp_folders import read, rewrite, save, state_dicts, trained, values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, optim = state_dicts()
    return save(tmp_path / "saved", {"model": model, "optim": optim, "note": "hello", "seen": {"tokens": 7}})


def test_entries_become_masters_states_groups_and_client_state(folder: Path) -> None:
    model, optim = state_dicts()
    checkpoint = read(folder)
    metadata = checkpoint.metadata
    for name in ("first.weight", "first.bias"):
        assert torch.equal(values(checkpoint, name, MASTER), model[name])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(values(checkpoint, name, key), optim["state"][name][key])
        assert metadata.parameters[name].scalars == (("step", 1.0),)
    assert torch.equal(values(checkpoint, "last.weight", FROZEN), model["last.weight"])
    assert torch.equal(values(checkpoint, "ticks", FROZEN), model["ticks"])
    live = [WholeTensor("ticks", BUFFER, (), FlatRange(0, 1), "int64")]
    assert list(adopt_live_kinds(metadata, live).names(BUFFER)) == ["ticks"]
    assert [group["lr"] for group in metadata.groups] == [0.1, 0.2]
    assert [metadata.parameters[name].group for name in ("first.weight", "first.bias")] == [0, 1]
    assert repr(dict(metadata.parameters["first.weight"].scalars)) == "{'step': tensor(1.0, float32)}"
    assert checkpoint.training_state.checkpoint == {"dcp": {"note": "hello", "seen": {"tokens": 7}}}
    assert checkpoint.training_state.counters["global_steps"] == 1
    assert any("note, seen.tokens" in note for note in metadata.notes)


LAYOUTS: dict[str, Callable[..., dict[str, Any]]] = {
    "tutorial": lambda model, optim: {"app": {"model": model, "optim": optim}},
    "torchtitan": lambda model, optim: {**model, "optimizer": optim},
    "renamed": lambda model, optim: {"net": model, "adam": optim},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_recognized_by_the_names_in_them(tmp_path: Path, folder: Path, layout: str) -> None:
    other = save(tmp_path / layout, LAYOUTS[layout](*state_dicts(flat=layout == "torchtitan")))
    first, second = read(folder).metadata, read(other).metadata
    assert first.parameters == second.parameters and first.tensors.keys() == second.tensors.keys()
    assert first.groups == second.groups


def test_param_groups_in_one_object_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch before 2.4 saves lists."""
    model, optim = state_dicts()
    monkeypatch.setattr(_nested_dict, "traverse_state_dict", traverse_state_dict_v_2_3)
    old = save(tmp_path / "old", {"model": model, "optim": optim})
    assert "optim.param_groups" in read_dcp_metadata(str(old)).paths
    with pytest.raises(UnsupportedError, match="in an unknown layout"):
        read(old)


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside one that is not flattened"])
@pytest.mark.parametrize("entry", ["state.third.weight.exp_avg", "param_groups.third.weight.lr", "state."])
def test_entries_of_a_flattened_optimizer_of_no_parameter_are_refused(
    tmp_path: Path, entry: str, is_alone: bool
) -> None:
    """Else the states of a parameter that is not in the model would be left out in silence."""
    model, optim = state_dicts(flat=is_alone)
    beside = {"optim": {**optim, entry: torch.zeros(3)}} if is_alone else {"optim": optim}
    if not is_alone:
        beside["more"] = {"param_groups.first.weight.lr": torch.zeros(()), entry: torch.zeros(3)}
    odd = save(tmp_path / "odd", {"model": model, **beside})
    with pytest.raises(UnsupportedError, match="in an unknown layout") as caught:
        read(odd)
    assert is_alone or f"more.{entry}, of no tensor of the model" in str(caught.value)
    weights = read(odd, with_states=False)
    assert torch.equal(values(weights, "first.weight", FROZEN), model["first.weight"]), "the remedy"


def test_groups_that_list_no_parameters_are_refused(tmp_path: Path) -> None:
    model, optim = state_dicts()
    optim["param_groups"][0]["params"] = [7]
    with pytest.raises(UnsupportedError, match="does not list its parameters by name"):
        read(save(tmp_path / "odd", {"model": model, "optim": optim}))


def test_weights_alone_have_no_states(tmp_path: Path) -> None:
    metadata = read(save(tmp_path / "saved", {"model": state_dicts()[0]})).metadata
    assert not metadata.parameters and set(metadata.names(FROZEN)) == set(state_dicts()[0])


def test_states_of_numbered_parameters_are_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    with pytest.raises(UnsupportedError, match=r"an unknown layout[^$]*parameters are numbered"):
        read(save(tmp_path / "saved", {"model": net.state_dict(), "optim": optimizer.state_dict()}))


def test_states_without_param_groups_are_none_that_are_left_out_silently(tmp_path: Path) -> None:
    schema = MetadataOptions().states
    for flat in (False, True):
        model, optim = state_dicts(flat)
        kept = {key: value for key, value in optim.items() if not key.startswith("param_groups")}
        for number, beside in enumerate(({"optim": kept}, {"adam": {"first": model["first.weight"]}})):
            folder = save(tmp_path / f"{flat}{number}", {"model": model, **beside, "rng": torch.get_rng_state()})
            metadata = read(folder).metadata
            with pytest.raises(UnsupportedError, match="beside the model without the param_groups"):
                raise next(state_errors(metadata))
            fresh = replace(schema, schema=dict.fromkeys(beside, FRESH))
            assert not read(folder, states=fresh).metadata.states.opaque
    model, optim = state_dicts()
    partly = {
        "model": model,
        "optim": optim,
        "slow": {"state": {name: optim["state"][name] for name in model if name in optim["state"]}},
    }
    assert set(read(save(tmp_path / "partly", partly)).metadata.states.opaque) == {"slow"}
    alone = {"model": model, "rng": torch.get_rng_state(), "loss": torch.ones(())}
    assert not read(save(tmp_path / "alone", alone)).metadata.states.opaque


@pytest.mark.parametrize("flat", [False, True])
def test_hyperparameters_are_read_as_those_of_native_checkpoints(tmp_path: Path, flat: bool) -> None:
    model, optim = state_dicts(flat)
    mine = {"betas": (torch.tensor(0.5), torch.tensor(0.25)), "kind": torch.bfloat16, "table": torch.ones(30)}
    mine |= {"device": torch.device("cuda", 1), "array": numpy.arange(2.0), "point": torch.tensor(0.5)}
    for name, group in zip(("first.weight", "first.bias"), optim.get("param_groups", [{}, {}]), strict=True):
        (optim if flat else group).update({f"param_groups.{name}.{k}" if flat else k: v for k, v in mine.items()})
    for group in read(save(tmp_path / "saved", {"model": model, "optim": optim})).metadata.groups:
        assert (group["betas"], group["kind"], group["point"]) == ((0.5, 0.25), torch.bfloat16, 0.5)
        assert "device" not in group and {key for key in group if any(left_in_file(group[key]))} == {"table", "array"}


@pytest.mark.parametrize("value", [{"scale": 1.5}, [torch.tensor(0.5), torch.tensor(0.25)]])
def test_no_part_of_a_hyperparameter_that_dcp_took_apart_is_lost(tmp_path: Path, value: Any) -> None:
    model, optim = state_dicts(flat=True)
    optim |= {f"param_groups.{name}.betas": value for name in ("first.weight", "first.bias")}
    saved = save(tmp_path / "saved", {"model": model, "optim": optim})
    with pytest.raises(
        UnsupportedError, match="an item of a hyperparameter that is a dictionary, or has tensors in it"
    ):
        read(saved)


@pytest.mark.parametrize("flat", [False, True])
def test_weights_are_read_without_states_that_are_refused(tmp_path: Path, flat: bool) -> None:
    _, optimizer = trained()
    model, optim = state_dicts(flat)
    nested, twice, unnamed = (state_dicts()[1] for _ in range(3))
    nested["param_groups"][0]["extra"] = {"scale": torch.ones(2)}
    twice["param_groups"][1]["params"].append("first.weight")
    unnamed["param_groups"][1]["params"] = [0]
    refused = {
        "two": {"optim_0": optim, "optim_1": optim},
        "numbered": {"optim": optimizer.state_dict()},
        "nested": {"optim": nested},
        "twice": {"optim": twice},
        "unnamed": {"optim": unnamed},
    }
    for case, optimizers in refused.items():
        saved = save(tmp_path / case, {"model": model, **optimizers})
        with pytest.raises(ElasticCkptError, match="load_optimizer_states=False"):
            read(saved)
        checkpoint = read(saved, with_states=False)
        key = MASTER if checkpoint.metadata.parameters else FROZEN
        assert torch.equal(values(checkpoint, "first.weight", key), model["first.weight"])
        assert (key == MASTER) == (case in ("twice", "unnamed")), "there, names of states tell what was trained"
        assert not checkpoint.training_state.checkpoint


@pytest.mark.parametrize("flat", [False, True])
def test_two_optimizers_may_not_have_the_same_parameters(tmp_path: Path, flat: bool) -> None:
    model, optim = state_dicts(flat=flat)
    with pytest.raises(MismatchError, match="two optimizers"):
        read(save(tmp_path / "both", {"model": model, "optim_0": optim, "optim_1": optim}))
    _, nested = state_dicts()
    nested["param_groups"][1]["params"].append("first.weight")
    with pytest.raises(MismatchError, match="two param groups"):
        read(save(tmp_path / "twice", {"model": model, "optim": nested}))


def wrapped(weights: dict[str, Any], prefix: str = "_orig_mod.") -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in weights.items()}


COPIES: dict[str, Callable[..., dict[str, Any]]] = {
    "ema has the optimizer's names": lambda model, ema, optim: {"model": wrapped(model), "ema": ema, "optim": optim},
    "by another wrapper": lambda model, ema, optim: {"net": wrapped(model, "net."), "ema": ema, "optim": optim},
    "flattened": lambda model, ema, optim: {"net": wrapped(model), "ema": ema, "optim": optim},
    "called model below another key": lambda model, ema, optim: {"net": model, "ema": {"model": ema}},
    "both names": lambda model, ema, optim: {"model": model, "ema": ema, "optim": optim},
    "two models": lambda model, ema, optim: {"model": model, "module": wrapped(ema), "optim": optim},
}


@pytest.mark.parametrize("layout", COPIES)
def test_copies_of_the_model_are_not_taken_for_it(tmp_path: Path, layout: str) -> None:
    model, optim = state_dicts(flat=layout == "flattened")
    saved = save(tmp_path / "saved", COPIES[layout](model, {name: value + 1 for name, value in model.items()}, optim))
    with pytest.raises(UnsupportedError, match=r"may be the model's[^$]*(ema|module)"):
        read(saved)
    with suppress(UnsupportedError):  # without states, the key 'model' decides
        checkpoint = read(saved, with_states=False)
        (name,) = (name for name in checkpoint.metadata.names(FROZEN) if name.endswith("first.weight"))
        assert torch.equal(values(checkpoint, name, FROZEN), model["first.weight"])


def test_averages_beside_what_is_called_the_model_are_left_out(tmp_path: Path) -> None:
    model, optim = state_dicts()
    averages = {**wrapped({name: value + 1 for name, value in model.items()}, "module."), "n_averaged": torch.ones(())}
    beside = {"app": {"model": model, "swa": averages, "ema": {"model": averages}}, "optim": optim}
    checkpoint = read(save(tmp_path / "saved", beside))
    assert torch.equal(values(checkpoint, "first.weight", MASTER), model["first.weight"])
    lists = read(save(tmp_path / "lists", {"net": model, "ema": {"shadow": list(model.values())}, "optim": optim}))
    assert torch.equal(values(lists, "first.weight", MASTER), model["first.weight"])


def test_copies_of_tied_weights_are_compared_and_not_restored_twice(tmp_path: Path) -> None:
    model, optim = state_dicts()
    saved = save(tmp_path / "saved", {"model": {**model, "head": model["first.weight"]}, "optim": optim})
    metadata = adopt_live_names(read(saved).metadata, ModelLayout(ties={"head": ("first.weight",)}))
    assert ("first.weight", MASTER) not in metadata.tensors and ("head", FROZEN) not in metadata.tensors
    assert [(copy.shape, copy.name) for copy in metadata.replicas["head", MASTER]] == [((5, 3), "head")]


def test_copies_of_tied_weights_that_differ_are_refused_by_their_names(tmp_path: Path) -> None:
    model, optim = state_dicts()
    head = model["first.weight"] + 1
    saved = save(tmp_path / "saved", {"model": {**model, "head": head}, "optim": optim})
    ties = {"head": ("first.weight",)}
    metadata = adopt_live_names(read(saved).metadata, ModelLayout(ties=ties))
    checks = compare_replicas(metadata, ModelLayout(), ReshardPlan(), ["head"], with_states=True)
    with pytest.raises(MismatchError, match="one in the live model") as caught:
        judge_drift(find_drift(metadata.files, checks, ReadOptions()), frozenset(), "strict")
    assert caught.value.parameter == "first.weight, head"
    assert re.match(r"first.weight, head: 2 copies, at most 1 .* \(__0_0.distcp\)", str(caught.value.found))


def test_objects_of_unknown_classes_are_noted_and_the_rest_is_read(tmp_path: Path) -> None:
    model, optim = state_dicts()
    saved = save(tmp_path / "saved", {"model": model, "optim": optim, "path": UnsafePickleError("never made")})
    checkpoint = read(saved)
    assert any(note.startswith("not read: path") for note in checkpoint.metadata.notes)
    assert checkpoint.training_state.checkpoint == {}
    first = read(save(tmp_path / "first", {"a": UnsafePickleError("never made"), "model": model, "optim": optim}))
    assert any(note.startswith("not read: a (") for note in first.metadata.notes)
    ((records,), (others,)) = ([file.records.nbytes for file in each.metadata.files] for each in (checkpoint, first))
    assert sorted(records) == sorted(others)  # each is there once


def test_a_storage_is_read_where_its_entry_is_in_the_file(tmp_path: Path) -> None:
    model, optim = state_dicts()
    odd = deque([torch.arange(3.0)._typed_storage()])  # which DCP does not take apart
    client = read(save(tmp_path / "saved", {"model": model, "optim": optim, "odd": odd})).training_state.checkpoint
    assert list(client["dcp"]["odd"][0]) == [0.0, 1.0, 2.0]


def test_states_of_integers_are_opaque_and_fresh_ones_left_out(tmp_path: Path) -> None:
    model, optim = state_dicts()
    for state in optim["state"].values():
        state["codes"] = state["exp_avg"].to(torch.uint8)
    saved = save(tmp_path / "saved", {"model": model, "optim": optim})
    assert set(read(saved).metadata.states.opaque) == {"codes"}
    schema = MetadataOptions().states
    metadata = read(saved, states=replace(schema, schema={"codes": "fresh"})).metadata
    assert not metadata.states.opaque and metadata.states.fresh == {"codes"}


def test_the_last_step_without_latest_is_one_that_was_finished(tmp_path: Path, folder: Path) -> None:
    for name in ("step-9", "step-10", "step-11"):
        os.makedirs(tmp_path / "titan" / name)
        if name != "step-11":
            save(tmp_path / "titan" / name, {"model": state_dicts()[0]})
    found = find_checkpoint(str(tmp_path / "titan"), None, prefer_universal=False)
    assert found is not None and (found.tag, found.format) == ("step-10", "dcp")
    (tmp_path / "latest").write_text("saved")
    found = find_checkpoint(str(tmp_path), None, prefer_universal=False)
    assert found is not None and found.folder == str(folder)
    os.rename(folder, tmp_path / "iter_0000020")
    os.remove(tmp_path / "latest")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    found = find_checkpoint(str(tmp_path), None, prefer_universal=False)
    assert found is not None and found.tag == "iter_0000020"


def store(metadata: Any, **changes: Any) -> None:
    """Change where one entry's bytes are."""
    index = next(index for index in metadata.storage_data if index.fqn == "model.first.weight")
    vars(metadata.storage_data[index]).update(changes)


def exchange(metadata: Any) -> None:
    """Two entries have each other's bytes."""
    first, second = (
        metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == name)]
        for name in ("model.first.weight", "model.first.bias")
    )
    assert first.relative_path == second.relative_path
    for name in ("offset", "length"):
        one, other = getattr(first, name), getattr(second, name)
        object.__setattr__(first, name, other)
        object.__setattr__(second, name, one)


def forget(metadata: Any) -> None:
    metadata.storage_data.popitem()


def reshape(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.first.weight"]
    entry.chunks[0].offsets = torch.Size((2, 0))


def retype(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.first.weight"]
    entry.properties.dtype = torch.uint4


def empty(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.first.weight"]
    entry.size = torch.Size((0, 1 << 40, 1 << 40))
    entry.chunks = []


DAMAGE: dict[str, tuple[Callable[[Any], object], type[ElasticCkptError], str]] = {
    "a file above the folder": (lambda m: store(m, relative_path="../x.distcp"), DamagedError, "not in this folder"),
    "an absolute path": (lambda m: store(m, relative_path="/etc/passwd"), DamagedError, "not in this folder"),
    "no file of this name": (lambda m: store(m, relative_path="__9_0.distcp"), DamagedError, "is missing"),
    "beyond the end": (lambda m: store(m, offset=1 << 40), DamagedError, "ends at byte"),
    "a negative offset": (lambda m: store(m, offset=-5), DamagedError, "offset that is none"),
    "another tensor": (exchange, DamagedError, "another tensor"),
    "another's bytes": (
        lambda m: store(m, offset=0),
        DamagedError,
        r"two entries are in the same bytes[^$]*(model\.first\.weight[^$]*behind|behind model\.first\.weight)",
    ),
    "sizes that no tensor has": (empty, DamagedError, "a shape that no tensor has"),
    "no place": (forget, DamagedError, "in which file"),
    "a chunk outside": (reshape, DamagedError, "a chunk of"),
    "compression": (lambda m: store(m, transform_descriptors=["zstd"]), UnsupportedError, "extensions"),
    "an unknown dtype": (retype, UnsupportedError, r"dtype that is not supported[^$]*model\.first\.weight[^$]*uint4"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_folders_are_refused(folder: Path, what: str) -> None:
    change, kind, text = DAMAGE[what]
    rewrite(folder, change)
    with guarded(64 << 20), pytest.raises(kind, match=text):
        read(folder)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo executed",)


@pytest.mark.parametrize("place", ["planner_data", "storage_data", "state_dict_metadata"])
def test_nothing_in_the_metadata_runs(folder: Path, place: str) -> None:
    rewrite(folder, lambda metadata: setattr(metadata, place, {"a": Evil()}))
    with guarded(64 << 20), pytest.raises(UnsafePickleError, match="safe globals"):
        read(folder)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("param_groups",) * 30_000, "30000 keys"),
        (("state",) * 65, "65 keys"),
        (("optim", "state." + "a." * 150_000), "longest of 300006 characters"),
    ],
)
def test_paths_that_no_state_dict_has_are_a_limit(folder: Path, path: tuple[str, ...], found: str) -> None:
    """Each of their beginnings would be looked at: 63 KB of such a path took 4 GiB."""
    rewrite(folder, lambda metadata: metadata.planner_data.update({next(iter(metadata.planner_data)): path}))
    with guarded(64 << 20), pytest.raises(UnsupportedError, match="a limit of elastic_ckpt") as caught:
        read(folder)
    assert found in str(caught.value)


PLACES = {
    "one path": (("model", "first.weight"), ("model", "first.weight")),
    "a number and its text": (("model", 1), ("model", "1")),
    "one in the other": (("model", "x"), ("model", "x", "y")),
    "the other in one": (("note", "x", 0), ("note", "x")),
}


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("names", [("model.first.weight", "model.first.bias"), ("note", "model.first.bias")])
def test_two_entries_at_one_place_are_damage(folder: Path, what: str, names: tuple[str, str]) -> None:
    """One of them alone would be read, and nobody told."""
    rewrite(folder, lambda metadata: metadata.planner_data.update(zip(names, PLACES[what], strict=True)))
    with pytest.raises(DamagedError, match="at one place") as caught:
        read(folder)
    assert caught.value.parameter in names and caught.value.file == str(folder / ".metadata")
    assert not verify(str(folder), None, ElasticConfig()).ok


@pytest.mark.parametrize("raw", [b"", b"\x80\x04.", pickle.dumps(7), pickle.dumps({"state_dict_metadata": {}})])
def test_noise_for_metadata_is_damage(folder: Path, raw: bytes) -> None:
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(DamagedError, match=r"unreadable[^$]*pickle that torch.distributed.checkpoint wrote"):
        read(folder)


def test_mutations_of_the_metadata_are_read_or_refused(folder: Path) -> None:
    path, random = folder / ".metadata", Random(11)
    sound = path.read_bytes()
    for _ in range(300):
        raw = bytearray(sound)
        for _ in range(random.choice((1, 1, 2, 8))):
            raw[random.randrange(len(raw))] = random.randrange(256)
        path.write_bytes(raw[: random.choice((len(raw), len(raw), random.randrange(len(raw))))])
        with guarded(64 << 20), suppress(ElasticCkptError):
            read(folder)


def test_files_that_are_newer_than_the_metadata_are_warned_of(folder: Path) -> None:
    assert read(folder).metadata.warnings == ()
    (path,) = folder.glob("*.distcp")
    os.utime(path, (0, os.path.getmtime(folder / ".metadata") + 600))
    (warning,) = read(folder).metadata.warnings
    assert "a later save into it did not finish" in warning and path.name in warning


def test_many_chunks_are_no_attack(folder: Path) -> None:
    """Keys of stand-ins cannot collide, and a chunk is a dozen containers of few bytes each."""

    def grow(metadata: Any) -> None:
        entry, index = metadata.state_dict_metadata["note"], next(iter(metadata.storage_data))
        for info in metadata.storage_data.values():
            object.__setattr__(info, "relative_path", "__1_0.distcp")
        for number in range(30_000):
            metadata.state_dict_metadata[f"x{number}"] = entry
            metadata.storage_data[replace(index, fqn=f"x{number}", offset=None)] = _StorageInfo(
                "__0_0.distcp", 9 * number, 9
            )

    rewrite(folder, grow)
    contents = read_dcp_metadata(str(folder))
    assert len(contents.paths) > 30_000
    assert len(sort_entries(contents, str(folder)).others) > 30_000


def test_values_are_read_of_what_is_wanted_alone(folder: Path) -> None:
    contents = read_dcp_metadata(str(folder))
    ((name, items),) = contents.files.items()
    file = read_dcp_file(str(folder / name), name, contents, {"note"})
    assert file.values == {"note": "hello"} and len(file.byte_offsets) == len(items)
    assert [at == -1 for at in file.byte_offsets] == [item.sizes is None for item in items]


@pytest.mark.parametrize("rows", [6, 1 << 40, 1 << 60])
@pytest.mark.parametrize("name", ["first.weight", "last.weight", "ticks"])
def test_a_tensor_that_is_larger_than_its_chunks_is_named(tmp_path: Path, rows: int, name: str) -> None:
    """Not as one whose bytes are those of others."""
    model, optimizer = state_dicts()
    folder = save(tmp_path / "step-5", {"model": model, "optim": optimizer})

    def grow(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[f"model.{name}"]
        entry.size = torch.Size((rows, *entry.size[1:]))

    rewrite(folder, grow)
    with pytest.raises(DamagedError, match="chunks of a tensor do not cover it") as caught:
        read(folder)
    assert caught.value.parameter == f"model.{name}" and caught.value.file == str(folder / ".metadata")
    assert str(caught.value.found).endswith("in 1 chunk") and caught.value.remedy
    (finding,) = verify(str(folder), None, ElasticConfig()).findings
    assert finding.parameter == f"model.{name}"
