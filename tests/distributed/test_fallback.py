"""The net under elastic_ckpt: where it does not understand a folder at the topology that saved it, DeepSpeed loads it.

And what must not fall into the net: files that are damaged or of another save, which DeepSpeed would load all the same.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import damage
from tests.distributed.conftest import Launch
from tests.distributed.facts import OWN_LOADER, Refused
from tests.distributed.model import Setup

SETUPS = [Setup(1), Setup(2, "bf16"), Setup(3), Setup(3, "bf16")]
MODEL = "mp_rank_00_model_states.pt"
MODELS3 = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)]
REQUIRE = (("elastic_checkpoint", {"mode": "require"}),)
CONTRADICTION = {"tp_degree": 2, "pp_degree": 3}

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on two ranks; the same with other data, and a step shorter."""
    folders = {}
    for name, more in {"run": {}, "other data": {"first": 30}, "shorter": {"steps": 3}}.items():
        folders[name] = tmp_path_factory.mktemp("fallback")
        setups = SETUPS if name == "run" else [Setup(1), Setup(3)]
        launch(2, "save", {"folder": str(folders[name]), "setups": setups, **more})
    return folders


def models_of(setup: Setup) -> list[str]:
    return MODELS3 if setup.stage == 3 else [MODEL]


def optimizer_of(setup: Setup, rank: int) -> str:
    return ("bf16_" if setup.precision == "bf16" else "") + damage.OPTIMIZER.format(rank)


def in_all(names: list[str], change: Callable[[dict], Any]) -> Change:
    """The same change in each of these files."""

    def apply(copy: Path) -> None:
        for name in names:
            damage.edit(name, change)(copy)

    return apply


def unzip(copy: Path) -> None:
    """Write every file as ``"checkpoint_serialization": false`` would have."""
    for file in damage.tag(copy).glob("*.pt"):
        torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)


def changed(source: Path, copy: Path, *changes: Change) -> str:
    shutil.copytree(source, copy)
    for change in changes:
        change(copy)
    return str(copy)


def contradict(tree: dict[str, Any]) -> None:
    tree["checkpoint_parallel_dimensions"] = dict(CONTRADICTION)


#: What elastic_ckpt does not understand, and what the line about DeepSpeed's own loader names.
NOT_UNDERSTOOD: dict[str, tuple[Callable[[list[str]], Change] | None, str]] = {
    "degrees that contradict the files": (lambda models: in_all(models, contradict), "contradict each other"),
    "no buffer_names": (lambda models: in_all(models, lambda tree: tree.pop("buffer_names")), "lacks an entry"),
    "no ds_version": (lambda models: in_all(models, lambda tree: tree.pop("ds_version")), "lacks an entry"),
    "an exception that nobody foresaw": (None, "what nobody foresaw"),
}


def test_what_elastic_ckpt_does_not_understand_is_loaded_where_it_was_saved(
    launch: Launch, saved: dict[str, Path], tmp_path: Path
) -> None:
    cases = []
    for setup in SETUPS:
        source = saved["run"] / f"{setup.name}-dp2"
        for number, (name, (change, words)) in enumerate(NOT_UNDERSTOOD.items()):
            changes = [change(models_of(setup))] if change else []
            folder = changed(source, tmp_path / f"{setup.name}-{number}", *changes)
            case = {"name": name, "setup": setup, "folder": folder, "truth": str(source), "words": words}
            cases.append({**case, "fails": change is None})
    loads = launch(2, "fallback_jobs.left", cases)
    for number, load in enumerate(loads):
        assert load.report is None, load.where
        assert load.differences == {} and load.client_state["note"] == "hello", load.where
        assert load.loss_gap == 0, load.where
        lines = [line for line in load.lines if line.startswith(OWN_LOADER)]
        assert len(lines) == (number < len(cases)), "one line, of the first rank"
        assert all(load.case["words"] in line for line in lines), (load.where, lines)


def of_run(run: str) -> Callable[[Setup, dict[str, Path]], Change]:
    """The second rank's shard of another run."""

    def change(setup: Setup, saved: dict[str, Path]) -> Change:
        shard = optimizer_of(setup, 1)
        return damage.replace_by(shard, saved[run] / f"{setup.name}-dp2" / "step4" / shard)

    return change


def no_names(setup: Setup, saved: dict[str, Path]) -> Change:
    return in_all(models_of(setup), lambda tree: tree.pop("buffer_names"))


def unzipped(setup: Setup, saved: dict[str, Path]) -> Change:
    return unzip


def truncated(setup: Setup, saved: dict[str, Path]) -> Change:
    return damage.truncate(optimizer_of(setup, 1), 0.6)


def one_missing(setup: Setup, saved: dict[str, Path]) -> Change:
    return damage.remove(optimizer_of(setup, 1))


