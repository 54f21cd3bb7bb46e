"""The list of DeepSpeed's private names in engines/versions.py, and that no other room uses any."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import elastic_ckpt
from elastic_ckpt.engines import versions as privates
from elastic_ckpt.engines.versions import PRIVATES, Privates
from elastic_ckpt.errors import UnsupportedError
from tests.source import missing

PACKAGE = Path(elastic_ckpt.__file__).parent


@pytest.mark.parametrize("listed", privates.needed(), ids=lambda listed: f"{listed.owner or listed.module}")
def test_deepspeed_still_has(listed: Privates) -> None:
    assert missing(listed) == []


def test_every_private_of_the_newest_version_is_needed_there() -> None:
    assert privates.needed() == list(PRIVATES)


@pytest.mark.parametrize(
    ("listed", "lacking"),
    [
        (Privates("runtime.engine", "DeepSpeedEngine", ("_config", "_no_such")), ["DeepSpeedEngine._no_such"]),
        (
            Privates("runtime.engine", "DeepSpeedEngine", ("load_checkpoint(tag)",)),
            ["DeepSpeedEngine.load_checkpoint(tag)"],
        ),
        (Privates("runtime.utils", "", ("partition_balanced(weights,num_parts)",)), []),
        (Privates("runtime.utils", "NoSuch", ("a",)), ["deepspeed.runtime.utils.NoSuch"]),
        (Privates("runtime.no_such", "", ("a",)), ["deepspeed.runtime.no_such"]),
    ],
)
def test_what_is_missing_or_takes_other_parameters_is_named(listed: Privates, lacking: list[str]) -> None:
    assert missing(listed) == lacking


class Owner:
    """An object of a live engine."""

    def __init__(self) -> None:
        self.ready, self.inner = True, SimpleNamespace(status=0)

    def refresh(self, index: int, late: bool = False) -> None: ...
    def wrapped(self, *args: object) -> None: ...


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("ready", True),
        ("inner.status", True),
        ("inner.gone", False),
        ("gone", False),
        ("refresh(index)", True),
        ("refresh()", True),
        ("refresh(index,sooner)", False),
        ("wrapped(index)", True),
    ],
)
@pytest.mark.parametrize("use", [privates.LOAD, privates.ZERO3])
def test_an_engine_is_refused_only_for_what_loading_into_it_needs(
    name: str, is_there: bool, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(privates, "PRIVATES", (Privates("any", "Owner", (name,), use=use),))
    engine = SimpleNamespace(optimizer=SimpleNamespace(part=Owner()), module=torch.nn.Linear(1, 1))
    if is_there or use == privates.ZERO3:
        privates.refuse_missing(engine, [privates.LOAD])
    else:
        with pytest.raises(UnsupportedError, match="lacks private names") as caught:
            privates.refuse_missing(engine, [privates.LOAD])
        assert f"Owner.{name}" in str(caught.value) and f"DeepSpeed {version('deepspeed')}" in str(caught.value)


def _private_attributes(source: str) -> list[str]:
    """Attributes with one leading underscore that are not of ``self``, ``cls`` or an imported module of the package."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in {"self", "cls", *modules} and ast.unparse(node) != "pickle._Pickler":  # of Python itself
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_privates_of_other_packages_are_touched_in_engines_and_patches_only() -> None:
    """But for functions of torch whose names stand in its archives, and argparse's in a file that can import nothing."""
    exempt = {"objects.py", "rebuilt_tensors.py", "_elastic_ckpt_flag.py"}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("engines", "patches") and path.name not in exempt:
            assert _private_attributes(path.read_text(encoding="utf-8")) == [], path


def test_argparse_has_what_the_flag_is_found_by() -> None:
    assert callable(argparse.ArgumentParser._get_option_tuples)
    assert argparse.ArgumentParser()._option_string_actions.keys() == {"-h", "--help"}


def test_the_guard_sees_privates_whatever_the_variable_is_called() -> None:
    assert _private_attributes("module._layer_specs") == ["line 1: module._layer_specs"]
    assert _private_attributes("engine.optimizer._hp_mapping") != []
    assert _private_attributes("self._mine + cls._ours + x.__dict__") == []


@pytest.mark.parametrize("room", ["core", "sharding", "planning"])
def test_pure_rooms_can_be_imported_without_torch_and_deepspeed(room: str) -> None:
    script = (
        "import sys, pkgutil, importlib\n"
        "for name in ('torch', 'deepspeed'): sys.modules[name] = None\n"
        f"import elastic_ckpt.{room} as package\n"
        "names = [info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + '.')]\n"
        "assert names, package\n"
        "[importlib.import_module(name) for name in names]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
