"""``--universal-checkpoint`` as people type it: anywhere on the line of a script, whatever its parser knows."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

import elastic_ckpt
from elastic_ckpt import config
from elastic_ckpt.load.installation import _elastic_ckpt_flag as flag
from elastic_ckpt.load.installation import with_flags

REPO = Path(elastic_ckpt.__file__).resolve().parents[1]
PARSERS = {
    "plain": "parser = argparse.ArgumentParser()",
    "own": "parser = argparse.ArgumentParser(); parser.add_argument('--universal-checkpoint', action='store_true')",
    "added": "parser = elastic_ckpt.add_arguments(argparse.ArgumentParser())",
    "longer": "parser = argparse.ArgumentParser(); parser.add_argument('--universal-checkpoint-info')",
    "optional": "parser = argparse.ArgumentParser(); parser.add_argument('data', nargs='?')",
    "intermixed": "parser = argparse.ArgumentParser(); parser.add_argument('data', nargs='*')",
    "with_deepspeed": "import deepspeed; parser = deepspeed.add_config_arguments(argparse.ArgumentParser())",
}
SCRIPT = """\
import argparse, json, sys
import elastic_ckpt
{parser}
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--local_rank", type=int, default=0)
parsed = vars(getattr(parser, {parse!r})())
from elastic_ckpt.config import flag_given, read_config
print("FACTS" + json.dumps([parsed["steps"], read_config({{}}).mode, flag_given(), sys.argv[1:]]))
"""
#: Of parsers that are none of argparse's, or refuse what is left over themselves.
OTHER_SCRIPTS = {
    "of_click": """\
@click.command()
@click.argument("data", required=False)
@click.option("--steps", default=1)
def train(data, steps):
    tell(steps)

if __name__ == "__main__":
    train()
""",
    "of_typer": """\
def train(data: str = typer.Argument("none"), steps: int = 1):
    tell(steps)

if __name__ == "__main__":
    typer.run(train)
""",
    "of_transformers": """\
@dataclasses.dataclass
class Options:
    steps: int = 1

if __name__ == "__main__":
    tell(HfArgumentParser(Options).parse_args_into_dataclasses()[0].steps)
""",
}
IMPORTS = {
    "of_click": "import click",
    "of_typer": "import typer",
    "of_transformers": "import dataclasses\nfrom transformers import HfArgumentParser",
}
TELL = """\
import json, os, sys
{imports}

def tell(steps):
    from elastic_ckpt.config import flag_given, read_config
    print("FACTS" + json.dumps([steps, read_config({{}}).mode, flag_given(), sys.argv[1:]]))

