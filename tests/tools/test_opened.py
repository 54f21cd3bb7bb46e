"""Opening checkpoints and configs outside a training job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from elastic_ckpt.errors import ConfigError, ElasticCkptError, NotFoundError, SavedOverError
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.tools import opened
from elastic_ckpt.tools.opened import config_of, locate, open_folder
from tests.formats.dcp_folders import save, state_dicts


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([1], "is not a JSON object"),
        ({"elastic_checkpoint": 5}, "must be an object"),
        ({"elastic_checkpoint": ["mode"]}, "must be an object"),
        ({"elastic_checkpoint": {"mod": "auto"}}, 'unknown key "mod"'),
    ],
)
def test_a_config_of_another_form_is_an_error_that_says_so(config: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        config_of(path, tp_preset="bloom")


def test_the_command_line_overrides_the_config_where_it_says_something(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "elastic_checkpoint": {"tp_preset": "bloom"}}))
    assert config_of(path, tp_preset=None).tp_preset == "bloom"
    assert config_of(path, tp_preset="gpt-neox").tp_preset == "gpt-neox"
    assert config_of(None) == config_of(None, tp_preset=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        config_of(tmp_path / "none.json")


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        locate(str(tmp_path), None)
    assert caught.value.file == str(tmp_path) and "latest" in str(caught.value.expected)


def test_the_output_folder_of_a_trainer_is_that_of_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (9, 60):
        tag = tmp_path / f"checkpoint-{step}" / f"global_step{step}"
        tag.mkdir(parents=True)
        (tag / "mp_rank_00_model_states.pt").touch()
        (tag.parent / "latest").write_text(tag.name)
    (tmp_path / "checkpoint-70").mkdir()  # which died while it was saving
    (tmp_path / "runs").mkdir()
    assert locate(str(tmp_path), None).folder == str(tmp_path / "checkpoint-60" / "global_step60")
    for tag in ("checkpoint-9", "global_step9"):
        assert locate(str(tmp_path), tag).folder == str(tmp_path / "checkpoint-9" / "global_step9")
    with pytest.raises(NotFoundError) as caught:
        locate(str(tmp_path), "checkpoint-70")
    assert caught.value.found == "no checkpoint-70, but checkpoint-60, checkpoint-9"


def safetensors(folder: Path) -> None:
    folder.mkdir()
    files = {f"model-{number}-of-00002.safetensors": number for number in ("00001", "00002")}
    for file, name in files.items():
        save_file({name: torch.ones(3)}, folder / file)
    index = {"weight_map": {name: file for file, name in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def dcp(folder: Path) -> None:
    save(folder, dict(zip(("model", "optim"), state_dicts(), strict=True)))


@pytest.mark.parametrize("error", [None, ElasticCkptError("files do not fit together")])
@pytest.mark.parametrize("make", [safetensors, dcp])
def test_no_file_of_a_folder_may_move_while_its_metadata_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], error: ElasticCkptError | None
) -> None:
    folder = tmp_path / "saved"
    make(folder)
    assert open_folder(str(folder), None, config_of(None)).metadata.tensors
    for path in folder.iterdir():

        def read(found: Any, options: Any, path: Path = path) -> Any:
            checkpoint = read_checkpoint(found, options)
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
            if error is not None:
                raise error
            return checkpoint

        monkeypatch.setattr(opened, "read_checkpoint", read)
        with pytest.raises(SavedOverError) as caught:
            open_folder(str(folder), None, config_of(None))
        assert caught.value.file == str(path)


@pytest.mark.parametrize("folders", [[], [""], "", ["", ""]], ids=repr)
def test_no_folder_is_no_folder(folders: Any) -> None:
    with pytest.raises(ConfigError, match="no folder is given"), opened.seen_together(folders):
        raise AssertionError
