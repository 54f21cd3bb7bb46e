"""Names of numbered optimizer states, those of pipeline stages among them. Pure.

Without ZeRO, each stage of a ``PipelineModule`` numbers the states of its own parameters, and no file says which layers
were on which stage. Within a stage, its tied modules come first, then its layers in the order of the pipeline. So where
the live stages hold as many parameters of the same shapes as the saved ones, the numbers are theirs. Elsewhere, the
saved numbers of parameters and their shapes must leave exactly one way to divide the layers into stages.

Stages are consecutive layers, but for those of a ``DualPipeVModule`` (since DeepSpeed 0.19.8): of ``P`` ranks, rank
``r`` has stages ``r`` and ``2 * P - 1 - r``, and numbers what is in both. No file says which of the two classes saved
it, so that live stages of either count only where those of the other do not fit, or saved values tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, pairwise

from elastic_ckpt.core.fqn import NamedStates, NumberedStates, RenameRules, rename
from elastic_ckpt.core.local_state import TIED_MODULES, LiveGroup, LiveStage, LocalState
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.wrappers import wrapped_otherwise
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, BY_DEEPSPEED, WEIGHTS_ALONE, MismatchError, UnsupportedError
from elastic_ckpt.planning.live_names import name_states, named_in_order

_OWNER = re.compile(rf"{re.escape(TIED_MODULES)}[^.]+\.|[^.]+\.")
#: More tied modules could be on too many combinations of stages.
_MOST_TIED = 4
#: Steps of a search for divisions, each a layer or a name that is looked at: a hundred layers on a dozen stages of
#: DualPipeV take a million.
_MOST_STEPS = 1 << 22


class _NotLookedAt(Exception):
    """The stages of a pipeline could be divided in ways that are not looked at, which may fit or not."""


@dataclass
class _Steps:
    """The steps that are left of a search."""

    left: int

    def take(self, count: int) -> None:
        """Raise :class:`_NotLookedAt` where there are not so many."""
        self.left -= count
        if self.left < 0:
            raise _NotLookedAt


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
        if division.fits_otherwise(on_live):
            raise _of_either_class(stages)
        return on_live
    only = division.only_one()
    if only is None and on_live is not None:
        # some train no more, or others do now, too: not both at once, as where layers are on other stages
        is_other = not division.is_consecutive() or (division.skips(on_live) and division.lacks(on_live))
        return None if is_other else on_live
    return only


@dataclass(frozen=True)
class _Division:
    """What is known of the division of a saved pipeline into stages."""

    stages: Sequence[NumberedStates]
    live: Sequence[LiveStage]  # by saved names, of what is saved; empty without a live model
    groups: Sequence[LiveGroup]  # of this rank, of whose hyperparameters those of all stages are
    steps: _Steps = field(default_factory=lambda: _Steps(_MOST_STEPS))

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        """The place of each weight in the order of the pipeline."""
        return {name: at for at, name in enumerate(self.stages[0].weights)}

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

    @cached_property
    def _buffers(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(stage.buffers for stage in self.stages))

    def on_live_stages(self) -> Sequence[NamedStates] | None:
        """The names of all members if each stage had what the live one has; ``None`` if they do not fit."""
        if len(self.live) != len(self.stages) or not (self.is_consecutive() or self.stages[0].may_be_folded):
            return None
        pairs = enumerate(self.live)
        named = [self._named(number, stage.names.union(*stage.groups), stage.groups) for number, stage in pairs]
        found = [each for each in named if each is not None]
        return found if len(found) == len(named) else None

    def fits_otherwise(self, named: Sequence[NamedStates]) -> bool:
        """Whether what each stage numbers fits a division too that is not the live one.

        Of consecutive layers there is no other, so that only DualPipeV's are looked at, and of live ones of DualPipeV
        all. Not where saved values are compared, which tell.
        """
        first = self.stages[0]
        if first.compared or not first.may_be_folded or len(self.stages) == 1:
            return False
        try:
            others = self._ways(folded=True) if self.is_consecutive() else self.ways()
        except _NotLookedAt:  # none of these is known not to be it
            return True
        return any(_members(way) != _members(named) for way in others)

    def is_consecutive(self) -> bool:
        """Whether the live stages are consecutive layers, not DualPipeV's."""
        own = (
            [self._positions[name] for name in each.names if not name.startswith(TIED_MODULES)] for each in self.live
        )
        bounds = [(min(each), max(each)) for each in own if each]
        return all(before[1] < after[0] for before, after in pairwise(bounds))

    def skips(self, named: Sequence[NamedStates]) -> bool:
        """Whether states of some saved members are nobody's."""
        return any(name is None for members, _ in named for name in chain.from_iterable(members))

    def lacks(self, named: Sequence[NamedStates]) -> bool:
        """Whether some live parameters that train get no state."""
        placed = {name for members, _ in named for name in chain.from_iterable(members)}
        return not placed.issuperset(self._trained())

    def only_one(self) -> Sequence[NamedStates] | None:
        """The names of all members if a single division gives each stage what it numbers; ``None`` if others do too."""
        try:
            ways = self.ways()
        except _NotLookedAt:
            return None
        return ways[0] if len(ways) == 1 else None

    def ways(self) -> Sequence[Sequence[NamedStates]]:
        """The divisions that give each stage what it numbers, two at most of each class of pipeline.

        The order within a group must be the model's: of no other is it known how it continues over stages.
        """
        consecutive = self._ways(folded=False)
        if not self.stages[0].may_be_folded or len(self.stages) == 1:
            return consecutive
        return [*consecutive, *(way for way in self._ways(folded=True) if way not in consecutive)]

    def _ways(self, folded: bool) -> list[list[NamedStates]]:
        """Two :meth:`ways` at most, of consecutive layers, or ``folded`` as DualPipeV's.

        Raises :class:`_NotLookedAt` where there may be others, of many tied modules.
        """
        group_of = self._trained()
        first = self.stages[0]
        orders = ([self._positions[name] for name in group] for stage in self.live for group in stage.groups)
        if not all(order == sorted(order) for order in orders):
            return []  # of which it is not known how it goes on over other stages: only on the live ones
        owned: dict[str, list[str]] = {}
        for name in filter(group_of.__contains__, first.weights):
            owner = _OWNER.match(name)
            owned.setdefault(owner.group() if owner else name, []).append(name)
        tied = {owner: names for owner, names in owned.items() if owner.startswith(TIED_MODULES)}
        if len(tied) > _MOST_TIED:
            raise _NotLookedAt
        layers = [names for owner, names in owned.items() if owner not in tied]
        # by the layers that are left and the tied modules that are placed
        found: dict[tuple[range, frozenset[str]], list[list[NamedStates]]] = {
            (range(len(layers)), frozenset()): [[]],
        }
        for number in range(len(self.stages)):
            longer: dict[tuple[range, frozenset[str]], list[list[NamedStates]]] = {}
            for (left, used), ways in found.items():
                for rest, owners, named in self._next(number, layers, tied, left, group_of, folded):
                    kept = longer.setdefault((rest, used | owners), [])
                    kept += [way for way in ([*each, named] for each in ways) if way not in kept][: 2 - len(kept)]
            found = longer
        return [way for (left, used), ways in found.items() if not left and len(used) == len(tied) for way in ways][:2]

    def _next(
        self,
        number: int,
        layers: Sequence[Sequence[str]],
        tied: Mapping[str, Sequence[str]],
        left: range,
        group_of: Mapping[str, int],
        folded: bool,
    ) -> Iterator[tuple[range, frozenset[str], NamedStates]]:
        """The ways to go on with this stage: the layers that are left then, its tied modules, its members' names."""
        for owners in chain.from_iterable(combinations(tied, count) for count in range(len(tied) + 1)):
            of_tied = [name for owner in owners for name in tied[owner]]
            size = self._size(number) - self._sum(number, of_tied)
            for rest in self._shares(number, layers, left, size, folded):
                of_layers = chain(range(left.start, rest.start), range(rest.stop, left.stop))
                names = [*of_tied, *chain.from_iterable(layers[each] for each in of_layers)]
                self.steps.take(len(names))
                groups = [[name for name in names if group_of[name] == group] for group in range(len(self.groups) or 1)]
                named = self._named(number, frozenset(names), groups if self.groups else ())
                if named is not None and {*chain.from_iterable(named[0])} == {*names}:
                    yield rest, frozenset(owners), named

    def _shares(
        self, number: int, layers: Sequence[Sequence[str]], left: range, size: int, folded: bool
    ) -> Iterator[range]:
        """The layers that are left if this stage has some of ``size``, from the front; ``folded``: from both ends."""
        of_front = 0
        for start in range(left.start, left.stop + 1):
            missing = size - of_front
            stop = left.stop
            while folded and missing > 0 and stop > start:
                stop -= 1
                missing -= self._sum(number, layers[stop])
                self.steps.take(len(layers[stop]) + 1)
            if missing == 0:
                yield range(start, stop)
            if (missing <= 0 and not folded) or start == left.stop:
                return
            of_front += self._sum(number, layers[start])
            self.steps.take(len(layers[start]) + 1)

    def _trained(self) -> dict[str, int]:
        """Saved name of each parameter that trains -> number of its live param group; all without a live model."""
        first = self.stages[0]
        if not self.live:
            others = {*first.buffers, *first.aliases}
            return dict.fromkeys((name for name in first.weights if name not in others), 0)
        pairs = ((name, number) for stage in self.live for number, group in enumerate(stage.groups) for name in group)
        return {first.aliases.get(name, name): number for name, number in pairs}

    def _named(self, number: int, names: Collection[str], groups: Sequence[Sequence[str]]) -> NamedStates | None:
        """The names of a saved stage's members if it had these parameters, in these live groups."""
        stage = self.stages[number]
        in_order = sorted(filter(stage.weights.__contains__, names), key=self._positions.__getitem__)
        weights = {name: stage.weights[name] for name in in_order}
        own = replace(
            stage,
            weights=weights,
            aliases={name: stage.aliases[name] for name in weights if name in stage.aliases},
            buffers=[name for name in weights if name in self._buffers],
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


def _members(division: Sequence[NamedStates]) -> list[list[list[str | None]]]:
    """The names alone."""
    return [[list(group) for group in members] for members, _ in division]


def _of_either_class(stages: Sequence[NumberedStates]) -> MismatchError:
    """The error for states that two divisions may fit; no :class:`UnsupportedError`: DeepSpeed goes by position."""
    problem = (
        "without ZeRO, each pipeline rank numbers its optimizer states, and they may fit two divisions of the layers: "
    )
    problem += "that of a PipelineModule and that of a DualPipeVModule, or two of the latter"
    expected = "layers of shapes that tell them apart, fp16 or bf16, ZeRO-1, or an optimizer of named_parameters()"
    found = f"{counted(len(stages), 'pipeline rank')} saved by DeepSpeed 0.19.8 or later"
    itself = replace(BY_DEEPSPEED, when="if the class of the pipeline and its partition_method are those of the save")
    return MismatchError(problem, stages[0].path, expected, found, remedy=(itself, WEIGHTS_ALONE))


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
