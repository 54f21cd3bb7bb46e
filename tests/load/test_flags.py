"""Command-line flags: what they set, what they answer, and how they get into a DeepSpeed config."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ckpt.config import CONFIG_KEY, ElasticConfig, flag_given, flags, read_config
from elastic_ckpt.load.installation import add_arguments, install, uninstall


@pytest.fixture(autouse=True)
def no_flags() -> Iterator[None]:
    flags.clear()
    yield
    flags.clear()


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    return add_arguments(argparse.ArgumentParser())


def read(**section: Any) -> ElasticConfig:
    return read_config({"train_batch_size": 8, CONFIG_KEY: section})


@pytest.mark.parametrize(
    ("arguments", "mode", "given"),
    [
        ([], "auto", False),
        (["--universal-checkpoint"], "auto", True),
        (["--universal-checkpoint=auto"], "auto", True),
        (["--universal-checkpoint=require"], "require", True),
        (["--universal-checkpoint", "require"], "require", True),
        (["--universal-checkpoint=off"], "off", False),
    ],
)
def test_the_universal_checkpoint_flag_sets_the_mode(
    parser: argparse.ArgumentParser, arguments: list[str], mode: str, given: bool
) -> None:
    parsed = parser.parse_args(arguments)
    assert read_config({}).mode == mode
    assert flag_given() is given
    assert parsed.universal_checkpoint == (mode if arguments else None)


def test_a_bare_flag_wins_over_a_config_that_says_off(parser: argparse.ArgumentParser) -> None:
    parser.parse_args(["--universal-checkpoint"])
    assert read(mode="off").mode == "auto"


def test_the_last_of_two_flags_counts(parser: argparse.ArgumentParser) -> None:
    parser.parse_args(["--universal-checkpoint", "--universal-checkpoint=off"])
    assert read().mode == "off"
    assert not flag_given()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--universal-checkpoint=on"],
        ["--universal-checkpoint", "yes"],
        ["--elastic-trust-pickle=1"],
    ],
)
def test_a_bad_argument_ends_the_script_and_sets_nothing(
    parser: argparse.ArgumentParser, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2
    assert arguments[0].split("=")[0] in capsys.readouterr().err
    assert read_config({}) == ElasticConfig.model_validate({})


def test_the_other_flag_sets_its_option(parser: argparse.ArgumentParser) -> None:
    assert parser.parse_args(["--elastic-trust-pickle"]).elastic_trust_pickle is True
    assert read(trust_pickle=False).trust_pickle is True


def test_flags_that_are_not_given_leave_the_config_alone(parser: argparse.ArgumentParser) -> None:
    assert parser.parse_args([]).elastic_trust_pickle is False
    assert read(trust_pickle=True).trust_pickle is True


def test_flags_stand_beside_a_scripts_own_and_those_of_deepspeed() -> None:
    import deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--lr", type=float)
    assert add_arguments(parser) is parser
    parsed = parser.parse_args(["--deepspeed", "--lr", "0.1", "--universal-checkpoint", "--elastic-trust-pickle"])
    assert (parsed.deepspeed, parsed.lr, parsed.universal_checkpoint) == (True, 0.1, "auto")
    assert "elastic_ckpt" in parser.format_help()


def megatron_parser(**options: Any) -> argparse.ArgumentParser:
    """As Megatron-DeepSpeed's has it."""
    parser = argparse.ArgumentParser(**options)
    parser.add_argument("--universal-checkpoint", action="store_true")
    return parser


CONFIG = {
    "train_batch_size": 8,
    "checkpoint": {"tag_validation": "Fail", "load_universal": False},
    CONFIG_KEY: {"report": False},
}


@pytest.mark.parametrize("conflicts", ["error", "resolve"])
def test_a_parser_that_has_the_flag_keeps_it(conflicts: str) -> None:
    parser = add_arguments(megatron_parser(conflict_handler=conflicts))
    assert parser.parse_args([]).universal_checkpoint is False
    arguments = parser.parse_args(["--universal-checkpoint", "--elastic-trust-pickle"])
    assert arguments.universal_checkpoint is True
    assert read().trust_pickle


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        (["--universal_checkpoint"], "auto"),
        (["--universal_checkpoint=require"], "require"),
        (["--universal_checkpoint", "off"], "off"),
    ],
)
def test_the_flag_may_have_an_underscore(parser: argparse.ArgumentParser, arguments: list[str], mode: str) -> None:
    assert parser.parse_args(arguments).universal_checkpoint == mode
    assert read().mode == mode
    flags.clear()
    assert add_arguments(megatron_parser()).parse_args(arguments).universal_checkpoint
    assert read().mode == mode
    assert "universal_checkpoint" not in parser.format_help()


def test_deepspeeds_own_arguments_bring_the_flags_once_elastic_ckpt_is_installed() -> None:
    import deepspeed

    uninstall()
    install()
    try:
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        parser.add_argument("--universal-folder")
        assert parser.parse_args(["--deepspeed", "--universal-checkpoint=require"]).universal_checkpoint == "require"
        assert read().mode == "require"
        namespace = parser.parse_args(["--universal_checkpoint", "--elastic-trust-pickle"])
        assert (namespace.universal_checkpoint, namespace.elastic_trust_pickle, read().mode) == ("auto", True, "auto")
        assert not [name for name in vars(parser.parse_args([])) if name.startswith(("elastic", "universal_c"))]
        assert "--universal-checkpoint" in parser.format_help()
        both = add_arguments(deepspeed.add_config_arguments(argparse.ArgumentParser()))
        assert both.parse_args([]).universal_checkpoint is None
        own = deepspeed.add_config_arguments(argparse.ArgumentParser())
        own.add_argument("--universal-checkpoint", type=int)  # after DeepSpeed's
        assert own.parse_args(["--universal-checkpoint", "3"]).universal_checkpoint == 3
    finally:
        uninstall()
    assert "--universal-checkpoint" not in deepspeed.add_config_arguments(argparse.ArgumentParser()).format_help()


def test_the_answer_takes_no_name_that_a_script_may_want(parser: argparse.ArgumentParser) -> None:
    assert set(vars(parser.parse_args([]))) == {"universal_checkpoint", "elastic_trust_pickle"}
    own = argparse.ArgumentParser()
    own.add_argument("--universal_checkpoint", action="store_true")
    assert add_arguments(own).parse_args(["--universal_checkpoint"]).universal_checkpoint is True