{script}
"""
RUN = f"{sys.executable} -m elastic_ckpt.run"
EXEC = f"{sys.executable} -m elastic_ckpt exec"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, parser in PARSERS.items():
        parse = "parse_intermixed_args" if name == "intermixed" else "parse_args"
        (folder / f"{name}.py").write_text(SCRIPT.format(parser=parser, parse=parse))
    for name, script in OTHER_SCRIPTS.items():
        (folder / f"{name}.py").write_text(TELL.format(imports=IMPORTS[name], script=script))
    return folder


def typed(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line, run as it is typed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("ELASTIC_CKPT", "PYTHONPATH")}
    environment |= {"PYTHONPATH": str(REPO), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = shlex.split(line)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("line", "mode", "given"),
    [
        (f"{RUN} plain.py --universal-checkpoint", "auto", True),
        (f"{RUN} plain.py --universal_checkpoint=require --steps 3", "require", True),
        (f"{RUN} own.py --universal-checkpoint", "auto", False),  # the script's own, which it hands to DeepSpeed
        (f"{RUN} added.py --universal-checkpoint=require", "require", True),
        (f"{RUN} with_deepspeed.py --deepspeed --universal_checkpoint=require", "require", True),
        (f"{EXEC} -- {sys.executable} plain.py --steps 3 --universal-checkpoint", "auto", True),
        (f"{EXEC} --universal_checkpoint -- {sys.executable} plain.py", "auto", True),
        (f"{EXEC} -- {sys.executable} own.py --universal-checkpoint", "auto", False),
        (f"{RUN} intermixed.py a --universal-checkpoint b --steps 3 c", "auto", True),
        (f"{EXEC} -- {sys.executable} optional.py --universal-checkpoint require", "require", True),
        (f"{RUN} longer.py --universal-checkpoint-info x --universal-checkpoint require", "require", True),
        (f"{RUN} of_click.py --universal-checkpoint require --steps 3", "require", True),
        (f"{EXEC} -- {sys.executable} of_click.py data --universal_checkpoint=off", "off", False),
        (f"{RUN} of_typer.py --universal-checkpoint require --steps 3", "require", True),
        (f"{EXEC} -- {sys.executable} of_transformers.py --steps 3 --universal_checkpoint", "auto", True),
        # through launchers, which take it as an argument of the script's
        (
            f"{EXEC} -- {sys.executable} -m torch.distributed.run plain.py --universal-checkpoint require",
            "require",
            True,
        ),
    ],
    ids=lambda value: value.replace(sys.executable, "python") if isinstance(value, str) else "",
)
def test_lines_as_they_are_typed(line: str, mode: str, given: bool, folder: Path) -> None:
    done = typed(line, folder)
    facts = [text.removeprefix("FACTS") for text in done.stdout.splitlines() if text.startswith("FACTS")]
    assert done.returncode == 0 and len(facts) == 1, done.stderr[-3000:]
    words = shlex.split(line.partition(".py ")[2])
    assert json.loads(facts[0]) == [3 if "--steps" in line else 1, mode, given, words]


def test_other_arguments_and_modes_that_do_not_exist_end_the_script(folder: Path) -> None:
    done = typed(f"{RUN} plain.py --universal-checkpoint --stops 3", folder)
    assert done.returncode == 2 and "unrecognized arguments: --stops 3" in done.stderr
    done = typed(f"{RUN} plain.py --universal-checkpoint=on", folder)
    assert done.returncode == 2 and "'on' (choose from auto, require, off)" in done.stderr


# --- what parsers do, in this process --------------------------------------------------------------------------------

Made = Callable[[Sequence[str]], type[argparse.ArgumentParser]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """A class of parsers that is watched, on a line with some words."""
    monkeypatch.setenv(flag.VARIABLE, "1")

    def make(words: Sequence[str]) -> type[argparse.ArgumentParser]:
        class Parser(argparse.ArgumentParser):
            pass

        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        flag._watch(Parser, taken := flag._Taken(flag.split_flag(words)[1]))
        assert taken is not None
        return Parser

    return make


def counts() -> str:
    return os.environ[flag.VARIABLE]


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["--universal-checkpoint", "data"], "auto"),
        (["data", "--universal-checkpoint"], "auto"),
        (["--universal_checkpoint", "--lr", "1", "data"], "auto"),
        (["--universal-checkpoint=off", "data"], "off"),
        (["data", "--universal-checkpoint", "require"], "require"),
        (["--universal-checkpoint", "data", "--universal_checkpoint=require"], "require"),
    ],
)
def test_a_parser_without_the_flag_does_not_see_it(words: list[str], mode: str, made: Made) -> None:
    parser = made(words)()
    parser.add_argument("data")
    parser.add_argument("--lr")
    for given in (None, sys.argv[1:]):
        assert parser.parse_args(given).data == "data" and counts() == mode
    assert sys.argv[1:] == words


SHAPES: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"nargs": None},
    "optional": {"nargs": "?"},
    "any": {"nargs": "*"},
    "some": {"nargs": "+"},
}
SPELLINGS = {
    ("--universal-checkpoint",): "auto",
    ("--universal_checkpoint",): "auto",
    ("--universal-checkpoint", "require"): "require",
    ("--universal_checkpoint", "off"): "off",
    ("--universal-checkpoint=require",): "require",
}


@pytest.mark.parametrize("entry", ["watched", "added", "with_deepspeed"])
@pytest.mark.parametrize("parse", ["parse_args", "parse_known_args", "parse_intermixed_args"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spelling", SPELLINGS, ids="_".join)
def test_only_a_mode_is_the_flags_value(
    entry: str, parse: str, shape: str, spelling: tuple[str, ...], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and behind the script's own words, the flag leaves these as they are without it."""
    monkeypatch.setattr(config, "flags", {})
    data = {"none": [], "any": ["a", "b"], "some": ["a", "b"]}.get(shape, ["a"])
    own = ["--universal-checkpoint-info", "x", "--lr", "1"]
    for words in ([*spelling, *data, *own], [*own, *data, *spelling], [*data, *spelling, *own], [*spelling, *own]):
        if len(data) > 0 and not set(data) <= set(words) and shape not in ("optional", "any"):
            continue
        kind = made(words)  # with a variable that no line before has set
        parser = kind() if entry == "watched" else argparse.ArgumentParser()
        if entry == "added":
            elastic_ckpt.add_arguments(parser)
        elif entry == "with_deepspeed":
            parser = with_flags(lambda parser: parser, parser)
        if shape != "none":
            parser.add_argument("data", **SHAPES[shape])
        parser.add_argument("--universal-checkpoint-info")
        parser.add_argument("--lr")
        found = getattr(parser, parse)(words)
        if parse == "parse_known_args":
            found, left = found
            assert left == (list(spelling) if entry == "watched" else []), words
        given = [word for word in words if word in data]
        wanted: Any = given if shape in ("any", "some") else (given or [None])[0]
        assert getattr(found, "data", None) == wanted, words
        assert (found.universal_checkpoint_info, found.lr) == ("x", "1"), words
        assert read_mode(entry) == SPELLINGS[spelling], words