def other_scheduler(setup: Setup, saved: dict[str, Path]) -> Change:
    """That of DeepSpeed's schedules, which the live StepLR would load without a look."""
    return in_all(models_of(setup), lambda tree: tree.update(lr_scheduler={"last_batch_iteration": 3}))


def no_scheduler(setup: Setup, saved: dict[str, Path]) -> Change:
    return in_all(models_of(setup), lambda tree: tree.update(lr_scheduler=None))


def of_masters(change: Callable[[list[torch.Tensor]], Any]) -> Callable[[Setup, dict[str, Path]], Change]:
    """Masters of the second rank, which DeepSpeed would fill up with zeros."""

    def of(setup: Setup, saved: dict[str, Path]) -> Change:
        entry = "fp32_flat_groups" if setup.stage == 3 else "single_partition_of_fp32_groups"
        return damage.edit(optimizer_of(setup, 1), lambda tree: change(tree["optimizer_state_dict"][entry]))

    return of


def of_optimizer(**entries: Any) -> Callable[[Setup, dict[str, Path]], Change]:
    """Entries of the second rank's optimizer."""

    def of(setup: Setup, saved: dict[str, Path]) -> Change:
        return damage.edit(optimizer_of(setup, 1), lambda tree: tree["optimizer_state_dict"].update(entries))

    return of


def scale(**values: Any) -> Callable[[Setup, dict[str, Path]], Change]:
    """Attributes of the loss scaler of each rank, which is pickled in every precision."""

    def of(setup: Setup, saved: dict[str, Path]) -> Change:
        def change(tree: dict[str, Any]) -> None:
            vars(tree["optimizer_state_dict"]["loss_scaler"]).update(values)

        return in_all([optimizer_of(setup, 0), optimizer_of(setup, 1)], change)

    return of


def cut(masters: list[torch.Tensor], at: int, numel: int) -> None:
    masters[at] = masters[at].flatten()[:numel].clone()


