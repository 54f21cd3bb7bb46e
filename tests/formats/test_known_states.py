"""States of known names that no optimizer keeps are damage, whatever the format, for a load and for each command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.tools.inspection import inspect_folder
from elastic_ckpt.tools.opened import open_folder
from elastic_ckpt.tools.verification import verify
from tests.distributed.malformed import outcome, planned
from tests.formats.dcp_folders import read, save, state_dicts
from tests.formats.universal_folders import written

safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file

#: In the place of any state, of which ``value`` is what an optimizer keeps there.
ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "None": lambda value: None,
    "True": lambda value: True,
    "-1": lambda value: -1,
    "nan": lambda value: float("nan"),
    "inf": lambda value: float("inf"),
    "text": lambda value: "x",
    "complex": lambda value: 1 + 2j,
    "[None]": lambda value: [None],
    "a number in a dictionary": lambda value: {"param": 4},
    "None in a dictionary": lambda value: {"param": None},
    "a set": lambda value: {1},
    "bool": lambda value: value.to(torch.bool),
    "complex64": lambda value: value.to(torch.complex64),
    "float8": lambda value: value.to(torch.float8_e4m3fn),
    "three": lambda value: torch.arange(3.0),
}
#: In the place of a moment alone: steps may be integers.
ODD_MOMENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "7": lambda value: 7,
    "1.5": lambda value: 1.5,
    "int8": lambda value: value.to(torch.int8),
    "int64": lambda value: value.to(torch.int64),
    "a number's tensor": lambda value: torch.tensor(3.0),
    "an element less": lambda value: value.reshape(-1)[:-1].clone(),
    "a dimension more": lambda value: value[None].clone(),
}
CASES = [*product(("exp_avg", "exp_avg_sq", "step"), ODD), *product(("exp_avg", "exp_avg_sq"), ODD_MOMENTS)]
NAME = "first.weight"


def _dcp(folder: Path, key: str, odd: Callable[[torch.Tensor], Any], flat: bool = False) -> None:
    model, optim = state_dicts(flat)
    if flat:
        entry = f"state.{NAME}.{key}"
        optim[entry] = odd(optim[entry])
    else:
        states = optim["state"][NAME]
        states[key] = odd(states[key])
    save(folder, {"model": model, "optim": optim})


def _flattened(folder: Path, key: str, odd: Callable[[torch.Tensor], Any]) -> None:
    _dcp(folder, key, odd, flat=True)


def _universal(folder: Path, key: str, odd: Callable[[torch.Tensor], Any]) -> None:
    folder.mkdir()
    shapes = {NAME: (5, 3), "first.bias": (5,)}
    zero = written(folder, shapes=shapes)
    for name, shape in shapes.items():
        (zero / name / "trail.pt").unlink()
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.zeros(shape), "cat_dim": 0}, zero / name / f"{moment}.pt")
        torch.save(torch.tensor(7.0), zero / name / "step.pt")
    (folder / "latest").write_text("tag")
    value = torch.tensor(7.0) if key == "step" else torch.zeros(5, 3)
    made = odd(value)
    torch.save({"param": made} if isinstance(made, torch.Tensor) and key != "step" else made, zero / NAME / f"{key}.pt")


def _safetensors(folder: Path, key: str, odd: Callable[[torch.Tensor], Any]) -> None:
    """What ``export`` writes, with another tensor, or another number among the scalars of the file's metadata."""
    model, optim = state_dicts()
    source = save(folder.with_name("source"), {"model": model, "optim": optim})
    elastic_ckpt.export(source, folder, optimizer=True, progress=False)
    shutil.rmtree(source)
    (path,) = folder.glob("optimizer*.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    made = odd(optim["state"][NAME][key])
    if isinstance(made, torch.Tensor) and made.dtype == torch.float32 and key == "step" and not made.shape:
        made = made.item()
    tensors.pop(f"{key}.{NAME}", None)
    scalars = json.loads(facts["scalars"])
    if isinstance(made, torch.Tensor):
        scalars[NAME].pop(key, None)
        tensors[f"{key}.{NAME}"] = made.contiguous()
    else:
        scalars[NAME][key] = made
    save_file(tensors, path, metadata={**facts, "scalars": json.dumps(scalars)})


WRITERS = {"dcp": _dcp, "flattened dcp": _flattened, "universal": _universal, "safetensors": _safetensors}
#: What JSON or safetensors have no word for.
NOT_WRITTEN = {"complex", "a set", "complex64"}


def _odd_folders(form: str, tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """Key, way and folder of each case that the format can write; the folder is removed before the next one."""
    for number, (key, way) in enumerate(CASES):
        if form == "safetensors" and way in NOT_WRITTEN:
            continue
        folder = tmp_path / str(number)
        WRITERS[form](folder, key, {**ODD, **ODD_MOMENTS}[way])
        yield key, way, folder
        shutil.rmtree(folder)


def _commands(folder: Path) -> dict[str, tuple[str, Any]]:
    text, config = str(folder), ElasticConfig()
    return {
        "inspect": outcome(lambda: inspect_folder(text, None, config)["ok"]),
        "plan": outcome(lambda: planned(text, 1)),
        "verify": outcome(lambda: verify(text, None, config).ok),
        "read": outcome(lambda: open_folder(text, None, config)),
    }


@pytest.mark.parametrize("form", WRITERS)
def test_what_an_optimizer_keeps_is_read_by_each_command(form: str, tmp_path: Path) -> None:
    for key in ("exp_avg", "step"):
        folder = tmp_path / key
        WRITERS[form](folder, key, lambda value: value)
        found = _commands(folder)
        assert {name: what for name, (what, _) in found.items()} == dict.fromkeys(found, "ok")
        assert found["inspect"][1] is True and found["verify"][1] is True


@pytest.mark.parametrize("form", WRITERS)
def test_no_command_takes_what_no_optimizer_keeps(form: str, tmp_path: Path) -> None:
    problems = []
    for key, way, folder in _odd_folders(form, tmp_path):
        found = _commands(folder)
        refused = {name: what for name, (what, _) in found.items() if name in ("plan", "read")}
        is_refused = refused == dict.fromkeys(refused, "refused")
        if not is_refused or found["inspect"] == ("ok", True) or found["verify"] != ("ok", False):
            problems.append(f"{key} <- {way}: {found}")
        error = found["plan"][1]
        if is_refused and isinstance(error, DamagedError) and not (error.file and error.found):
            problems.append(f"{key} <- {way}: names no file: {error}")
    assert problems == []


@pytest.mark.parametrize("form", WRITERS)
def test_weights_alone_are_read_beside_states_of_a_run_that_diverged(form: str, tmp_path: Path) -> None:
    problems = []
    for key, way, folder in _odd_folders(form, tmp_path):
        what, found = outcome(lambda folder=folder: open_folder(str(folder), None, ElasticConfig(), with_states=False))
        is_number = key == "step" and way in ("nan", "inf", "-1")
        allowed = {"ok"} if is_number and form == "universal" else {"ok", "refused"}  # steps are the counters
        if what not in allowed:
            problems.append(f"{key} <- {way}: {what}: {found}")
    assert problems == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64], ids=str)