def read_mode(entry: str) -> str:
    return counts() if entry == "watched" else config.flags["mode"]


@pytest.mark.parametrize("word", ["requires", "data"])
def test_without_positional_arguments_another_word_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = elastic_ckpt.add_arguments(argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--universal-checkpoint", word])
    assert f"invalid choice: '{word}'" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["watched", "added"])
def test_behind_a_subcommand_words_are_those_of_its_parser(
    entry: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "flags", {})
    kind = made(["--universal-checkpoint", "train", "--universal-checkpoint", "require"])
    parser = kind() if entry == "watched" else elastic_ckpt.add_arguments(argparse.ArgumentParser())
    train = parser.add_subparsers().add_parser("train")
    train.add_argument("--universal-checkpoint", action="store_true", dest="own")
    train.add_argument("data")
    found = parser.parse_args(sys.argv[1:])
    assert (found.own, found.data) == (True, "require")
    assert read_mode(entry) == "auto"


def test_what_another_parser_gets_is_what_was_typed(made: Made) -> None:
    parser = made(["--universal-checkpoint", "require", "train.py", "--universal-checkpoint", "off"])()
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    found, left = parser.parse_known_args()
    assert (found.script, found.arguments) == ("train.py", ["--universal-checkpoint", "off"])
    assert left == ["--universal-checkpoint", "require"]


@pytest.mark.parametrize("entry", ["watched", "added"])
@pytest.mark.parametrize("spelling", SPELLINGS, ids="_".join)
def test_intermixed_arguments_are_on_both_sides_of_it(
    entry: str, spelling: tuple[str, ...], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "flags", {})
    kind = made(["a", *spelling, "b", "--lr", "1", "c"])
    parser = kind() if entry == "watched" else elastic_ckpt.add_arguments(argparse.ArgumentParser())
    parser.add_argument("data", nargs="*")
    parser.add_argument("--lr")
    found = parser.parse_intermixed_args(sys.argv[1:])
    assert (found.data, found.lr, read_mode(entry)) == (["a", "b", "c"], "1", SPELLINGS[spelling])
    found, left = parser.parse_known_intermixed_args([*sys.argv[1:], "--steps"])
    assert (found.data, found.lr) == (["a", "b", "c"], "1")
    assert sorted(left) == sorted(["--steps", *(spelling if entry == "watched" else [])])


def test_what_a_first_parser_leaves_over_is_for_the_second(made: Made) -> None:
    kind = made(["--config", "x", "--universal-checkpoint=require"])
    first, second, third = kind(), kind(), kind()
    first.add_argument("--config")
    second.add_argument("--universal-checkpoint")
    found, left = first.parse_known_args()
    assert (found.config, left, counts()) == ("x", ["--universal-checkpoint=require"], "require")
    assert second.parse_args(left).universal_checkpoint == "require" and counts() == "1"
    first.parse_known_args()
    third.parse_args(left)
    assert counts() == "require"


def test_a_parser_of_dataclasses_refuses_nothing_of_ours(made: Made) -> None:
    class HfArgumentParser(made(["--universal-checkpoint", "--other"])):  # type: ignore[misc]
        pass

    assert HfArgumentParser().parse_known_args()[1] == ["--other"] and counts() == "auto"


@pytest.mark.parametrize(("command", "mode"), [("train", "1"), ("test", "auto")])
def test_a_subcommand_may_take_it(command: str, mode: str, made: Made) -> None:
    parser = made([command, "--universal-checkpoint"])()
    commands = parser.add_subparsers()
    commands.add_parser("train").add_argument("--universal-checkpoint", action="store_true")
    commands.add_parser("test")
    found = parser.parse_args()
    assert counts() == mode and vars(found) == ({"universal_checkpoint": True} if command == "train" else {})


def test_a_launcher_hands_it_on(made: Made) -> None:
    parser = made(["--ranks", "2", "train.py", "--universal-checkpoint"])()
    parser.add_argument("--ranks")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    assert parser.parse_args().arguments == ["--universal-checkpoint"] and counts() == "1"


