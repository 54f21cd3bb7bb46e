"""Installing and uninstalling the patch of DeepSpeedEngine.load_checkpoint."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

import elastic_ckpt
from elastic_ckpt import install, uninstall
from elastic_ckpt.engines.training_state import LoadArguments
from elastic_ckpt.errors import ConfigError, NotFoundError
from elastic_ckpt.load import hook
from elastic_ckpt.load.agreed_config import agreed_config

OWN = "load_checkpoint"


@pytest.fixture(autouse=True)
def original() -> Iterator[Any]:
    """DeepSpeed's own method, which is in place before and after each test."""
    uninstall()
    function = vars(DeepSpeedEngine)[OWN]
    yield function
    uninstall()
    assert vars(DeepSpeedEngine)[OWN] is function
    assert not hasattr(DeepSpeedEngine, "elastic_report")


def test_importing_the_package_patches_nothing(original: Any) -> None:
    assert original.__module__ == "deepspeed.runtime.engine"
    assert inspect.unwrap(original) is original
    assert not hasattr(DeepSpeedEngine, "elastic_report")


def test_install_replaces_the_method_and_adds_the_report(original: Any) -> None:
    install()
    assert vars(DeepSpeedEngine)[OWN] is not original
    assert DeepSpeedEngine.elastic_report is None


def everything() -> dict[str, Any]:
    """All that DeepSpeed's loaded modules, and the classes in them, define."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed"}
    found = {f"{name}.{key}": value for name, module in modules.items() for key, value in [*vars(module).items()]}
    classes = {value for value in found.values() if isinstance(value, type) and value.__module__ in modules}
    members = ((owner, key, value) for owner in classes for key, value in [*vars(owner).items()])
    return found | {f"{owner.__module__}.{owner.__qualname__}.{key}": value for owner, key, value in members}


def test_what_trains_is_deepspeeds_own(original: Any) -> None:
    before = everything()
    install()
    after = everything()
    assert {key for key in after if after[key] is not before.get(key)} == {
        "deepspeed.add_config_arguments",
        "deepspeed.runtime.config.DeepSpeedConfig.__init__",
        "deepspeed.runtime.engine.DeepSpeedEngine.load_checkpoint",
        "deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint",
        "deepspeed.runtime.engine.DeepSpeedEngine.__init__",
        "deepspeed.runtime.zero.partition_parameters.Init.__init__",
        "deepspeed.runtime.zero.partition_parameters.Init.__enter__",
        "deepspeed.runtime.pipe.module.PipelineModule.__init__",
    }
    uninstall()
    assert all(value is before[key] for key, value in everything().items())


def test_installing_twice_is_installing_once(original: Any) -> None:
    install()
    once = vars(DeepSpeedEngine)[OWN]
    install()
    assert vars(DeepSpeedEngine)[OWN] is once
    uninstall()
    assert vars(DeepSpeedEngine)[OWN] is original


def test_uninstall_restores_the_very_same_function_and_leaves_nothing_behind(original: Any) -> None:
    attributes = set(vars(DeepSpeedEngine))
    install()
    uninstall()
    assert vars(DeepSpeedEngine)[OWN] is original
    assert set(vars(DeepSpeedEngine)) == attributes


def test_uninstall_without_install_is_harmless(original: Any) -> None:
    uninstall()
    uninstall()
    assert vars(DeepSpeedEngine)[OWN] is original


def test_install_works_again_after_uninstall(original: Any) -> None:
    install()
    uninstall()
    install()
    assert vars(DeepSpeedEngine)[OWN] is not original


def test_the_pipeline_engine_inherits_the_patch(original: Any) -> None:
    assert OWN not in vars(PipelineEngine), "it has a method of its own now: patch it too"
    install()
    assert PipelineEngine.load_checkpoint is vars(DeepSpeedEngine)[OWN]
    assert PipelineEngine.elastic_report is None
    uninstall()
    assert PipelineEngine.load_checkpoint is original


def test_arguments_are_those_that_deepspeed_takes(original: Any) -> None:
    taken, own = inspect.signature(LoadArguments).parameters, inspect.signature(original).parameters
    known = [(p.name, p.kind, p.default) for name, p in own.items() if name not in ("self", "custom_load_fn")]
    assert [(p.name, p.kind, p.default) for name, p in taken.items()][: len(known)] == known
    given = inspect.signature(original).bind("engine", "/x", "t", load_module_strict=False, custom_load_fn=None)
    expected = LoadArguments("/x", "t", load_module_strict=False, has_optimizer=False)
    assert LoadArguments.of(given, has_optimizer=False) == expected


def newer(self: Any, load_dir: Any, tag: Any = None, mapping: Any = None, **more: Any) -> Any:
    """A ``load_checkpoint`` of a DeepSpeed to come."""
    return load_dir, tag, mapping, more


def test_a_refused_load_writes_its_error_to_the_reports_file(tmp_path: Path) -> None:
    section = {"mode": "require", "report": str(tmp_path / "load.json")}
    engine = SimpleNamespace(use_node_local_storage=lambda: False, load_universal_checkpoint=lambda: False)
    engine.optimizer, engine._config = None, SimpleNamespace(_param_dict={"elastic_checkpoint": section})
    for number in range(12):
        (tmp_path / "run" / f"step{number}").mkdir(parents=True)
        (tmp_path / "run" / f"step{number}" / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(NotFoundError) as caught:
        hook._load_checkpoint(newer, engine, str(tmp_path / "run"))
    written = json.loads((tmp_path / "load.json").read_text())
    assert written["error"] == "NotFoundError" and "and 4 more" in str(caught.value)
    assert all(f"step{number}" in written["found"] for number in range(12))


class Engine(SimpleNamespace):
    """What is asked of one; unlike a plain namespace, it can be referred to weakly."""


def test_arguments_of_a_version_to_come_pass_through(tmp_path: Path) -> None:
    engine = Engine(use_node_local_storage=lambda: False, load_universal_checkpoint=lambda: False, global_steps=0)
    engine.optimizer, engine._config = None, SimpleNamespace(_param_dict={"elastic_checkpoint": {"mode": "off"}})
    found = hook._load_checkpoint(newer, engine, str(tmp_path), mapping="cpu", eager=True)
    assert found == (str(tmp_path), None, "cpu", {"eager": True})
    with pytest.raises(TypeError):
        hook._load_checkpoint(newer, engine)
    given = inspect.signature(newer).bind(engine, "/x", mapping="cpu", eager=True)
    assert LoadArguments.of(given, has_optimizer=True).others == ("mapping", "more")
    for asked, loaded in ((None, "4"), ("4/", "4/"), ("5", "4")):
        given = inspect.signature(newer).bind(engine, "/x", asked)
        assert hook._call(newer, given, "4")[1] == loaded


def test_the_patch_looks_like_deepspeeds_method_to_users(original: Any) -> None:
    install()
    patched = vars(DeepSpeedEngine)[OWN]
    assert patched.__doc__ == original.__doc__
    assert patched.__qualname__ == original.__qualname__
    assert inspect.signature(patched) == inspect.signature(original)


def test_the_package_exports_what_the_documentation_names() -> None:
    assert set(elastic_ckpt.__all__) <= set(dir(elastic_ckpt))
    assert {"install", "uninstall", "add_arguments"} <= set(elastic_ckpt.__all__)


# --- what ranks were asked for, and what rank 0 has found, with the other rank played ---------------------------------


def read_on_two_ranks(monkeypatch: pytest.MonkeyPatch, *calls: LoadArguments, node_local: bool = False) -> None:
    """What the first rank's ``agreed_config`` does, given what another rank sends it."""
    engine = SimpleNamespace(use_node_local_storage=lambda: node_local)
    sent: list[Any] = []

    def of_the_other(doing: str, work: Any) -> list[Any]:
        sent.append(work())
        return [sent[-1], b"another"] if len(sent) == 1 else [sent[-1]]

    monkeypatch.setattr(hook.compat, "ds_config", lambda engine: {})
    monkeypatch.setattr(hook.distributed, "all_gather", of_the_other)
    agreed_config(engine, calls[1])
    monkeypatch.setattr(hook.distributed, "all_gather", lambda doing, work: [work(), sent.pop(0)])
    agreed_config(engine, calls[0])