CUSTOM = {"custom_load_fn": True}
REQUIRED = {"setup": Setup(1, config=REQUIRE)}
#: Saved setup, what happens to a copy, how it is asked for, the kind of error, and what it names beside the shard.
REFUSED: dict[str, tuple[Setup, list[Any], dict[str, Any], str, list[str]]] = {
    **{
        f"z{setup.stage}: {name}": (setup, *row)
        for setup in (Setup(1), Setup(3))
        for name, row in {
            "a shard of another step": ([of_run("shorter")], {}, "DamagedError", [optimizer_of(setup, 1), "another save"]),
            "a truncated shard": ([truncated], {}, "DamagedError", [optimizer_of(setup, 1), "truncated"]),
            "a missing shard": ([one_missing], {}, "LayoutError", [optimizer_of(setup, 1), "missing"]),
            "masters of none": ([of_masters(lambda each: cut(each, -1, 0))], {}, "DamagedError", [optimizer_of(setup, 1)]),
            "half of the masters": ([of_masters(lambda each: cut(each, 0, each[0].numel() // 2))], {}, "DamagedError", [optimizer_of(setup, 1)]),
            "an infinite scale": ([scale(cur_scale=math.inf)], {}, "DamagedError", ["cur_scale"]),
            "a text for a scale": ([scale(cur_scale="32")], {}, "DamagedError", ["cur_scale"]),
            # what would be left to DeepSpeed, were it not for the damage
            "no buffer_names, masters of none": ([no_names, of_masters(lambda each: cut(each, -1, 0))], {}, "DamagedError", []),
            "no buffer_names, an infinite scale": ([no_names, scale(cur_scale=math.inf)], {}, "DamagedError", []),
            "no buffer_names, a scaler with another method": ([no_names, scale(update_scale=OrderedDict)], {}, "DamagedError", []),
            "no buffer_names, another step": ([no_names, of_run("shorter")], {}, "UnknownLayoutError", ["buffer_names"]),
            "no zip archives, another step": ([of_run("shorter"), unzipped], {}, "DamagedError", [optimizer_of(setup, 1), "another save"]),
            "no zip archives, truncated": ([unzipped, truncated], {}, "DamagedError", [optimizer_of(setup, 1), "truncated"]),
            "no zip archives, one missing": ([unzipped, one_missing], {}, "LayoutError", [optimizer_of(setup, 1), "missing"]),
        }.items()
    },
    # in ZeRO-3 no other file has the weights that it could be compared with
    "z1: a shard of another run": (Setup(1), [of_run("other data")], {}, "DamagedError", [optimizer_of(Setup(1), 1), "weights"]),
    "z1: custom_load_fn, another step": (Setup(1), [of_run("shorter")], CUSTOM, "UnsupportedError", ["custom_load_fn"]),
    "z1: custom_load_fn, one missing": (Setup(1), [one_missing], CUSTOM, "UnsupportedError", ["custom_load_fn"]),
    "z1: custom_load_fn, another scheduler": (Setup(1), [other_scheduler], CUSTOM, "UnsupportedError", ["custom_load_fn"]),
    "z1: custom_load_fn, no scheduler": (Setup(1), [no_scheduler], CUSTOM, "UnsupportedError", ["custom_load_fn"]),
    "z1: paddings of other parameters": (Setup(1), [of_optimizer(param_alignment_paddings=[[], []])], {}, "DamagedError", ["param_alignment_paddings"]),
    "z1: partitions of more ranks": (Setup(1), [of_optimizer(partition_count=[5, 1])], {}, "DamagedError", []),
    # with "mode": "require" nothing is left to DeepSpeed
    "z1: no buffer_names, required": (Setup(1), [no_names], REQUIRED, "UnknownLayoutError", ["buffer_names"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(launch: Launch, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refused]:
    """Every case of :data:`REFUSED` at the topology that saved it."""
    cases = []
    for name, (setup, changes, more, *_) in REFUSED.items():
        copy = tmp_path_factory.mktemp("refused") / "copy"
        changed(saved["run"] / f"{setup.name}-dp2", copy, *(change(setup, saved) for change in changes))
        cases.append({"name": name, "folder": str(copy), "setup": setup, **more})
    return {refused.case["name"]: refused for refused in launch(2, "refusal_jobs.refuse", cases)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_damaged_or_of_another_save_is_not_left_to_deepspeed(name: str, refusals: dict[str, Refused]) -> None:
    *_, error, words = REFUSED[name]
    refused = refusals[name]
    (text,) = refused.texts
    assert error in refused.kinds, text
    assert [word for word in words if word not in text] == [], text
    assert refused.changed == set()
    assert not any(line.startswith(OWN_LOADER) for line in refused.lines)


def test_files_that_are_no_zip_archives_are_loaded_at_any_topology(
    launch: Launch, saved: dict[str, Path], tmp_path: Path
) -> None:
    cases = []
    for was, now in ((Setup(1), Setup(3)), (Setup(3), Setup(2)), (Setup(2, "bf16"), Setup(2, "bf16"))):
        source = saved["run"] / f"{was.name}-dp2"
        folder = changed(source, tmp_path / was.name, unzip)
        cases.append({"name": was.name, "setup": now, "folder": folder, "truth": str(source), "fails": False})
    for load in launch(3, "fallback_jobs.left", cases):
        assert load.report is not None and load.differences == {}, load.where
        assert load.client_state["note"] == "hello"


class Marker:
    """Leaves a folder behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def without_names(tree: dict[str, Any]) -> None:
    """A model-states file that elastic_ckpt leaves to DeepSpeed, which does not need the names of buffers."""
    del tree["buffer_names"]


#: Arguments of loads that DeepSpeed's own loader does in its place.
WEIGHTS_ALONE = [{"load_module_only": True}, {"load_optimizer_states": False}]


def test_what_cannot_be_read_is_handed_over_without_the_code_behind_it(
    launch: Launch, saved: dict[str, Path], tmp_path: Path
) -> None:
    """In any file that DeepSpeed may open, whichever elastic_ckpt reads first."""
    cases = []
    for setup in (each for each in SETUPS if each.stage < 3):
        for with_code in ([], [MODEL], [optimizer_of(setup, 1)]):
            marker = tmp_path / f"ran-{len(cases)}"
            changes = [damage.edit(MODEL, without_names)]
            changes += [in_all(with_code, lambda tree, at=marker: tree.update(and_then=Marker(at)))]
            folder = changed(saved["run"] / f"{setup.name}-dp2", tmp_path / f"copy-{len(cases)}", *changes)
            case = {"setup": setup, "folder": folder, "code": bool(with_code), "marker": marker}
            cases += [{**case, "arguments": arguments} for arguments in (*WEIGHTS_ALONE, {})]
    for found in launch(2, "refusal_jobs.refuse", cases):
        (text,) = found.texts
        if not found.case["code"]:
            assert found.kinds == (), (found.case, text)
            assert any(line.startswith(OWN_LOADER) for line in found.lines)
            continue
        assert found.changed == set() and found.kinds, (found.case, text)
        assert "posix.mkdir" in text and '"trust_pickle": true' in text
        assert not found.case["marker"].exists()


def test_a_file_that_is_exchanged_after_it_was_checked_runs_nothing(
    launch: Launch, saved: dict[str, Path], tmp_path: Path
) -> None:
    marker, setup = tmp_path / "ran", SETUPS[0]
    folder = changed(saved["run"] / f"{setup.name}-dp2", tmp_path / "copy", damage.edit(MODEL, without_names))
    hostile = changed(
        Path(folder), tmp_path / "hostile", damage.edit(MODEL, lambda tree: tree.update(y=Marker(marker)))
    )
    exchanged = {"from": str(Path(hostile) / "step4" / MODEL), "to": str(Path(folder) / "step4" / MODEL)}
    launch(2, "fallback_jobs.exchanged", {"setup": setup, "folder": folder, **exchanged})
    assert not marker.exists()
