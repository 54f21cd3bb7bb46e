"""``--universal-checkpoint`` anywhere on the line of a script whose parser does not know it.

``python -m elastic_ckpt.run`` calls :func:`take_flag`; below ``elastic-ckpt exec`` every Python process imports this
file as it starts, so that it imports nothing but what is loaded by then, unless the flag is on its line.

The flag counts from the start on, as the value of a variable in the environment. A parser that takes it, as an option
of its own or as an argument of a script that it starts (torchrun, DeepSpeed's launcher), gives the variable its value
back. Where it is among the words that a parser leaves as they are (``argparse.REMAINDER``), it counts in this process,
but not in those that this one starts. To a parser that does not take it, the flag is no error. ``sys.argv`` stays as it
is.
"""

import os
import sys

TYPE_CHECKING = False  # that of typing takes milliseconds to import
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

VARIABLE = "ELASTIC_CKPT"
MODES = ("auto", "require", "off")
#: As Megatron-DeepSpeed spells it, and as parsers of dataclasses do.
FLAGS = ("--universal-checkpoint", "--universal_checkpoint")
#: Transformers' parser of dataclasses calls what is left over an error itself.
_REFUSES_WHAT_IS_LEFT = "HfArgumentParser"
#: Of a function of argparse that is wrapped already, maybe by another copy of this file.
_MARK = "_elastic_ckpt_flag"


def split_flag(words: "Sequence[str]") -> "tuple[list[str], list[str]]":
    """Words of a command line without the flag, and the flag's values; a value that is no mode is returned too."""
    others, values = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            others.append(word)
        elif equals:
            values.append(value)
        elif rest and rest[0] in MODES:
            values.append(rest.pop(0))
        else:
            values.append("auto")
    return others, values


def has_flag(words: "Sequence[str]") -> bool:
    """Whether the flag is among some words."""
    return any(word.partition("=")[0] in FLAGS for word in words)


class _Taken:
    """The flag on this process's line: counts until a parser takes it."""

    def __init__(self, values: "list[str]") -> None:
        self._before = os.environ.get(VARIABLE)
        self._is_here = False  # whether it counts in this process alone
        self.set(values)

    def set(self, values: "list[str]") -> None:
        """Have the last value count. One that is no mode may be meant for the script."""
        if values and values[-1] in MODES:
            os.environ[VARIABLE] = values[-1]

    def give_back(self) -> None:
        """The script takes the flag: the variable is as it was."""
        if self._before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._before
        if self._is_here:
            sys.modules["elastic_ckpt.config"].flags.pop("mode", None)
        self._is_here = False

    def keep_here(self, values: "list[str]") -> None:
        """Have the flag count in this process alone: what a parser leaves as it is may be for another script."""
        from elastic_ckpt import config  # noqa: PLC0415

        if values[-1] in MODES:
            config.flags["mode"], self._is_here = values[-1], True


def take_flag(words: "Sequence[str]") -> None:
    """Have the flag among a script's arguments count, unless a parser of the script takes it."""
    if not has_flag(words):
        return
    import argparse  # noqa: PLC0415

    if not hasattr(argparse.ArgumentParser.parse_known_args, _MARK):
        _watch(argparse.ArgumentParser, _Taken(split_flag(words)[1]))


def _watch(parser_class: "type[argparse.ArgumentParser]", taken: _Taken) -> None:
    """Wrap what parsers parse with."""
    parse_known_args, parse_args = parser_class.parse_known_args, parser_class.parse_args
    parsing: list[Any] = []  # the parsers at work: of a subcommand within its own
    refusing: list[Any] = []  # those to which what is left over is an error

    def known(self: "Any", args: "Any" = None, namespace: "Any" = None) -> "Any":
        given = sys.argv[1:] if args is None else list(args)
        if parsing or not has_flag(given) or not has_flag(sys.argv[1:]):
            return parse_known_args(self, given if args is not None else None, namespace)
        parsing.append(self)
        try:
            found, left = parse_known_args(self, given, namespace)
        finally:
            parsing.pop()
        if not has_flag(left):
            taken.give_back()
            rest = [value for value in vars(found).values() if isinstance(value, list)]  # argparse.REMAINDER
            behind = [word for words in rest for word in words if isinstance(word, str)]
            if has_flag(behind):
                taken.keep_here(split_flag(behind)[1])
            return found, left
        others, values = split_flag(left)
        if values[-1] not in MODES:
            self.error(f"argument {FLAGS[0]}: invalid choice: {values[-1]!r} (choose from {', '.join(MODES)})")
        taken.set(values)
        names = {each.__name__ for each in type(self).__mro__}
        return found, others if self in refusing or _REFUSES_WHAT_IS_LEFT in names else left

    def strict(self: "Any", args: "Any" = None, namespace: "Any" = None) -> "Any":
        refusing.append(self)
        try:
            return parse_args(self, args, namespace)
        finally:
            refusing.pop()

    setattr(known, _MARK, True)
    parser_class.parse_known_args = known  # type: ignore[method-assign]
    parser_class.parse_args = strict  # type: ignore[method-assign]
