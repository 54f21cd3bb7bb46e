"""How the tensor-parallel ranks of a job that does not run would hold a checkpoint's parameters. Pure.

A live model says what shards it has. Without one, they follow from the rules: who knows how the saved shards were cut
knows the whole parameter, and how another number of ranks cuts it.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic_ckpt.core.local_state import LiveLayout
from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape, TPLayout
from elastic_ckpt.core.tp_rules import (
    COLUMN,
    VOCABULARY,
    WHOLE_KINDS,
    CannotSplit,
    Facts,
    Rule,
    relative_widths,
    split_by,
)
from elastic_ckpt.errors import ElasticCkptError, MismatchError
from elastic_ckpt.sharding.book import Asked, RuleBook, Saying, choose, is_ambiguous, is_fused
from elastic_ckpt.sharding.cross_checks import Structure, tensor_of
from elastic_ckpt.sharding.refusals import contradiction, undecided

_BY_DEFAULT = "the checkpoint's universal_checkpoint_info, by its default"


def virtual_layouts(
    metadata: CheckpointMetadata, names: Iterable[str], tp: int, book: RuleBook
) -> dict[str, LiveLayout]:
    """What ``tp`` ranks would hold of each parameter and buffer.

    Where nothing says how a vector or a buffer is held, it is taken for replicated: that is a guess, which a load (and
    a conversion) compares with the values of the saved copies.

    Args:
        metadata: what the checkpoint holds.
        names: of parameters, frozen weights and buffers.
        tp: tensor-parallel degree.
        book: the user's rules and presets.

    Raises:
        MismatchError: nothing says how a matrix is cut, what is said does not fit, or a dimension does not divide.
    """
    solver = _Solver(metadata, tp, book)
    return {name: solver.layout(name) for name in names}


def asked_offline(metadata: CheckpointMetadata, structure: Structure, tensor: TensorMetadata) -> Asked:
    """A parameter whose layout is asked for, as far as the checkpoint alone tells."""
    name, shapes = tensor.name, tensor.shard_shapes
    fused_one = is_fused(name) and structure.gate_factor(name) != 1
    saved_name = metadata.saved_names.get(name, name)
    return Asked(name, saved_name, shapes, fused_one or structure.is_made_of_several(name))


def said_offline(metadata: CheckpointMetadata, asked: Asked, book: RuleBook) -> Saying | None:
    """Who says how a parameter is cut, where there is no live model; ``None``: nobody, or nothing that can be used.

    Raises:
        CannotSplit: what the checkpoint says cannot be understood.
    """
    sayings = book.said(asked, LiveLayout(()), metadata.declared, metadata.run)
    chosen = choose([saying for saying in sayings if not saying.is_guess])
    chosen = None if chosen is not None and is_ambiguous(chosen) else chosen
    is_buffer = (asked.name, BUFFER) in metadata.tensors
    if chosen is None and metadata.declared.rules and len(asked.shapes) > 1 and not asked.is_fused and not is_buffer:
        # a parameter that no pattern names is cut along dimension 0: ``merge_tp_slices``, ds_to_universal.py
        return Saying(Rule(pattern=".*", kind=COLUMN), _BY_DEFAULT)
    return chosen


def known_rules(metadata: CheckpointMetadata, names: Iterable[str], book: RuleBook) -> dict[str, Rule | None]:
    """By which rule tensor-parallel ranks hold each parameter; ``None``: nothing says so, or a recorded map says all.

    The widths of sub-parameters are numbers, even where the rule takes them from the run.

    Raises:
        MismatchError: what is said does not fit the shapes.
    """
    structure = Structure(metadata)
    return {name: _known_rule(metadata, structure, name, book) for name in names}


def _known_rule(metadata: CheckpointMetadata, structure: Structure, name: str, book: RuleBook) -> Rule | None:
    tensor = tensor_of(metadata, name)
    if tensor is None or metadata.declared.is_recorded(metadata.saved_names.get(name, name)):
        return None
    asked = asked_offline(metadata, structure, tensor)
    try:
        chosen = said_offline(metadata, asked, book)
        if chosen is None:
            return None
        parts = relative_widths(chosen.rule, Facts(metadata.run, metadata.declared.vocabulary))
    except CannotSplit as error:
        raise contradiction(name, metadata.source.folder, asked.shapes, (), None, str(error)) from error
    return chosen.rule if parts is None else chosen.rule.model_copy(update={"sub_parameters": parts})


def decided_layouts(
    metadata: CheckpointMetadata, names: Iterable[str], tp: int, book: RuleBook
) -> tuple[dict[str, LiveLayout], dict[str, ElasticCkptError]]:
    """As :func:`virtual_layouts`; what would be its errors comes second, by name."""
    solver = _Solver(metadata, tp, book)
    decided: dict[str, LiveLayout] = {}
    errors: dict[str, ElasticCkptError] = {}
    for name in names:
        try:
            decided[name] = solver.layout(name)
        except ElasticCkptError as error:
            errors[name] = error
    return decided, errors


class _Solver:
    def __init__(self, metadata: CheckpointMetadata, tp: int, book: RuleBook) -> None:
        self._catalog = metadata
        self._tp = tp
        self._book = book
        self._facts = Facts(metadata.run, metadata.declared.vocabulary)
        self._structure = Structure(metadata)

    def layout(self, name: str) -> LiveLayout:
        """How the ranks hold it."""
        tensor = tensor_of(self._catalog, name)
        if tensor is None:
            raise KeyError(name)
        saved = tensor.shard_shapes
        if len(saved) == self._tp:
            return LiveLayout(saved)
        asked = asked_offline(self._catalog, self._structure, tensor)
        chosen: Saying | None = None
        try:
            chosen = said_offline(self._catalog, asked, self._book)
            shapes = self._cut(asked, tensor, chosen)
        except CannotSplit as error:
            raise contradiction(name, self._catalog.source.folder, saved, (), chosen, str(error)) from error
        is_default = chosen is not None and chosen.origin == _BY_DEFAULT
        return LiveLayout(shapes, dim=0, origin=_BY_DEFAULT) if is_default else LiveLayout(shapes)

    def _cut(self, asked: Asked, tensor: TensorMetadata, chosen: Saying | None) -> tuple[Shape, ...]:
        by_user = chosen is not None and chosen.is_users
        recorded = None
        if len(asked.shapes) > 1 and not by_user:
            recorded = self._catalog.declared.split(asked.saved_name, asked.shapes)
        if recorded is not None:
            whole = all(held == ((0, recorded.shape[recorded.dim]),) for held in recorded.held)
            return (recorded.shape,) * self._tp if whole else self._divided(asked, recorded.shape, recorded.dim, chosen)
        if chosen is None:
            if tensor.key == BUFFER or len(asked.shapes[0]) < 2:
                return (asked.shapes[0],) * self._tp
            raise self._undecided(asked)
        source = self._source(asked, chosen)
        if chosen.rule.kind in WHOLE_KINDS:
            return (source.shape,) * self._tp
        return self._divided(asked, source.shape, source.dim, chosen)

    def _source(self, asked: Asked, chosen: Saying) -> TPLayout:
        if len(asked.shapes) > 1:
            return split_by(chosen.rule, asked.shapes, self._facts)
        dim = 0 if chosen.rule.kind in WHOLE_KINDS else chosen.rule.cut_dim
        return TPLayout(asked.shapes[0], dim, (((0, asked.shapes[0][dim] if asked.shapes[0] else 1),),))

    def _divided(self, asked: Asked, whole: Shape, dim: int, chosen: Saying | None) -> tuple[Shape, ...]:
        size = whole[dim]
        if chosen is not None and chosen.rule.kind == VOCABULARY:
            size = -(-size // self._tp) * self._tp  # padded, as Megatron does
        if size % self._tp:
            raise MismatchError(
                f"dimension {dim} of this parameter does not divide by the tensor-parallel degree",
                parameter=asked.name,
                file=self._catalog.source.folder,
                expected=f"a multiple of {self._tp}",
                found=size,
                remedy="choose a degree that divides it",
            )
        return ((*whole[:dim], size // self._tp, *whole[dim + 1 :]),) * self._tp

    def _undecided(self, asked: Asked) -> MismatchError:
        return undecided(
            asked.name,
            self._catalog.source.folder,
            asked.shapes,
            (),
            "nothing says so",
            asked.is_fused,
            self._structure.qkv_widths(asked.name),
        )
