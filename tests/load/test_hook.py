"""Installing and uninstalling the patch of DeepSpeedEngine.load_checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

import elastic_ckpt
from elastic_ckpt import install, uninstall
from elastic_ckpt.engines.training_state import LoadArguments
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.load import hook

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


def test_the_patch_has_exactly_deepspeeds_parameters(original: Any) -> None:
    # not through functools.wraps, which would show DeepSpeed's signature whatever the patch takes
    taken, own = inspect.signature(LoadArguments).parameters, inspect.signature(original).parameters
    assert [(p.name, p.kind, p.default) for name, p in taken.items() if name != "has_optimizer"] == [
        (p.name, p.kind, p.default) for name, p in own.items() if name != "self"
    ]
    with pytest.raises(TypeError):
        LoadArguments(*range(len(own)))  # type: ignore[arg-type]  one more than DeepSpeed takes


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


def test_ranks_sent_to_different_folders_hear_of_that_before_anybody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(doing: str, work: Any) -> list[Any]:
        mine = work()  # a digest, and where digests differ the call itself
        return [mine, b"another" if isinstance(mine, bytes) else {**mine, "load_dir": "/y"}]

    monkeypatch.setattr(hook.distributed, "all_gather", all_gather)
    monkeypatch.setattr(hook, "ds_config", lambda engine: {})
    with pytest.raises(ConfigError, match="load_dir"):
        hook._read_config(None, LoadArguments("/x"))
