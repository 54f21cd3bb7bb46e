"""``--universal-checkpoint`` anywhere on the line of a script whose parser does not know it.

``python -m elastic_ckpt.run`` calls :func:`take_flag`; below ``elastic-ckpt exec`` every Python process imports this
file as it starts, so that it imports nothing but what is loaded by then, unless the flag is on its line.

A mode that follows the flag is its value; any other word is the script's. The flag is never an abbreviation of a longer
option of the script.

The flag counts from the start on, as the value of a variable in the environment. A parser that takes it, as an option
of its own or as an argument of a script that it starts (torchrun, DeepSpeed's launcher), gives the variable its value
back. Parsers are those of argparse, and the commands of click and typer. Where it is among the words that a parser
leaves as they are (``argparse.REMAINDER``), it counts in this process, but not in those that this one starts. To a
parser that does not take it, the flag is no error. ``sys.argv`` stays as it is.
"""

import os
import sys

TYPE_CHECKING = False  # that of typing takes milliseconds to import
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

VARIABLE = "ELASTIC_CKPT"
MODES = ("auto", "require", "off")
#: As Megatron-DeepSpeed spells it, and as parsers of dataclasses do.
FLAGS = ("--universal-checkpoint", "--universal_checkpoint")
#: Transformers' parser of dataclasses calls what is left over an error itself.
_REFUSES_WHAT_IS_LEFT = "HfArgumentParser"
#: Modules with click's ``Command``: its own, and the copy in newer versions of typer.
_OF_CLICK = ("click.core", "typer._click.core")
#: Of a function of argparse that is wrapped already, maybe by another copy of this file.
_MARK = "_elastic_ckpt_flag"


def split_flag(words: "Sequence[str]") -> "tuple[list[str], list[str]]":
    """Words of a command line without the flag, and the flag's values; a value that is no mode is returned too."""
    return _split_joined(join_values(words, FLAGS)[0])


def _split_joined(words: "Sequence[str]") -> "tuple[list[str], list[str]]":
    """The same of words in which no value is a word of its own."""
    others = []
    values = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            others.append(word)
        else:
            values.append(value if equals else "auto")
    return others, values


def join_values(words: "Sequence[str]", flags: "Sequence[str]") -> "tuple[list[str], dict[str, list[str]]]":
    """Words in which a flag and the mode behind it are one, so that no positional argument takes the mode.

    Args:
        words: of a command line.
        flags: the spellings of the flag that are joined.

    Returns:
        The words; and what was typed in place of each joined one.
    """
    joined: list[str] = []
    typed: dict[str, list[str]] = {}
    position = 0
    while position < len(words):
        pair = list(words[position : position + 2])
        if len(pair) == 2 and pair[0] in flags and pair[1] in MODES:
            joined.append("=".join(pair))
            typed[joined[-1]] = pair
            position += 2
        else:
            joined.append(pair[0])
            position += 1
    return joined, typed


def part_values(words: "Sequence[Any]", typed: "dict[str, list[str]]") -> "list[Any]":
    """The words, as they were typed before :func:`join_values`."""
    parted: list[Any] = []
    for word in words:
        parted += typed.get(word, [word]) if isinstance(word, str) else [word]
    return parted


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
            config.flags["mode"] = values[-1]
            self._is_here = True


def take_flag(words: "Sequence[str]") -> None:
    """Have the flag among a script's arguments count, unless a parser of the script takes it."""
    if not has_flag(words):
        return
    import argparse  # noqa: PLC0415

    if hasattr(argparse.ArgumentParser.parse_known_args, _MARK):
        return
    taken = _Taken(split_flag(words)[1])
    _watch(argparse.ArgumentParser, taken)
    for name in _OF_CLICK:
        if name in sys.modules:
            _watch_commands(sys.modules[name], taken)
    sys.meta_path.insert(0, _AwaitClick(taken))


def _watch(parser_class: "type[argparse.ArgumentParser]", taken: _Taken) -> None:
    """Wrap what parsers parse with."""
    parsers = _Parsers(taken)
    parser_class.parse_known_args = parsers.watched(parser_class.parse_known_args)  # type: ignore[method-assign]
    intermixed = parsers.watched(parser_class.parse_known_intermixed_args, is_intermixed=True)
    parser_class.parse_known_intermixed_args = intermixed  # type: ignore[method-assign]
    for name in ("parse_args", "parse_intermixed_args"):
        setattr(parser_class, name, parsers.refusing(getattr(parser_class, name)))
    options_of = parser_class._get_option_tuples

    def without_the_flag(self: "Any", word: str) -> "list[Any]":
        return [] if has_flag([word]) else options_of(self, word)  # the flag abbreviates no other option

    parser_class._get_option_tuples = without_the_flag  # type: ignore[method-assign, assignment]


def _not_taken(parser: "argparse.ArgumentParser") -> "list[str]":
    """The spellings of the flag that a parser does not take."""
    return [flag for flag in FLAGS if flag not in parser._option_string_actions]


