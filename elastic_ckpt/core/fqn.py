"""FQNs: the user's renames of saved ones, and what tells which of an optimizer's numbered states is whose. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_ckpt.core.metadata import CheckpointMetadata, DerivedTensors
from elastic_ckpt.errors import MismatchError, listed

RenameRules = Sequence[tuple[str, str]]
#: Rules that ``"rename"`` knows by a name. Megatron Core saves every layer under Transformer Engine's names.
NAME_PRESETS: Mapping[str, RenameRules] = {
    "megatron-core-local": (
        (r"^(.+)\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"\1.input_layernorm.\2"),
        (r"^(.+)\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"\1.pre_mlp_layernorm.\2"),
    )
}


def rename(name: str, rules: RenameRules) -> str:
    """Apply to a saved name the first rule whose pattern is found in it."""
    return next((re.sub(pattern, new, name) for pattern, new in rules if re.search(pattern, name)), name)


def rename_saved(metadata: CheckpointMetadata, rules: RenameRules) -> CheckpointMetadata:
    """Apply the user's renames to every name in the checkpoint; :class:`MismatchError` if two would become one."""
    if not rules:
        return metadata
    names = dict.fromkeys([*metadata.parameters, *(name for name, _ in metadata.tensors), *metadata.aliases])
    by_new: dict[str, list[str]] = {}
    for name in names:
        by_new.setdefault(rename(name, rules), []).append(name)
    for new, old in by_new.items():
        if len(old) > 1:
            problem = 'a rule under "rename" gives two saved parameters one name'
            remedy = 'make the pattern narrower: "elastic_checkpoint": {"rename": [["^old\\\\.(.*)", "new.\\\\1"]]}'
            found = listed(old)
            raise MismatchError(problem, None, "one saved name for each live one", found, parameter=new, remedy=remedy)
    used = Counter(next((pattern for pattern, _ in rules if re.search(pattern, name)), None) for name in names)
    patterns = sorted((pattern for pattern, _ in rules), key=lambda pattern: not used[pattern])
    notes = [f"rename: {used[pattern] or 'no'} names go by {pattern!r}" for pattern in patterns]
    return with_names(metadata, lambda name: rename(name, rules), notes)


def with_names(
    metadata: CheckpointMetadata, new_name: Callable[[str], str], notes: Sequence[str] = ()
) -> CheckpointMetadata:
    """The metadata under new names."""
    every = [*metadata.parameters, *(name for name, _ in metadata.tensors)]
    return replace(
        metadata,
        saved_names={new_name(name): metadata.saved_names.get(name, name) for name in every},
        replicas={(new_name(name), key): tensors for (name, key), tensors in metadata.replicas.items()},
        stages={new_name(name): stages for name, stages in metadata.stages.items()},
        parameters={new_name(name): saved for name, saved in metadata.parameters.items()},
        tensors=DerivedTensors(
            {(new_name(name), key): (name, key) for name, key in metadata.tensors},
            lambda new, old: replace(metadata.tensors[old], name=new[0]),
        ),
        aliases={new_name(name): new_name(target) for name, target in metadata.aliases.items()},
        crc32s={new_name(name): crc32 for name, crc32 in metadata.crc32s.items()},
        notes=(*metadata.notes, *notes),
    )


Shape = tuple[int, ...]
#: Per saved group, the name of each member; ``None``: a parameter that no longer trains, whose state is not needed.
Members = Sequence[Sequence[str | None]]


@dataclass(frozen=True)
class ExpertRank:
    """The experts of one expert-parallel rank."""

    rank: int
    local: Mapping[str, int]  # path of a layer -> how many it holds
    stacked: frozenset[str]  # stacked parameters
    crc32s: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # as of ``CheckpointMetadata``


@dataclass(frozen=True)
class NumberedStates:
    """Optimizer states that a checkpoint numbers instead of naming, and the weights saved beside them."""

    path: str  # of the file
    groups: Sequence[Mapping[str, Any]]  # hyperparameters of each saved param group
    #: Per saved group, the shape of each member, ``None`` if no state shows it; of a flat group, of that.
    shapes: Sequence[Sequence[Shape | None]]
    is_flat: bool  # each group is one flat tensor
    weights: Mapping[str, Shape]  # in the order of the module
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied name -> name that holds the data
    buffers: Sequence[str] = ()  # names
    compared: bool = False  # saved values prove the names, because masters are compared with the weights
    experts: ExpertRank | None = None  # whose weights are among these, of a file of one expert-parallel rank


#: The names, and notes on how they were inferred.
NamedStates = tuple[Members, tuple[str, ...]]
#: Names numbered states; ``None`` if nobody needs them, :class:`MismatchError` if they are needed and unknown.
NameStates = Callable[[NumberedStates], NamedStates | None]
