"""The section of the DeepSpeed config, and what wins over it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ckpt.config import (
    CONFIG_KEY,
    ElasticConfig,
    Reading,
    flag_given,
    flags,
    read_config,
    requires_elastic,
    state_options,
)
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import ConfigError


@pytest.fixture(autouse=True)
def no_flags() -> Iterator[None]:
    flags.clear()
    yield
    flags.clear()


def read(**section: Any) -> ElasticConfig:
    return read_config({"train_batch_size": 8, CONFIG_KEY: section})


def test_the_key_is_spelled_as_documented() -> None:
    assert CONFIG_KEY == "elastic_checkpoint"


@pytest.mark.parametrize("config", [{}, {CONFIG_KEY: {}}, {"train_batch_size": 8}])
def test_without_a_section_the_defaults_are_safe(config: dict[str, Any]) -> None:
    options = read_config(config)
    assert options == ElasticConfig.model_validate({})
    assert options.mode == "auto"
    assert options.trust_pickle is False
    assert options.verify == "load"
    assert (options.reading.threads, options.reading.extra_memory_mib) == (4, 64)
    assert options.report is True
    assert options.rename == []
    assert options.param_groups == "match"
    assert options.on_change == "warn"


#: Every option, with a value that is not its default.
SET: dict[str, Any] = {
    "mode": "require",
    "pretrained": "off",
    "trust_pickle": True,
    "verify": "bytes",
    "on_damage": "previous",
    "fallback_dirs": ["/shared/run"],
    "wait_for_files": 60,
    "reading": {"threads": 8, "storage": "network", "gap_kib": 64, "extra_memory_mib": 4},
    "report": "/logs/load.json",
    "sheet": False,
    "rename": [("^old", "new")],
    "added_rows": ["lm_head\\..*"],
    "param_groups": "keep_live",
    "states": {"my_map": "replicated", "my_moment": "elementwise", "my_cache": "fresh", "numel<=256": "replicated"},
    "convert_optimizer": True,
    "on_change": "error",
    "align_partitions": 4096,
    "tp_rules": [{"pattern": ".*qkv.*", "kind": "column", "sub_parameters": [2, 1, 1]}],
    "tp_preset": "gpt-neox",
    "replicated_params": "mean",
    "on_unreadable_entry": "skip",
    "storage_options": {"endpoint": "http://minio:9000"},
}
#: Options that change how elastic_ckpt reads and reports, and not what is restored.
HOW = {"pretrained", "storage_options", "trust_pickle", "verify", "on_damage", "wait_for_files", "reading", "report"}
HOW |= {"sheet"}


def test_every_option_can_be_set() -> None:
    assert set(SET) == set(ElasticConfig.model_fields), "a new option has no test here"
    dumped = read(**SET).model_dump(exclude_defaults=True)
    assert dumped == SET


@pytest.mark.parametrize("option", ElasticConfig.model_fields)
def test_what_deepspeeds_own_loader_would_ignore_is_never_left_to_it(option: str) -> None:
    assert requires_elastic(read(**{option: SET[option]})) == (option not in HOW)


def test_the_defaults_may_be_left_to_deepspeeds_own_loader() -> None:
    assert not requires_elastic(read())
    assert not requires_elastic(read(**ElasticConfig().model_dump()))


def test_every_option_is_described() -> None:
    assert all(field.description for field in ElasticConfig.model_fields.values())


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("on_chang", "on_change"),
        ("Mode", "mode"),
        ("trustpickle", "trust_pickle"),
        ("renames", "rename"),
        ("param_group", "param_groups"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f'unknown key "{key}"') as caught:
        read(**{key: 1})
    assert f'"{nearest}"' in str(caught.value.remedy)
    assert caught.value.found == key


def test_an_unknown_key_of_a_section_inside_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match='unknown key "readers_per_node"') as caught:
        read(reading={"readers_per_node": 1})
    assert "gains little" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match='unknown key "thread" under "reading"') as caught:
        read(reading={"thread": 1})
    assert '"threads"' in str(caught.value.remedy)
    with pytest.raises(ConfigError, match='value of "tp_rules"'):
        read(tp_rules=[{"pattern": "w", "kind": "column", "kin": "row"}])


def test_an_unknown_key_that_resembles_nothing_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        read(**{"": 1})
    assert all(name in str(caught.value.expected) for name in ElasticConfig.model_fields)
    with pytest.raises(ConfigError, match='unknown key "3"'):
        read_config({CONFIG_KEY: {3: 1}})


@pytest.mark.parametrize("folder", ["", "/run\0", "\0"])
def test_a_fallback_folder_without_a_name_is_an_error(folder: str) -> None:
    with pytest.raises(ConfigError, match='"fallback_dirs"'):
        read(fallback_dirs=["/shared/run", folder])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "on"),
        ("mode", False),
        ("mode", None),
        ("trust_pickle", "perhaps"),
        ("trust_pickle", None),
        ("reading", 3),
        ("report", []),
        ("report", 3),
        ("on_damage", -1),
        ("on_damage", True),
        ("verify", False),
        ("param_groups", "live"),
        ("param_groups", None),
        ("on_change", "ignore"),
        ("on_change", True),
        ("fallback_dirs", "/shared/run"),
        ("added_rows", ["lm_head(", "head"]),
    ],
)
def test_a_bad_value_is_an_error_that_names_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f'"{key}"') as caught:
        read(**{key: value})
    assert caught.value.found == repr(value)
    assert str(ElasticConfig.model_fields[key].description) in str(caught.value.expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threads", 0),
        ("threads", 65),
        ("threads", 2.5),
        ("threads", "many"),
        ("extra_memory_mib", 3),
        ("storage", "s3"),
    ],
)
def test_a_bad_value_of_a_section_inside_is_an_error_that_names_it(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f'"reading.{key}"') as caught:
        read(reading={key: value})
    assert caught.value.found == repr(value)
    assert str(Reading.model_fields[key].description) in str(caught.value.expected)


def test_renames_are_pairs_as_json_writes_them() -> None:
    rules = [[r"^model\.(\w+)", r"\1"], ["a", r"\g<0>b"], ["c", ""]]
    assert read(rename=rules).rename == [tuple(rule) for rule in rules]
    assert read(rename=[(r"(?P<layer>\d+)", r"layer\g<layer>")]).rename == [(r"(?P<layer>\d+)", r"layer\g<layer>")]


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param("(", "x", id="an open group"),
        pytest.param("*", "x", id="nothing to repeat"),
        pytest.param("a", r"\1", id="a group that the pattern does not have"),
        pytest.param("(a)", r"\2", id="one group too many"),
        pytest.param("(a)", r"\g<name>", id="an unknown name"),
        pytest.param("a", r"\q", id="a bad escape"),
    ],
)
def test_a_rename_that_python_would_not_take_is_an_error_that_shows_it(pattern: str, replacement: str) -> None:
    with pytest.raises(ConfigError, match='"rename"') as caught:
        read(rename=[["fine", "fine"], [pattern, replacement]])
    assert repr(pattern) in str(caught.value.expected)
    assert repr(replacement) in str(caught.value.expected)


@pytest.mark.parametrize(
    "rules", [["a", "b"], [["a"]], [["a", "b", "c"]], [["a", 1]], [[None, "b"]], {"a": "b"}, "a", [("a", None)]]
)
def test_renames_of_another_form_are_an_error_that_names_the_key(rules: Any) -> None:
    with pytest.raises(ConfigError, match="rename"):
        read(rename=rules)


def test_a_pattern_that_matches_the_empty_name_only_is_no_error() -> None:
    assert read(rename=[["^$", "x"]]).rename == [("^$", "x")]


@pytest.mark.parametrize("section", [True, "auto", ["auto"], None, 3])
def test_a_section_that_is_not_an_object_is_an_error(section: Any) -> None:
    with pytest.raises(ConfigError, match="must be an object") as caught:
        read_config({CONFIG_KEY: section})
    assert caught.value.found == repr(section)


def test_options_cannot_be_changed_after_they_were_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().mode = "off"


def test_flags_win_over_the_config() -> None:
    flags.update(mode="require", trust_pickle=True)
    options = read(mode="off", trust_pickle=False, report=False)
    assert (options.mode, options.trust_pickle, options.report) == ("require", True, False)


def test_cleared_flags_no_longer_win() -> None:
    flags.update(mode="require")
    flags.clear()
    assert read(mode="off").mode == "off"
    assert not flag_given()


def test_a_bad_flag_value_is_an_error_that_does_not_blame_the_config() -> None:
    flags.update(mode="on")
    with pytest.raises(ConfigError) as caught:
        read_config({})
    assert CONFIG_KEY not in caught.value.problem, caught.value


@pytest.mark.parametrize("key", ["load_universal_checkpoint", "universal_checkpoint", "load_universal"])
def test_wrong_keys_are_answered_with_the_right_one(key: str) -> None:
    with pytest.raises(ConfigError, match=f'"{key}"') as caught:
        read_config({key: True})
    assert '"checkpoint": {"load_universal": true}' in str(caught.value.remedy)


@pytest.mark.parametrize("key", ["load_universal_checkpoint", "universal_checkpoint", "universal"])
def test_wrong_keys_beside_the_right_one_are_answered_too(key: str) -> None:
    with pytest.raises(ConfigError, match=f'"{key}" under "checkpoint"') as caught:
        read_config({"checkpoint": {"tag_validation": "Warn", key: True}})
    assert '"checkpoint": {"load_universal": true}' in str(caught.value.remedy)


@pytest.mark.parametrize(
    "key",
    [
        "elastic_ckpt",
        "elastic_checkpointing",
        "elastic-checkpoint",
        "elastic_checkpoints",
        "elastic_chekpoint",
        "elasticCheckpoint",
    ],
)
def test_a_section_under_another_name_is_answered_with_the_right_one(key: str) -> None:
    with pytest.raises(ConfigError, match=f'"{key}"') as caught:
        read_config({key: {"mode": "off"}})
    assert f'"{CONFIG_KEY}"' in str(caught.value.remedy)


def test_keys_of_deepspeed_are_none_of_them() -> None:
    section = {"tag_validation": "Warn", "load_universal": True, "use_node_local_storage": False}
    others = {"elasticity": {"enabled": False}, "activation_checkpointing": {}, "checkpoint_engine": {}}
    assert read_config({"checkpoint": section, **others}).mode == "auto"
    assert read_config({"checkpoint": None}).mode == "auto"


# --- layouts of optimizer states --------------------------------------------------------------------------------


def test_states_are_named_by_their_layout() -> None:
    said = {"m": "elementwise", "table": "replicated", "cache": "fresh", "qmap1": "elementwise"}
    options = state_options(read(states={**said, "numel<=256": "replicated"}))
    assert options == StateOptions(said, 256)
    assert [options.layout(key) for key in ("qmap1", "qmap2", "other")] == ["elementwise", "replicated", None]
    assert state_options(read()) == StateOptions()


@pytest.mark.parametrize(
    "states",
    [
        {"m": "sharded"},
        {"m": None},
        ["m"],
        {"numel<=256": "fresh"},
        {"numel<256": "replicated"},
        {"numel<=": "replicated"},
        {"numel <= 2": "replicated"},
        {"numel<=1e3": "replicated"},
    ],
)
def test_layouts_that_are_none_are_refused(states: Any) -> None:
    with pytest.raises(ConfigError, match='"states"'):
        read(states=states)


def test_options_of_object_stores_are_in_no_error() -> None:
    with pytest.raises(ConfigError) as caught:
        read(storage_options="secret_access_key=SECRET")
    assert "SECRET" not in str(caught.value) and caught.value.__cause__ is None
    secret = {"storage_options": {"secret_access_key": "SECRET"}}
    assert "SECRET" not in repr(read(**secret))
    for config in ({"elastic_checkpoints": secret}, {CONFIG_KEY: {"storage_option": secret["storage_options"]}}):
        with pytest.raises(ConfigError) as caught:
            read_config(config)
        assert "SECRET" not in "".join(traceback.format_exception(caught.value))