def test_the_error_names_parameter_and_file_and_is_settled_by_the_config(dtype: torch.dtype, tmp_path: Path) -> None:
    _dcp(tmp_path / "saved", "exp_avg", lambda value: value.to(dtype))
    with pytest.raises(DamagedError) as caught:
        read(tmp_path / "saved")
    assert (caught.value.parameter, Path(str(caught.value.file)).suffix) == (NAME, ".distcp")
    assert str(dtype).removeprefix("torch.") in str(caught.value.found)
    assert read(tmp_path / "saved", states=StateOptions({"exp_avg": "fresh"})).metadata.states.fresh == {"exp_avg"}
    assert read(tmp_path / "saved", with_states=False).metadata.parameters


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64], ids=str)
def test_masters_that_are_no_real_numbers_are_damage(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optim = state_dicts()
    model[NAME] = model[NAME].to(dtype)
    folder = save(tmp_path / "saved", {"model": model, "optim": optim})
    with pytest.raises(DamagedError) as caught:
        read(folder)
    assert caught.value.parameter == NAME
    assert not verify(str(folder), None, ElasticConfig()).ok


def test_a_momentum_that_sgd_does_not_use_is_none_in_each_format(tmp_path: Path) -> None:
    model, optim = state_dicts()
    for name, states in optim["state"].items():
        momentum, _ = states.pop("exp_avg"), states.pop("exp_avg_sq")
        states["momentum_buffer"] = None if name == NAME else momentum
    folder = save(tmp_path / "saved", {"model": model, "optim": optim})
    metadata = open_folder(str(folder), None, ElasticConfig()).metadata
    assert not metadata.states.opaque
    elastic_ckpt.export(folder, tmp_path / "out", optimizer=True, progress=False)
    again = open_folder(str(tmp_path / "out"), None, ElasticConfig()).metadata
    assert dict(metadata.parameters[NAME].scalars)["momentum_buffer"] is None
    assert dict(again.parameters[NAME].scalars).get("momentum_buffer") is None
