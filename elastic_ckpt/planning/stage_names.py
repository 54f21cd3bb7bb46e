"""Names of numbered optimizer states, those of pipeline stages among them. Pure.

Without ZeRO, each stage of a ``PipelineModule`` numbers the states of its own parameters, and no file says which layers
were on which stage. Within a stage, its tied modules come first, then its layers in the order of the pipeline. So where
the live stages hold as many parameters of the same shapes as the saved ones, the numbers are theirs. Elsewhere, the
saved numbers of parameters and their shapes must leave exactly one way to divide the layers into stages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from elastic_ckpt.core.fqn import NamedStates, NumberedStates, RenameRules, rename
from elastic_ckpt.core.local_state import TIED_MODULES, LiveGroup, LiveStage, LocalState
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.wrappers import wrapped_otherwise
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, WEIGHTS_ALONE, UnsupportedError
from elastic_ckpt.planning.live_names import name_states, named_in_order

_OWNER = re.compile(rf"{re.escape(TIED_MODULES)}[^.]+\.|[^.]+\.")
#: More tied modules could be on too many combinations of stages.
_MOST_TIED = 4


class StateNames:
    """Names numbered states of a model (:func:`~elastic_ckpt.planning.live_names.name_states`), or of pipeline stages.

    Args:
        live: the live engine, if there is one, whose names are as renamed by ``rules``.
        needed: whether states that cannot be named are an error.
    """

    def __init__(self, live: LocalState | None = None, rules: RenameRules = (), needed: bool = True) -> None:
        self._live = live
        self._rules = rules
        self._needed = needed
        self._known: list[tuple[Sequence[NumberedStates], Sequence[NamedStates] | None]] = []

    def __call__(self, numbered: NumberedStates) -> NamedStates | None:
        """The names of each group's members; ``None`` if they are unknown and not needed.

        Raises :class:`UnsupportedError` if it is unknown which pipeline stage had which parameters, and what
        :func:`~elastic_ckpt.planning.live_names.name_states` raises of a model.
        """
        if not numbered.stages:
            groups, ties = ((), {}) if self._live is None else (self._live.groups, self._live.model.ties)
            return name_states(numbered, groups, ties, self._rules, self._needed)
        named = self._of_stages(numbered.stages)
        if named is None and self._needed:
            raise _not_known(numbered, self._live)
        return None if named is None else named[numbered.stage]

    def _of_stages(self, stages: Sequence[NumberedStates]) -> Sequence[NamedStates] | None:
        """The names of all stages, which are found once."""
        for known, named in self._known:
            if known is stages:
                return named
        named = _name_stages(stages, self._live, self._rules)
        self._known.append((stages, named))
        return named


def _name_stages(
    stages: Sequence[NumberedStates], live: LocalState | None, rules: RenameRules
) -> Sequence[NamedStates] | None:
    """The names of every stage's members; ``None`` if they are unknown."""
    division = _Division.of(stages, live, rules)
    on_live = division.on_live_stages()
    if on_live is not None and not (division.skips(on_live) or division.lacks(on_live)):
        return on_live
    only = division.only_one()
    if only is None and on_live is not None:
        # some train no more, or others do now, too: not both at once, as where layers are on other stages
        return None if division.skips(on_live) and division.lacks(on_live) else on_live
    return only