@pytest.mark.parametrize(("word", "mode"), [("--universal-checkpoint", "auto"), ("--universal_checkpoint=off", "off")])
def test_behind_a_remainder_it_counts_in_this_process(
    word: str, mode: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "flags", {})
    kind = made(["--steps", "2", "model.width=3", word])
    parser, second = kind(), kind()
    parser.add_argument("--steps")
    parser.add_argument("overrides", nargs=argparse.REMAINDER)
    assert parser.parse_args().overrides == ["model.width=3", word] and counts() == "1"
    assert config.flags == {"mode": mode} and config.read_config({}).mode == mode
    second.add_argument("--universal-checkpoint", "--universal_checkpoint", nargs="?")  # it was for the script
    second.parse_args([word])
    assert config.flags == {} and counts() == "1"


@click.group()
@click.option("--verbose", is_flag=True)
def commands(verbose: bool) -> None:
    """A script of click's."""


@commands.command()
@click.argument("data", required=False)
@click.option("--steps", default=1)
def train(data: str | None, steps: int) -> Any:
    return data, steps


@commands.command()
@click.option("--universal-checkpoint", is_flag=True)
def owning(universal_checkpoint: bool) -> Any:
    return universal_checkpoint


@commands.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def launching(words: tuple[str, ...]) -> Any:
    return words


@pytest.mark.parametrize(
    ("words", "result", "mode", "here"),
    [
        (["train", "--universal-checkpoint", "--steps", "3"], (None, 3), "auto", None),
        (["train", "--universal-checkpoint", "require"], (None, 1), "require", None),
        (["train", "--universal_checkpoint", "data"], ("data", 1), "auto", None),
        (["--verbose", "--universal-checkpoint", "train", "data"], ("data", 1), "auto", None),
        (["--universal-checkpoint=off", "train", "--steps", "3"], (None, 3), "off", None),
        (["train", "--", "--universal-checkpoint"], ("--universal-checkpoint", 1), "auto", None),
        (["owning", "--universal-checkpoint"], True, "1", None),
        (["launching", "x.py", "--universal-checkpoint"], ("x.py", "--universal-checkpoint"), "1", "auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_of_click(
    words: list[str], result: Any, mode: str, here: str | None, on_click: Callable[[list[str]], None]
) -> None:
    on_click(words)
    assert commands.main(standalone_mode=False) == result
    assert counts() == mode and config.flags.get("mode") == here


@pytest.mark.parametrize(
    "words", [["train", "--universal-checkpoint=on"], ["train", "--universal-checkpoint", "--stops"]]
)
def test_commands_of_click_refuse_what_nobody_knows(words: list[str], on_click: Callable[[list[str]], None]) -> None:
    on_click(words)
    with pytest.raises(click.UsageError, match=r"'on'|--stops"):
        commands.main(standalone_mode=False)


@pytest.fixture
def on_click(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Has click's commands watched, on a line with some words."""
    monkeypatch.setenv(flag.VARIABLE, "1")
    monkeypatch.setattr(config, "flags", {})
    monkeypatch.setattr(click.Command, "parse_args", click.Command.parse_args)  # to be put back

    def watch(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        flag._watch_commands(click.core, flag._Taken(flag.split_flag(words)[1]))

    return watch


@pytest.mark.parametrize("given", ["--universal", "--universal-c", "--trust", "--elastic", "--u", "--universal_"])
@pytest.mark.parametrize("own", [[], ["--universal-data"], ["--trust-me", "--universe"]])
@pytest.mark.parametrize("with_deepspeed", [False, True])
def test_abbreviations_mean_what_they_would_without_us(
    given: str, own: list[str], with_deepspeed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "flags", {})

    def parsed(with_ours: bool) -> dict[str, Any] | None:
        parser = argparse.ArgumentParser()
        for name in own:
            parser.add_argument(name, action="store_true")
        if with_ours and with_deepspeed:
            parser = with_flags(lambda parser: parser, parser)
        elif with_ours:
            elastic_ckpt.add_arguments(parser)
        try:
            return {key: value for key, value in vars(parser.parse_args([given])).items() if value}
        except SystemExit:
            return None

    without, found = parsed(False), parsed(True)
    assert found == without if without is not None else (found is not None) == is_one_of_ours(given, own)


def is_one_of_ours(given: str, own: list[str]) -> bool:
    return given.startswith(("--u", "--elastic")) and not any(name.startswith(given) for name in own)
