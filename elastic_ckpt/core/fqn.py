"""Maps saved FQNs to live ones: the user's renames, and tied parameters. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from elastic_ckpt.core.local_state import ModelLayout, WholeTensor
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, DerivedTensors, TensorMetadata
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
            problem, expected = (
                'a rule under "rename" gives two saved parameters one name',
                "one saved name for each live one",
            )
            remedy = 'make the pattern narrower: "elastic_checkpoint": {"rename": [["^old\\\\.(.*)", "new.\\\\1"]]}'
            raise MismatchError(problem, None, expected, listed(old), parameter=new, remedy=remedy)
    used = Counter(next((pattern for pattern, _ in rules if re.search(pattern, name)), None) for name in names)
    patterns = sorted((pattern for pattern, _ in rules), key=lambda pattern: not used[pattern])
    notes = [f"rename: {used[pattern] or 'no'} names go by {pattern!r}" for pattern in patterns]
    return _with_names(metadata, lambda name: rename(name, rules), notes)


def adopt_live_names(metadata: CheckpointMetadata, model: ModelLayout) -> CheckpointMetadata:
    """Rename tied parameters to the FQN that the live engine uses, which depends on module registration order."""
    if not model.ties:
        return metadata
    saved_names = {*metadata.parameters, *(name for name, _ in metadata.tensors)}
    renamed = {}
    for name, others in model.ties.items():
        saved = [other for other in others if other in saved_names]
        if name not in saved_names and len(saved) == 1:
            renamed[saved[0]] = name
    if not renamed:
        return metadata
    notes = [f"tied: {old} in the checkpoint is {new} here" for old, new in renamed.items()]
    return _with_names(metadata, lambda name: renamed.get(name, name), notes)


def adopt_live_kinds(metadata: CheckpointMetadata, wholes: Iterable[WholeTensor]) -> CheckpointMetadata:
    """Take what no optimizer owns as the live model has it, as a buffer or a frozen parameter.

    It may have changed from one to the other; and DeepSpeed does not list the buffers of a submodule's second name,
    which may be parameters under another name.
    """
    kinds: dict[tuple[str, str], TensorMetadata] = {}
    for whole in wholes:
        if (whole.name, whole.key) in metadata.tensors or whole.name in metadata.parameters:
            continue
        tied = metadata.aliases.get(whole.name, "")
        same = ((whole.name, BUFFER), (whole.name, FROZEN), (tied, FROZEN), (tied, MASTER))
        saved = next((metadata.tensors[at] for at in same if at in metadata.tensors), None)
        if saved is not None and (whole.key == BUFFER or saved.name == whole.name):
            kinds[whole.name, whole.key] = replace(saved, name=whole.name, key=whole.key)
    if not kinds:
        return metadata
    renamed = {(name, FROZEN if key == BUFFER else BUFFER) for name, key in kinds}
    others = {at: tensor for at, tensor in metadata.tensors.items() if at not in renamed}
    return replace(metadata, tensors=others | kinds)


def _with_names(
    metadata: CheckpointMetadata, new_name: Callable[[str], str], notes: Sequence[str]
) -> CheckpointMetadata:
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
        notes=(*metadata.notes, *notes),
    )