@dataclass(frozen=True)
class _Division:
    """What is known of the division of a saved pipeline into stages."""

    stages: Sequence[NumberedStates]
    live: Sequence[LiveStage]  # by saved names, of what is saved; empty without a live model
    groups: Sequence[LiveGroup]  # of this rank, of whose hyperparameters those of all stages are

    @classmethod
    def of(cls, stages: Sequence[NumberedStates], live: LocalState | None, rules: RenameRules) -> _Division:
        """The division of these stages, given the live engine, if there is one."""
        if live is None:
            return cls(stages, (), ())
        own = LiveStage(live.model.names, tuple(group.names for group in live.groups))
        of_live = live.stages or (own,)
        saved = {rename(name, rules): name for name in stages[0].weights}
        every = frozenset[str]().union(*(stage.names for stage in of_live))
        saved |= {new: saved[old] for old, new in wrapped_otherwise(saved, every).items()}
        by_saved = [
            LiveStage(
                frozenset(saved[name] for name in stage.names if name in saved),
                tuple(tuple(saved[name] for name in group if name in saved) for group in stage.groups),
            )
            for stage in of_live
        ]
        return cls(stages, by_saved, live.groups)

    def on_live_stages(self) -> Sequence[NamedStates] | None:
        """The names of all members if each stage had what the live one has; ``None`` if they do not fit."""
        if len(self.live) != len(self.stages):
            return None
        pairs = enumerate(self.live)
        named = [self._named(number, stage.names.union(*stage.groups), stage.groups) for number, stage in pairs]
        found = [each for each in named if each is not None]
        return found if len(found) == len(named) else None

    def skips(self, named: Sequence[NamedStates]) -> bool:
        """Whether states of some saved members are nobody's."""
        return any(name is None for members, _ in named for name in chain.from_iterable(members))

    def lacks(self, named: Sequence[NamedStates]) -> bool:
        """Whether some live parameters that train get no state."""
        placed = {name for members, _ in named for name in chain.from_iterable(members)}
        return not placed.issuperset(self._trained())

    def only_one(self) -> Sequence[NamedStates] | None:
        """The names of all members if a single division gives each stage what it numbers; ``None`` if others do too.

        The order within a group must be the model's: of no other is it known how it continues over stages.
        """
        group_of = self._trained()
        first = self.stages[0]
        position = {name: at for at, name in enumerate(first.weights)}
        orders = ([position[name] for name in group] for stage in self.live for group in stage.groups)
        if not all(order == sorted(order) for order in orders):
            return None
        owned: dict[str, list[str]] = {}
        for name in filter(group_of.__contains__, first.weights):
            owner = _OWNER.match(name)
            owned.setdefault(owner.group() if owner else name, []).append(name)
        tied = {owner: names for owner, names in owned.items() if owner.startswith(TIED_MODULES)}
        if len(tied) > _MOST_TIED:
            return None
        layers = [names for owner, names in owned.items() if owner not in tied]
        found: dict[tuple[int, frozenset[str]], list[list[NamedStates]]] = {(0, frozenset()): [[]]}
        for number in range(len(self.stages)):
            longer: dict[tuple[int, frozenset[str]], list[list[NamedStates]]] = {}
            for (start, used), ways in found.items():
                for end, owners, named in self._next(number, layers, tied, start, group_of):
                    kept = longer.setdefault((end, used | owners), [])
                    kept += [[*way, named] for way in ways][: 2 - len(kept)]
            found = longer
        ways = found.get((len(layers), frozenset(tied)), [])
        return ways[0] if len(ways) == 1 else None

    def _next(
        self,
        number: int,
        layers: Sequence[Sequence[str]],
        tied: Mapping[str, Sequence[str]],
        start: int,
        group_of: Mapping[str, int],
    ) -> Iterator[tuple[int, frozenset[str], NamedStates]]:
        """The ways to continue with this stage: the end of its layers, its tied modules, the names of its members."""
        for owners in chain.from_iterable(combinations(tied, count) for count in range(len(tied) + 1)):
            names = [name for owner in owners for name in tied[owner]]
            left = self._size(number) - self._sum(number, names)
            end = start
            while left > 0 and end < len(layers):
                names += layers[end]
                left -= self._sum(number, layers[end])
                end += 1
            if left:
                continue
            groups = [[name for name in names if group_of[name] == group] for group in range(len(self.groups) or 1)]
            named = self._named(number, frozenset(names), groups if self.groups else ())
            if named is not None and {*chain.from_iterable(named[0])} == {*names}:
                yield end, frozenset(owners), named

    def _trained(self) -> dict[str, int]:
        """Saved name of each parameter that trains -> number of its live param group; all without a live model."""
        first = self.stages[0]
        if not self.live:
            return dict.fromkeys((name for name in first.weights if name not in {*first.buffers, *first.aliases}), 0)
        pairs = ((name, number) for stage in self.live for number, group in enumerate(stage.groups) for name in group)
        return {first.aliases.get(name, name): number for name, number in pairs}

    def _named(self, number: int, names: Collection[str], groups: Sequence[Sequence[str]]) -> NamedStates | None:
        """The names of a saved stage's members if it had these parameters, in these live groups."""
        stage = self.stages[number]
        own = replace(
            stage,
            weights={name: shape for name, shape in stage.weights.items() if name in names},
            aliases={name: first for name, first in stage.aliases.items() if name in names},
            buffers=[name for name in stage.buffers if name in names],
        )
        if len(groups) != len(self.groups):
            return None  # live stages have different param groups
        pairs = zip(groups, self.groups, strict=True)
        return named_in_order(own, [LiveGroup(tuple(names), group.hyperparameters) for names, group in pairs], ())

    def _size(self, number: int) -> int:
        """How many parameters a stage numbers; of flat masters, how many elements they have."""
        stage = self.stages[number]
        every = chain.from_iterable(stage.shapes)
        return sum(math.prod(shape or ()) for shape in every) if stage.is_flat else sum(1 for _ in every)

    def _sum(self, number: int, names: Sequence[str]) -> int:
        """What these parameters count in :meth:`_size`."""
        stage = self.stages[number]
        return sum(math.prod(stage.weights[name]) for name in names) if stage.is_flat else len(names)


def _not_known(numbered: NumberedStates, live: LocalState | None) -> UnsupportedError:
    problem = "without ZeRO, each pipeline stage numbers its optimizer states, and which stage had which parameters is "
    problem += "not known"
    counts = [sum(map(len, stage.shapes)) for stage in numbered.stages]
    what = "flat tensors" if numbered.is_flat else "parameters"
    found = f"stages of {counts} {what}"
    if live is not None:
        stages = live.stages or (LiveStage(frozenset(), tuple(group.names for group in live.groups)),)
        found += f", {[sum(map(len, stage.groups)) for stage in stages]} parameters in the live ones"
    expected = f"the {counted(len(counts), 'stage')} of the save, or shapes that leave one way to divide the layers"
    remedy = AT_ITS_TOPOLOGY, WEIGHTS_ALONE
    return UnsupportedError(problem, numbered.path, expected, found, remedy=remedy)
