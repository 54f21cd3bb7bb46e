"""Tensor-parallel layouts of a checkpoint's parameters without a live model. Pure.

A rule for the saved shards gives the whole parameter, and its shards on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic_ckpt.core.local_state import LiveLayout
from elastic_ckpt.core.metadata import BUFFER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.tp_rules import VOCABULARY, WHOLE_KINDS, CannotSplit, Rule, relative_widths
from elastic_ckpt.errors import DamagedError, ElasticCkptError
from elastic_ckpt.sharding.book import RuleBook, RuleSource, tensor_of
from elastic_ckpt.sharding.decide import BY_DEFAULT, Decider, Decision
from elastic_ckpt.sharding.refusals import contradiction, undecided


def virtual_layouts(
    metadata: CheckpointMetadata, names: Iterable[str], tp: int, book: RuleBook
) -> dict[str, LiveLayout]:
    """The layout of each parameter, frozen weight and buffer over ``tp`` ranks.

    A vector or buffer without a rule is taken for replicated: a guess, which a load (and a conversion) verifies by
    comparing the saved copies.

    Raises :class:`DamagedError` if a name has no tensor, :class:`MismatchError` if a matrix has no rule, a rule does
    not fit, or a dimension is not divisible.
    """
    layouts, errors = decided_layouts(metadata, names, tp, book)
    for error in errors.values():
        raise error
    return layouts


def decided_layouts(
    metadata: CheckpointMetadata, names: Iterable[str], tp: int, book: RuleBook
) -> tuple[dict[str, LiveLayout], dict[str, ElasticCkptError]]:
    """As :func:`virtual_layouts`, but with errors returned by name instead of raised."""
    decider = Decider(metadata, book)
    layouts: dict[str, LiveLayout] = {}
    errors: dict[str, ElasticCkptError] = {}
    for name in names:
        try:
            layouts[name] = _layout(decider, _saved_tensor(metadata, name), tp)
        except ElasticCkptError as error:
            errors[name] = error
    return layouts, errors


def _saved_tensor(metadata: CheckpointMetadata, name: str) -> TensorMetadata:
    tensor = tensor_of(metadata, name)
    if tensor is None:
        raise DamagedError(
            "the checkpoint lists this parameter, but has no weights of it",
            parameter=name,
            file=metadata.source.folder,
            expected="its fp32 master weights, or frozen weights",
            found="none",
            remedy="files are missing: restore the folder from its original, or take another tag",
        )
    return tensor


def known_rules(metadata: CheckpointMetadata, names: Iterable[str], book: RuleBook) -> dict[str, Rule | None]:
    """The tensor-parallel rule of each parameter; ``None`` without a rule, or where a recorded map replaces it.

    Widths of sub-parameters are numbers, even where the rule takes them from the run. Raises :class:`MismatchError` if
    a rule does not fit the shapes.
    """
    decider = Decider(metadata, book)
    return {name: _known_rule(decider, name) for name in names}


def _known_rule(decider: Decider, name: str) -> Rule | None:
    metadata, tensor = decider.metadata, tensor_of(decider.metadata, name)
    if tensor is None or metadata.declared.is_recorded(metadata.saved_names.get(name, name)):
        return None
    chosen: RuleSource | None = None
    try:
        chosen = decider.decide_offline(tensor).chosen
        if chosen is None:
            return None
        parts = relative_widths(chosen.rule, metadata.run)
    except CannotSplit as error:
        raise contradiction(decider.sharded(tensor), chosen, str(error)) from error
    return chosen.rule if parts is None else chosen.rule.model_copy(update={"sub_parameters": parts})


def _layout(decider: Decider, tensor: TensorMetadata, tp: int) -> LiveLayout:
    if len(tensor.shard_shapes) == tp:
        return LiveLayout(tensor.shard_shapes)
    chosen: RuleSource | None = None
    try:
        decision = decider.decide_offline(tensor)
        chosen = decision.chosen
        shapes = (_shard(decider, decision, tp),) * tp
    except CannotSplit as error:
        raise contradiction(decider.sharded(tensor), chosen, str(error)) from error
    is_default = chosen is not None and chosen.origin == BY_DEFAULT
    return LiveLayout(shapes, dim=0, origin=BY_DEFAULT) if is_default else LiveLayout(shapes)


def _shard(decider: Decider, decision: Decision, tp: int) -> Shape:
    sharded, chosen = decision.sharded, decision.chosen
    source, _, is_recorded = decision.layouts()
    if chosen is None and not is_recorded and (sharded.tensor.key == BUFFER or len(sharded.shapes[0]) < 2):
        return sharded.shapes[0]
    if source is None or (chosen is None and not is_recorded):
        raise undecided(sharded, None, decider.structure.qkv_widths(sharded.name))
    if source.is_whole if is_recorded else chosen is None or chosen.rule.kind in WHOLE_KINDS:
        return sharded.shapes[0]
    dim, size = source.dim, source.shape[source.dim]
    if not is_recorded and chosen is not None and chosen.rule.cut_dim != dim:
        raise CannotSplit(f"cut along dimension {chosen.rule.cut_dim}, but its shape is {sharded.shapes[0]}")
    if chosen is not None and chosen.rule.kind == VOCABULARY:
        size = -(-size // tp) * tp  # padded, as Megatron does
    if size % tp:
        raise sharded.mismatch(
            f"dimension {dim} of this parameter does not divide by the tensor-parallel degree",
            expected=f"a multiple of {tp}",
            found=size,
            remedy="choose a degree that divides it",
        )
    return (*source.shape[:dim], size // tp, *source.shape[dim + 1 :])
