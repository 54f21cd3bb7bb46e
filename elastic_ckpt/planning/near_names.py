"""Rules under ``"rename"`` that bring saved names to live ones, found by their dotted segments and shapes. Pure.

Frameworks rename in few ways: they add, drop or replace a prefix, or a segment within (the name of an adapter,
``base_layer``). A saved and a live name that may be one parameter show a rule. The rule that settles most names is
taken, then the best one for the rest. All are tried on every name, as a load would try them: a user decides.

Nothing is proposed where other rules would do as well: ``gate`` and ``up``, of one shape, may be ``w1`` and ``w3`` or
the other way round, and values cannot tell. Words that names have in common settle it (``gate_proj``, ``gate``).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice

from elastic_ckpt.core.fqn import RenameRules, rename
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata
from elastic_ckpt.core.strided import Shape

#: How many saved names show rules.
_MOST_SHOWING = 48
#: The most similar live names of each.
_MOST_SIMILAR = 8
#: Rules that are tried on all names.
_MOST_TRIED = 12
_MOST_RULES = 8
#: Places at which a pair of names may differ.
_MOST_CHANGES = 2
#: Characters of a name, and segments, of which frameworks' names have a dozen.
_MOST_CHARACTERS = 500
_MOST_SEGMENTS = 32
_WORD = re.compile(r"[a-z]+|[A-Z][a-z]*|\d+")
_ESCAPED = re.compile(r"\\|\(\.\*\)")
#: The form of a rule, where none is found.
GENERIC_RENAME = '"elastic_checkpoint": {"rename": [["^old\\\\.(.*)", "new.\\\\1"]]}'
Rule = tuple[str, str]
#: By name; a shape of ``None`` is not known, and fits each.
Shapes = Mapping[str, Shape | None]


@dataclass(frozen=True)
class Renames:
    """Proposed rules, and the saved and live names that become one by them."""

    rules: RenameRules = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def config(self) -> str:
        """The lines of a DeepSpeed config."""
        return f'"elastic_checkpoint": {{"rename": {json.dumps([list(rule) for rule in self.rules])}}}'


def propose_renames(saved: Shapes, live: Shapes) -> Renames:
    """Rules that bring saved names which the live model lacks to live names which the checkpoint lacks.

    Names that both have stay as they are. Without rules if none is found, or if others would do as well.
    """
    kept = saved.keys() & live.keys()
    left = {name: shape for name, shape in saved.items() if name not in kept and _is_short(name)}
    free = {name: shape for name, shape in live.items() if name not in kept and _is_short(name)}
    rules: list[Rule] = []
    while left and free and len(rules) < _MOST_RULES:
        rule, settled = _best_rule(left, free, kept)
        if not settled:
            break
        rules.append(rule)
        left = {name: shape for name, shape in left.items() if name not in settled}
        taken = set(settled.values())
        free = {name: shape for name, shape in free.items() if name not in taken}
    # the first rule that is found in a name applies: those for few names before those for many
    rules.sort(key=lambda rule: len(_ESCAPED.sub("", rule[0])), reverse=True)
    short = {name: shape for name, shape in saved.items() if _is_short(name)}
    pairs = _settled(short, live, rules, kept)
    is_unique = len({rename(name, rules) for name in short}) == len(short)  # else a load refuses them
    if _has_a_choice(rules, pairs, saved, live):
        return Renames()
    return Renames(tuple(rules), tuple(sorted(pairs.items()))) if pairs and is_unique else Renames()


def _is_short(name: str) -> bool:
    """Whether a name is as short as frameworks' names are: of others, too much would have to be compared."""
    return len(name) <= _MOST_CHARACTERS and name.count(".") < _MOST_SEGMENTS