def test_ranks_sent_to_different_folders_hear_of_that_before_anybody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = LoadArguments("/x"), LoadArguments("/y")
    with pytest.raises(ConfigError, match="load_dir"):
        read_on_two_ranks(monkeypatch, *calls)
    read_on_two_ranks(monkeypatch, *calls, node_local=True)


def test_arguments_that_mean_the_same_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    names = [tmp_path / "run", f"{tmp_path}/run/", "run", "./run", "run/.", "link", Path("link")]
    for name in names:
        read_on_two_ranks(monkeypatch, LoadArguments(str(tmp_path / "run")), LoadArguments(name))  # type: ignore[arg-type]
    same = [("x", 4), ("x/", "4"), (Path("./x"), Path("4")), ("x", "4/")]
    for load_dir, tag in same:
        call = LoadArguments(load_dir, tag, 1, "yes", load_module_only=None)  # type: ignore[arg-type]
        read_on_two_ranks(monkeypatch, LoadArguments("x", "4"), call)
    for call in (LoadArguments("x", "5"), LoadArguments("x"), LoadArguments("x", "4", load_module_only=True)):
        with pytest.raises(ConfigError, match="different arguments"):
            read_on_two_ranks(monkeypatch, LoadArguments("x", "4"), call)


@pytest.mark.parametrize("load_dir", [None, 7, b"/x", ["/x"]])
def test_no_folder_is_an_error_that_says_so_and_another_rank_may_have_one(
    load_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for calls in ((load_dir, load_dir), (load_dir, "/x")):
        with pytest.raises(ConfigError, match="given no folder"):
            read_on_two_ranks(monkeypatch, *map(LoadArguments, reversed(calls)))