class _Parsers:
    """What the parsers of this process do with the flag on its line."""

    def __init__(self, taken: _Taken) -> None:
        self._taken = taken
        #: What the parser at work was given joined, and what was typed; None while no parser works.
        self._typed: dict[str, list[str]] | None = None
        #: Parsers to which what is left over is an error.
        self._strict: list[argparse.ArgumentParser] = []

    def watched(self, parse: "Callable[..., Any]", is_intermixed: bool = False) -> "Callable[..., Any]":
        """``parse_known_args`` or its like, which leaves over the flag with its value.

        ``is_intermixed``: whether positional arguments may be on both sides of the flag, but not of what is unknown.
        """

        def known(parser: "Any", args: "Any" = None, namespace: "Any" = None) -> "Any":
            given = sys.argv[1:] if args is None else list(args)
            if self._typed is not None:  # within another: of a subcommand, or of intermixed arguments
                own = {word: pair for word, pair in self._typed.items() if pair[0] not in _not_taken(parser)}
                return parse(parser, part_values(given, own), namespace)
            if not has_flag(given) or not has_flag(sys.argv[1:]):
                return parse(parser, args, namespace)
            end = given.index("--") if "--" in given else len(given)
            ours = _not_taken(parser)
            words, self._typed = join_values(given[:end], ours)
            typed = self._typed
            removed = [word for word in words if is_intermixed and word.partition("=")[0] in ours]
            kept = [word for word in words if word not in removed]
            try:
                found, left = parse(parser, [*kept, *given[end:]], namespace)
                left += removed
            finally:
                self._typed = None
            for name, value in vars(found).items():
                if isinstance(value, list) and any(isinstance(word, str) and word in typed for word in value):
                    setattr(found, name, part_values(value, typed))  # argparse.REMAINDER
            return found, part_values(self._left(parser, found, left), typed)

        setattr(known, _MARK, True)
        return known

    def refusing(self, parse: "Callable[..., Any]") -> "Callable[..., Any]":
        """``parse_args`` or its like, which refuses what is left over."""

        def strict(parser: "Any", args: "Any" = None, namespace: "Any" = None) -> "Any":
            self._strict.append(parser)
            try:
                return parse(parser, args, namespace)
            finally:
                self._strict.pop()

        return strict

    def _left(self, parser: "argparse.ArgumentParser", found: "argparse.Namespace", left: "list[str]") -> "list[str]":
        """What a parser leaves over of joined words; the flag counts, and is no error."""
        if not has_flag(left):
            self._taken.give_back()
            rest = [value for value in vars(found).values() if isinstance(value, list)]  # argparse.REMAINDER
            behind = [word for words in rest for word in words if isinstance(word, str)]
            if has_flag(behind):
                self._taken.keep_here(split_flag(behind)[1])
            return left
        others, values = _split_joined(left)
        if values[-1] not in MODES:
            parser.error(f"argument {FLAGS[0]}: invalid choice: {values[-1]!r} (choose from {', '.join(MODES)})")
        self._taken.set(values)
        names = {each.__name__ for each in type(parser).__mro__}
        return others if parser in self._strict or _REFUSES_WHAT_IS_LEFT in names else left


class _AwaitClick:
    """Notices that click is imported; stays on ``sys.meta_path``, over which other threads may iterate."""

    def __init__(self, taken: _Taken) -> None:
        self._taken = taken

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """What the other finders find of a module of click, with a loader that has its commands watched in the end."""
        if name not in _OF_CLICK:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        execute = getattr(spec and spec.loader, "exec_module", None)
        attributes = getattr(spec and spec.loader, "__dict__", None)
        if execute is not None and isinstance(attributes, dict):

            def exec_module(module: "ModuleType") -> None:
                attributes.pop("exec_module", None)
                execute(module)
                _watch_commands(module, self._taken)

            attributes["exec_module"] = exec_module
        return spec


def _watch_commands(module: "ModuleType", taken: _Taken) -> None:
    """Wrap what the commands of click parse with."""
    command_class: Any = getattr(module, "Command", None)
    parse_args = getattr(command_class, "parse_args", None)
    if parse_args is None or hasattr(parse_args, _MARK):
        return

    def without_the_flag(self: "Any", ctx: "Any", args: "list[str]") -> "Any":
        if not has_flag(args) or not has_flag(sys.argv[1:]):
            return parse_args(self, ctx, args)
        options = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        is_handed_on = getattr(ctx, "ignore_unknown_options", False)  # to another program
        if is_handed_on or not options.isdisjoint(FLAGS):
            taken.give_back()
            if is_handed_on:
                taken.keep_here(split_flag(args)[1])
            return parse_args(self, ctx, args)
        commands = {*self.list_commands(ctx), "--"} if hasattr(self, "list_commands") else {"--"}
        end = next((at for at, word in enumerate(args) if word in commands), len(args))
        others, values = split_flag(args[:end])
        if values and values[-1] not in MODES:
            ctx.fail(f"Invalid value for {FLAGS[0]!r}: {values[-1]!r} is not one of {', '.join(MODES)}.")
        taken.set(values)
        return parse_args(self, ctx, [*others, *args[end:]])

    setattr(without_the_flag, _MARK, True)
    command_class.parse_args = without_the_flag