def _best_rule(saved: Shapes, live: Shapes, kept: Iterable[str]) -> tuple[Rule, dict[str, str]]:
    """The rule that settles most names, and these with their live names; none if no rule settles any."""
    showing = sorted(saved)[:: max(len(saved) // _MOST_SHOWING, 1)]
    segments = {name: name.split(".") for name in live}
    tried = {rule: 0 for name in showing for rule in _rules_of(name, saved[name], live, segments)}
    few = {name: saved[name] for name in showing}
    scores = Counter({rule: len(_settled(few, live, [rule])) for rule in tried})
    best: tuple[Rule, dict[str, str]] = ("", ""), {}
    for rule, _ in scores.most_common(_MOST_TRIED):  # of as many, those first whose names have most words in common
        settled = _settled(saved, live, [rule], kept)
        if (len(settled), -len(rule[0])) > (len(best[1]), -len(best[0][0])):
            best = rule, settled
    return best


def _settled(saved: Shapes, live: Shapes, rules: RenameRules, kept: Iterable[str] = ()) -> dict[str, str]:
    """Saved name -> the live name that it becomes; none if rules change ``kept`` names or make two names one."""
    if any(rename(name, rules) != name for name in kept):
        return {}
    found: dict[str, str] = {}
    for name, shape in saved.items():
        new = rename(name, rules)
        if new != name and new in live and _fit(shape, live[new]):
            found[name] = new
    return found if len({*found.values()}) == len(found) else {}


def _has_a_choice(rules: RenameRules, pairs: Mapping[str, str], saved: Shapes, live: Shapes) -> bool:
    """Whether another rule in the place of one would do as well, for all names that go by it."""
    only_saved = _Neighbours({name: shape for name, shape in saved.items() if name not in live}, pairs)
    only_live = _Neighbours({name: shape for name, shape in live.items() if name not in saved}, pairs.values())
    by_rule: dict[str, list[tuple[str, str]]] = {}
    for old, new in pairs.items():
        pattern = next(pattern for pattern, _ in rules if re.search(pattern, old))
        by_rule.setdefault(pattern, []).append((old, new))
    for members in by_rule.values():
        others_of_new = (only_live.others(new, old, saved[old]) for old, new in members)
        others_of_old = (only_saved.others(old, new, live[new]) for old, new in members)
        if set.intersection(*others_of_new) or set.intersection(*others_of_old):
            return True
    return False


class _Neighbours:
    """The names that differ from one of some ``names`` in a single segment, among those of one side."""

    def __init__(self, shapes: Shapes, names: Iterable[str]) -> None:
        self._shapes = shapes
        #: By all segments but one, which is a dot here; of these names alone, since each has as many as segments.
        self._by_rest: dict[tuple[str, ...], list[str]] = {
            rest: [] for name in names for rest in self._rests(name.split("."))
        }
        for name in filter(_is_short, shapes):
            for rest in self._rests(name.split(".")):
                if rest in self._by_rest:
                    self._by_rest[rest].append(name)

    @staticmethod
    def _rests(parts: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """The segments without each one in turn, but for the last, which is the same on both sides."""
        return ((*parts[:position], ".", *parts[position + 1 :]) for position in range(len(parts) - 1))

    def others(self, name: str, counterpart: str, shape: Shape | None) -> set[tuple[str, str]]:
        """The segments of a name, each with one that would fit the name's counterpart on the other side as well."""
        own = name.split(".")
        other = counterpart.split(".")
        replaced = [each for each in other if each not in own]
        found: set[tuple[str, str]] = set()
        for position, (segment, rest) in enumerate(zip(own, self._rests(own), strict=False)):
            if segment in other or segment.isdecimal():
                continue
            nearness = _words_in_common(segment, replaced)
            for neighbour in self._by_rest[rest]:
                segment_there = neighbour.split(".")[position]
                if neighbour == name or segment_there.isdecimal() or not _fit(shape, self._shapes[neighbour]):
                    continue
                if _words_in_common(segment_there, replaced) >= nearness:
                    found.add((segment, segment_there))
        return found


def _words_in_common(segment: str, others: Sequence[str]) -> int:
    words = set(_WORD.findall(segment))
    return max((len(words.intersection(_WORD.findall(other))) for other in others), default=0)


def fits_any(saved: Shapes, live: Shapes) -> bool:
    """Whether any saved name may be a live one, by the shapes."""
    known = {None if shape is None else tuple(shape) for shape in live.values()}
    if not known or None in known:
        return bool(saved and known)
    return any(shape is None or tuple(shape) in known for shape in saved.values())


def _fit(saved: Shape | None, live: Shape | None) -> bool:
    return saved is None or live is None or tuple(saved) == tuple(live)


def _rules_of(name: str, shape: Shape | None, live: Shapes, segments: Mapping[str, Sequence[str]]) -> Iterator[Rule]:
    """The rules that the most similar live names show, of the same layer and shape and with the same last segment."""
    own = name.split(".")
    numbers = [each for each in own if each.isdecimal()]
    similar: list[tuple[float, Sequence[str], SequenceMatcher[str]]] = []
    for other, parts in segments.items():
        if parts[-1] != own[-1] or [each for each in parts if each.isdecimal()] != numbers:
            continue
        if _fit(shape, live[other]):
            matcher = SequenceMatcher(None, own, parts, autojunk=False)
            similar.append((matcher.ratio(), parts, matcher))
    similar.sort(key=lambda each: (-each[0], -sum(_words_in_common(part, own) for part in each[1] if part not in own)))
    rules = (_rule(own, parts, matcher) for _, parts, matcher in similar)
    yield from islice((rule for rule in rules if rule is not None), _MOST_SIMILAR)


def _rule(saved: Sequence[str], live: Sequence[str], matcher: SequenceMatcher[str]) -> Rule | None:
    """The rule that the differences of two names show; ``None`` if these are too many."""
    changes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    if not changes or len(changes) > _MOST_CHANGES:
        return None
    pattern = "^"
    new = ""
    groups = 0
    done = 0
    for kind, start, stop, new_start, new_stop in changes:
        removed = map(re.escape, saved[start:stop])
        inserted = (each.replace("\\", "\\\\") for each in live[new_start:new_stop])
        if start == 0:
            pattern += "".join(rf"{each}\." for each in removed)
            new += "".join(f"{each}." for each in inserted)
        else:
            groups += 1
            kept = ".*"
            if kind == "insert":  # the segment before it tells where
                kept = re.escape(saved[start - 1])
                kept = kept if done == start - 1 and not (groups > 1) else rf".*\.{kept}"
            pattern += f"({kept})" + "".join(rf"\.{each}" for each in removed)
            new += f"\\{groups}" + "".join(f".{each}" for each in inserted)
        done = stop
    rest = r"(.*)" if groups == 0 else r"(\..*)"  # the last segment is the same
    return f"{pattern}{rest}$", f"{new}\\{groups + 1}"


def saved_shapes(metadata: CheckpointMetadata) -> dict[str, Shape | None]:
    """Every saved parameter with its shape, frozen ones included."""
    shapes: dict[str, Shape | None] = {name: saved.shape for name, saved in metadata.parameters.items()}
    for name in metadata.names(FROZEN):
        shapes.setdefault(name, metadata.tensors[name, FROZEN].shape)
    return shapes


def live_shapes(local_state: LocalState) -> dict[str, Shape | None]:
    """Every parameter of the live model; without a shape where this rank does not know that of the whole."""
    model = local_state.model
    shapes: dict[str, Shape] = {whole.name: whole.shape for whole in local_state.wholes if whole.key != BUFFER}
    shapes |= {part.name: part.shape for part in local_state.fragments}
    shapes |= {name: shards.shapes[0] for name, shards in model.layouts.items() if shards.shapes}
    members = {name for flat in local_state.flats for name in flat.members}
    names = model.names.union(members, shapes) - {w.name for w in local_state.wholes if w.key == BUFFER}
    return {name: shapes.get(name) if model.coordinates.tp == 1 else None for name in sorted(names)}
