"""Regular expressions of an untrusted checkpoint, matched against names of parameters in work that is counted. Pure.

:mod:`re` backtracks: a pattern of 20 characters can take hours for one name. Here a pattern that has anything to choose
from becomes an automaton (Glushkov's: one state for each character of the pattern), which looks at each character of a
name once. Names written out, of which a checkpoint may have one for each parameter, are looked up.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
#: A pattern that is a name written out: whether it has an end, and the name.
_LITERAL = re.compile(r"\^?((?:[A-Za-z0-9_/:,-]|\\[^A-Za-z0-9])*)(\$?)")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
#: Characters of one pattern; states of one automaton, and of all of a checkpoint.
LONGEST = 512
_MOST_STATES = 512
_MOST_STATES_OF_ALL = 1 << 14
#: Transitions that an automaton remembers.
_MOST_REMEMBERED = 1 << 14
#: Characters of names and states looked at, of all names of a checkpoint: some 15 seconds.
_MOST_STEPS = 1 << 27
#: What a pattern costs that matches, and is kept for a name; and the bytes of a name that are looked up in a step.
_STEPS_OF_MATCH = 32
_LOOKED_UP_NBYTES = 64
#: What :mod:`re` does while an automaton takes a step.
_COMPILED_STEPS = 16
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    _parser.CATEGORY_DIGIT: str.isdecimal,
    _parser.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    _parser.CATEGORY_SPACE: str.isspace,
    _parser.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    _parser.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    _parser.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}
_STARTS = (_parser.AT_BEGINNING, _parser.AT_BEGINNING_STRING)
_ENDS = (_parser.AT_END, _parser.AT_END_STRING)
_ASSERTIONS = (_parser.ASSERT, _parser.ASSERT_NOT)
#: What :mod:`re` may have to try in several ways.
_CHOICES = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.BRANCH, getattr(_parser, "POSSESSIVE_REPEAT", None))


class _NoAutomaton(Exception):
    """The pattern has something that only :mod:`re` matches."""


class NamePatterns:
    """Patterns, in an order that counts, and the names that begin with a match of each (as ``re.match`` decides).

    Raises ``ValueError`` for what is no pattern (``re.error``), and for one that could take too long; so does
    :meth:`matching`, once all names together have taken too long.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(dict.fromkeys(patterns))
        self._whole: dict[str, list[int]] = defaultdict(list)  # positions by the name that a pattern is
        self._beginnings: dict[str, list[int]] = defaultdict(list)
        self._others: list[tuple[int, _Matcher]] = []
        self._known: dict[str, tuple[str, ...]] = {}
        self._left = _MOST_STEPS
        states = 0
        for position, pattern in enumerate(self._patterns):
            if literal := _LITERAL.fullmatch(pattern):
                text, has_end = literal.groups()
                (self._whole if has_end else self._beginnings)[_ESCAPED.sub(r"\1", text)].append(position)
                continue
            matcher = _Matcher(pattern)
            states += matcher.size
            if states > _MOST_STATES_OF_ALL:
                raise ValueError(f"the patterns, {pattern[:40]!r} among them, are too many to match")
            self._others.append((position, matcher))
        self._lengths = sorted(set(map(len, self._beginnings)))

    def __reduce__(self) -> tuple[type[NamePatterns], tuple[tuple[str, ...]]]:
        return NamePatterns, (self._patterns,)

    def matching(self, name: str) -> tuple[str, ...]:
        """The patterns that match at the beginning of a name, in their order."""
        if name not in self._known:
            self._known[name] = tuple(self._patterns[position] for position in sorted(self._positions(name)))
        return self._known[name]

    def _positions(self, name: str) -> Iterator[int]:
        yield from self._charged(self._whole.get(name, ()))
        if name.endswith("\n"):  # before which $ matches, too
            yield from self._charged(self._whole.get(name[:-1], ()))
        for length in self._lengths:
            if length > len(name):
                break
            self._take(1 + length // _LOOKED_UP_NBYTES, name[:length])
            yield from self._charged(self._beginnings.get(name[:length], ()))
        for position, matcher in self._others:
            matches, steps = matcher.match(name)
            self._take(steps, matcher.pattern)
            if matches:
                yield position

    def _charged(self, positions: Sequence[int]) -> Sequence[int]:
        """Positions of patterns that match: many may be one name, written in several ways."""
        if positions:
            self._take(_STEPS_OF_MATCH * len(positions), self._patterns[positions[0]])
        return positions

    def _take(self, steps: int, pattern: str) -> None:
        self._left -= steps
        if self._left < 0:
            raise ValueError(f"its patterns take too long to match, {pattern[:40]!r} among them")


def matches_whole(pattern: str, name: str) -> bool | None:
    """Whether a pattern matches all of a name (as ``re.fullmatch`` decides); ``None`` if that could take too long."""
    matcher = _matcher_of(pattern)
    return None if matcher is None else matcher.match(name, is_whole=True)[0]


@lru_cache(maxsize=256)
def _matcher_of(pattern: str) -> _Matcher | None:
    try:
        return _Matcher(pattern)
    except ValueError:
        return None


class _Matcher:
    """One pattern that is more than a name."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        if len(pattern) > LONGEST:
            raise ValueError(f"{pattern[:40]!r} is no pattern: it has {len(pattern)} characters")
        try:
            tree = _parser.parse(pattern)
        except (RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern[:40]!r} is no pattern: {type(error).__name__}") from error
        except re.error as error:
            raise ValueError(f"{pattern[:40]!r} is no pattern: {error}") from error
        if tree.state.flags & re.VERBOSE:  # which hides what it means
            raise ValueError(f"the pattern {pattern[:40]!r} is in verbose mode")
        self._automata: list[tuple[bool, _Automaton]] = []  # each has to match, or not to match
        self._compiled: re.Pattern[str] | None = None
        try:
            self._build(tree)
        except _NoAutomaton as error:
            if _choices(tree) > 1:
                problem = f"the pattern {pattern[:40]!r} has {error} and repeats or alternatives"
                raise ValueError(f"{problem}: to match it could take forever") from None
            self._compiled = re.compile(pattern)
            self._automata = []
        self.size = sum(automaton.size for _, automaton in self._automata) or len(pattern)

    def _build(self, tree: Any) -> None:
        if tree.state.flags & ~re.UNICODE:
            raise _NoAutomaton("flags")
        items = [*tree]
        while items and items[0][0] in _ASSERTIONS:  # at the beginning: what a name has to begin with as well
            (kind, (direction, inner)), *items = items
            if direction != 1:
                raise _NoAutomaton("an assertion about what is before")
            self._automata.append((kind is _parser.ASSERT, _Automaton([*inner])))
        self._automata.append((True, _Automaton(items)))

    def match(self, name: str, is_whole: bool = False) -> tuple[bool, int]:
        """Whether a name begins with a match, or is one (``is_whole``); what that took."""
        if self._compiled is not None:
            steps = len(name) * max(len(name), len(self.pattern)) // _COMPILED_STEPS + 1
            match = self._compiled.fullmatch if is_whole else self._compiled.match
            return match(name) is not None, steps
        steps = 0
        for number, (wanted, automaton) in enumerate(self._automata):
            matches, taken = automaton.match(name, is_whole and number == len(self._automata) - 1)
            steps += taken
            if matches is not wanted:
                return False, steps
        return True, steps


def _choices(node: Any) -> int:
    """Repeats and alternatives of a parsed pattern, each of which :mod:`re` tries for each of the others."""
    if isinstance(node, tuple) and node and any(node[0] is each for each in _CHOICES):
        return 1 + _choices(node[1])
    is_list = isinstance(node, (tuple, list, _parser.SubPattern))
    return sum(map(_choices, node)) if is_list else 0


@dataclass(frozen=True)
class _Part:
    """States of a part of a pattern, as bits: where it may begin and end, and whether it may be empty."""

    first: int = 0
    last: int = 0
    may_be_empty: bool = True


class _Automaton:
    """The states of a parsed pattern, and which may follow each."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._tests: list[Callable[[str], bool]] = []
        self._follow: list[int] = []
        self._line_ends = self._string_ends = 0  # states that are an end, and take no character
        whole = self._sequence(items, at_start=True, at_end=True)
        self._first = whole.first
        self._always = whole.may_be_empty
        self._last = whole.last & ~(self._line_ends | self._string_ends)
        self._known: dict[tuple[int, str], tuple[int, bool]] = {}
        self.size = len(self._tests) + 1

    def match(self, name: str, is_whole: bool) -> tuple[bool, int]:
        """Whether a name begins with a match, or is one (``is_whole``); what that took."""
        active = self._first
        is_match = self._always
        steps = 1
        for index, char in enumerate(name):
            if is_match and not is_whole:
                return True, steps
            if active & self._line_ends and name[index:] == "\n" and not is_whole:
                return True, steps
            steps += 1
            if (step := self._known.get((active, char))) is None:
                step, taken = self._step(active, char)
                steps += taken
            active, is_match = step
            if not (active or is_match):
                return False, steps
        return is_match or bool(active & (self._line_ends | self._string_ends)), steps

    def _step(self, active: int, char: str) -> tuple[tuple[int, bool], int]:
        """The states behind a character, and whether the pattern may end there; what that took."""
        following = 0
        is_match = False
        taken = 0
        for state in _bits(active):
            taken += 4
            if self._tests[state](char):
                following |= self._follow[state]
                is_match |= bool(self._last >> state & 1)
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        self._known[active, char] = following, is_match
        return (following, is_match), taken

    def _state(self, test: Callable[[str], bool]) -> _Part:
        if len(self._tests) >= _MOST_STATES:
            raise _NoAutomaton("too many characters to match, as repeats multiply them,")
        self._tests.append(test)
        self._follow.append(0)
        bit = 1 << (len(self._tests) - 1)
        return _Part(bit, bit, may_be_empty=False)

    def _sequence(self, items: Sequence[Any], at_start: bool, at_end: bool) -> _Part:
        made = _Part()
        for number, item in enumerate(items):
            behind = items[number + 1 :]
            is_last = at_end and all(kind is _parser.AT and where is _parser.AT_END for kind, where in behind)
            made = self._joined(made, self._part(item, at_start, is_last))
            at_start = at_start and item[0] is _parser.AT
        return made

    def _joined(self, before: _Part, behind: _Part) -> _Part:
        for state in _bits(before.last):
            self._follow[state] |= behind.first
        return _Part(
            before.first | (behind.first if before.may_be_empty else 0),
            behind.last | (before.last if behind.may_be_empty else 0),
            before.may_be_empty and behind.may_be_empty,
        )

    def _part(self, item: Any, at_start: bool, at_end: bool) -> _Part:
        kind, value = item
        if kind is _parser.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise _NoAutomaton("flags")
            return self._sequence([*inner], at_start, at_end)
        if kind is _parser.BRANCH:
            parts = [self._sequence([*each], at_start, at_end) for each in value[1]]
            made = parts[0]
            for part in parts[1:]:
                first = made.first | part.first
                last = made.last | part.last
                made = _Part(first, last, made.may_be_empty or part.may_be_empty)
            return made
        if kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
            return self._repeated(*value)
        if kind is _parser.AT:
            return self._at(value, at_start, at_end)
        return self._state(_test_of(kind, value))

    def _at(self, where: Any, at_start: bool, at_end: bool) -> _Part:
        if where in _STARTS and at_start:
            return _Part()
        if where not in _ENDS or not at_end:
            raise _NoAutomaton("a condition on where it is")
        part = self._state(lambda _: False)
        if where is _parser.AT_END:
            self._line_ends |= part.first
        else:
            self._string_ends |= part.first
        return part

    def _repeated(self, least: int, most: int, inner: Any) -> _Part:
        """Copies of what is repeated: as many as there have to be, then one that may go on, or those that may follow.

        A copy that is optional is followed by others only through itself, so that they come to ``most`` at most.
        """
        items = [*inner]
        made = _Part()
        before = len(self._tests)
        is_endless = most is _parser.MAXREPEAT
        for number in range(max(least, 1) if is_endless else most):
            part = self._sequence(items, at_start=False, at_end=False)
            if len(self._tests) == before:  # nothing is repeated
                return part
            if is_endless and number == max(least, 1) - 1:
                for state in _bits(part.last):
                    self._follow[state] |= part.first
            optional = _Part(part.first, part.last, part.may_be_empty or number >= least)
            made = self._joined(made, optional)
        return made


def _test_of(kind: Any, value: Any) -> Callable[[str], bool]:
    """Whether a character is what one item of a pattern stands for."""
    if kind is _parser.LITERAL:
        return chr(value).__eq__
    if kind is _parser.NOT_LITERAL:
        return chr(value).__ne__
    if kind is _parser.ANY:
        return lambda char: char != "\n"
    if kind is not _parser.IN:
        raise _NoAutomaton(str(kind).lower().replace("_", " "))
    is_negated = bool(value) and value[0][0] is _parser.NEGATE
    tests = [_member_of(*each) for each in value[is_negated:]]
    return lambda char: any(test(char) for test in tests) is not is_negated


def _member_of(kind: Any, value: Any) -> Callable[[str], bool]:
    """Whether a character is in one part of a set."""
    if kind is _parser.LITERAL:
        return chr(value).__eq__
    if kind is _parser.RANGE:
        low, high = value
        return lambda char: low <= ord(char) <= high
    if kind is _parser.CATEGORY and value in _CATEGORIES:
        return _CATEGORIES[value]
    raise _NoAutomaton(str(kind).lower())


def _bits(states: int) -> Iterator[int]:
    """The numbers of the states that are set."""
    while states:
        lowest = states & -states
        yield lowest.bit_length() - 1
        states ^= lowest
