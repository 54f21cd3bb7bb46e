"""How an ``argparse`` parser that got flags of ours goes on to read its own abbreviations and positional arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any


def abbreviate_as_before(
    parser: argparse.ArgumentParser, is_ours: Callable[[argparse.Action], bool], hidden: str
) -> None:
    """Have abbreviations mean the script's own options; one of ours, only where it is no abbreviation of these.

    Args:
        parser: that has our flags.
        is_ours: whether an action is that of one of our flags.
        hidden: a second spelling, which makes no abbreviation ambiguous.
    """
    options_of = parser._get_option_tuples

    def without_ours(word: str) -> list[Any]:
        found = options_of(word)
        others = [each for each in found if not is_ours(each[0])]
        return others or [each for each in found if each[1] != hidden] or found

    parser._get_option_tuples = without_ours  # type: ignore[method-assign, assignment]


def leave_other_words(
    parser: argparse.ArgumentParser, is_ours: Callable[[argparse.Action], bool], values: Sequence[str]
) -> None:
    """Have a word behind an option of ours be a positional argument of the script's, if it is none of our values.

    argparse takes any word as the value of an option with ``nargs="?"``, and refuses it if it is not among the choices.
    A parser without positional arguments goes on to do that: there, the word can only be a misspelled value.

    Args:
        parser: that has our flags.
        is_ours: whether an action is that of one of our options, which have a value or none.
        values: that our options take.
    """
    parse = parser._parse_known_args

    def with_values(words: list[str], *more: Any, **options: Any) -> Any:
        return parse(_without_others(parser, words, is_ours, values), *more, **options)

    parser._parse_known_args = with_values  # type: ignore[method-assign, assignment]


def _without_others(
    parser: argparse.ArgumentParser,
    words: list[str],
    is_ours: Callable[[argparse.Action], bool],
    values: Sequence[str],
) -> list[str]:
    """Words in which an option of ours, if followed by a word that is no value of it, is ``option=default``."""
    commands: set[str] = set()
    positionals = parser._get_positional_actions()
    for action in positionals:
        if action.nargs == argparse.PARSER and action.choices is not None:
            commands.update(map(str, action.choices))
        elif action.nargs in (argparse.PARSER, argparse.REMAINDER):
            return words  # where the words of another program begin is not known
    if not positionals:
        return words
    result = list(words)
    for position, (word, following) in enumerate(pairwise(words)):
        if word == "--" or word in commands:  # behind a command, all words are its parser's
            break
        option = parser._option_string_actions.get(word)
        is_value = following in values or following[:1] in parser.prefix_chars
        if option is not None and is_ours(option) and not is_value:
            result[position] = f"{word}={option.const}"
    return result
