"""The net under elastic_ckpt: where it does not understand a folder at the topology that saved it, DeepSpeed loads it.

And what must not fall into the net: files that are damaged or of another save, which DeepSpeed would load all the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import damage
from tests.distributed.conftest import Launch
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
        setups = [setup.as_json() for setup in (SETUPS if name == "run" else [Setup(1), Setup(3)])]
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


def test_what_elastic_ckpt_does_not_understand_is_loaded_where_it_was_saved(
    launch: Launch, saved: dict[str, Path], tmp_path: Path
) -> None:
    cases = []
    for setup in SETUPS:
        source, models = saved["run"] / f"{setup.name}-dp2", models_of(setup)
        doctored: list[tuple[str, str, list[Change]]] = [
            ("degrees that contradict the files", "contradict each other", [in_all(models, contradict)]),
            ("no buffer_names", "lacks an entry", [in_all(models, lambda tree: tree.pop("buffer_names"))]),
            ("no ds_version", "lacks an entry", [in_all(models, lambda tree: tree.pop("ds_version"))]),
            ("an exception that nobody foresaw", "what nobody foresaw", []),
            ("no zip archives", "legacy (non-zip) pickle archive", [unzip]),
        ]
        for number, (name, says, changes) in enumerate(doctored):
            folder = changed(source, tmp_path / f"{setup.name}-{number}", *changes)
            case = {"name": f"{setup.name}: {name}", "folder": folder, "truth": str(source), "says": says}
            cases.append({**case, "setup": setup.as_json(), "fails": "nobody" in name})
    launch(2, "fallback_jobs.left", {"cases": cases})


def contradict(tree: dict[str, Any]) -> None:
    tree["checkpoint_parallel_dimensions"] = dict(CONTRADICTION)


def test_what_is_damaged_or_of_another_save_is_not_left_to_deepspeed(
    launch: Launch, saved: dict[str, Path], tmp_path: Path
) -> None:
    cases = []
    for setup in (Setup(1), Setup(3)):
        name = f"{setup.name}-dp2"
        source, shard = saved["run"] / name, optimizer_of(setup, 1)

        def foreign(run: str, name: str = name, shard: str = shard) -> Change:
            return damage.replace_by(shard, saved[run] / name / "step4" / shard)

        no_names = in_all(models_of(setup), lambda tree: tree.pop("buffer_names"))
        damages: list[tuple[str, list[Change], str, list[str]]] = [
            ("a shard of another step", [foreign("shorter")], "DamagedError", [shard, "another save"]),
            ("a truncated shard", [damage.truncate(shard, 0.6)], "DamagedError", [shard, "truncated"]),
            ("a missing shard", [damage.remove(shard)], "LayoutError", [shard, "missing"]),
            # what would be left to DeepSpeed, were it not for the damage
            ("no buffer_names, another step", [no_names, foreign("shorter")], "LayoutError", ["buffer_names"]),
            ("no zip archives, another step", [foreign("shorter"), unzip], "UnzippedError", ["non-zip"]),
            ("no zip archives, truncated", [unzip, damage.truncate(shard, 0.6)], "UnzippedError", ["non-zip"]),
            ("no zip archives, one missing", [unzip, damage.remove(shard)], "UnzippedError", ["non-zip"]),
        ]
        if setup.stage < 3:  # in ZeRO-3 no other file has the weights that it could be held against
            damages.append(("a shard of another run", [foreign("other data")], "DamagedError", [shard, "weights"]))
        for number, (what, changes, error, says) in enumerate(damages):
            folder = changed(source, tmp_path / f"{name}-{number}", *changes)
            case = {"name": f"{name}: {what}", "folder": folder, "error": error, "says": says}
            cases.append({**case, "setup": setup.as_json()})
        if setup.stage < 3:
            for number, change in enumerate([foreign("shorter"), damage.remove(shard)]):
                folder = changed(source, tmp_path / f"{name}-custom-{number}", change)
                case = {"name": f"{name}: custom_load_fn {number}", "folder": folder, "custom_load_fn": True}
                cases.append(
                    {**case, "error": "UnsupportedError", "says": ["custom_load_fn"], "setup": setup.as_json()}
                )
    cases += required(saved["run"], tmp_path)
    launch(2, "fallback_jobs.refused", {"cases": cases})


def required(run: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """With ``"mode": "require"`` the net is taken away."""
    source = run / f"{Setup(1).name}-dp2"
    no_names = changed(source, tmp_path / "require-0", in_all([MODEL], lambda tree: tree.pop("buffer_names")))
    not_zipped = changed(source, tmp_path / "require-1", unzip)
    setup = Setup(1, config=REQUIRE).as_json()
    return [
        {"name": "require", "folder": no_names, "error": "LayoutError", "says": ["buffer_names"], "setup": setup},
        {"name": "require", "folder": not_zipped, "error": "UnzippedError", "says": ["non-zip"], "setup": setup},
    ]


def test_elsewhere_a_file_without_a_zip_archive_is_called_what_it_is(
    launch: Launch, saved: dict[str, Path], tmp_path: Path
) -> None:
    says = ["legacy (non-zip) pickle archive", "not supported yet", '"checkpoint_serialization": true']
    folder = changed(saved["run"] / f"{Setup(1).name}-dp2", tmp_path / "copy", unzip)
    case = {"name": "not zipped", "folder": folder, "error": "UnzippedError", "says": says}
    for ranks, setup in ((3, Setup(1)), (2, Setup(3))):
        launch(ranks, "fallback_jobs.refused", {"cases": [{**case, "setup": setup.as_json()}]})
