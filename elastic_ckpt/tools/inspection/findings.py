"""What is odd about a checkpoint. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from elastic_ckpt.core.dtypes import ITEMSIZE
from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.errors import ElasticCkptError, MismatchError, listed
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.peek import Peeked
from elastic_ckpt.planning.saved_state_checks import keys_by_name, refuse_partial
from elastic_ckpt.tools.findings import ERROR, NOTE, WARNING, Finding, Level, of_error
from elastic_ckpt.tools.inspection.contents import stored_nbytes
from elastic_ckpt.tools.inspection.facts import RuleFacts
from elastic_ckpt.tools.inspection.files import Listing
from elastic_ckpt.tools.inspection.layouts import Layout, replicas
from elastic_ckpt.tools.inspection.saved_run import precision_evidence, zero_options

_ORDER: Mapping[Level, int] = {ERROR: 0, WARNING: 1, NOTE: 2}
_TAGS_SHOWN = 8


def by_gravity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The gravest first, each once."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: _ORDER[finding.level]))


def unnamed(error: ElasticCkptError) -> Finding:
    """Optimizer states that are numbered: no error where a live engine has the names."""
    if not isinstance(error, MismatchError):
        return of_error(error, "unnamed_states")
    remedy = "none needed for a load: its live param groups name them"
    return Finding(
        WARNING, "unnamed_states", f"only weights are listed: {error.problem}", file=error.file, remedy=remedy
    )


def in_folder(found: Found, listing: Listing, missing: tuple[str, ...], misled: bool = False) -> Iterator[Finding]:
    """What names and sizes tell; ``misled``: that ``latest`` leads nowhere has been said already."""
    if missing:
        what = "1 file is missing" if len(missing) == 1 else f"{len(missing)} files are missing"
        remedy = "restore them from their original, or take another tag"
        yield Finding(ERROR, "missing_file", f"{what}: {listed(missing)}", file=found.folder, remedy=remedy)
    if found.files.clashes:
        names = listed(found.files.clashes)
        yield Finding(
            ERROR, "clash", f"files of two saves lie in one folder: {names} have a counterpart", file=found.folder
        )
    if found.files.experts:
        text = f"{len(found.files.experts)} files of experts (mixture of experts)"
        yield Finding(NOTE, "experts", text, file=found.files.experts[0])
    empty = [name for name, nbytes in listing.sizes.items() if not nbytes and name.endswith(".pt")]
    if empty:
        yield Finding(ERROR, "empty_file", f"files without a byte: {listed(empty)}", file=found.folder)
    for name, tag in listing.latest.items():
        if tag not in listing.tags and not misled:
            text = f"the file {name} names the tag {tag!r}, which is not there"
            yield Finding(WARNING, "latest", text, found=listed(listing.tags))
        elif tag != found.tag and not misled:
            yield Finding(NOTE, "latest", f"the file {name} names the tag {tag!r}; this is {found.tag!r}")
    if len(listing.tags) > 1:
        shown = ", ".join(listing.tags[:_TAGS_SHOWN]) + (", ..." if len(listing.tags) > _TAGS_SHOWN else "")
        yield Finding(NOTE, "tags", f"{len(listing.tags)} checkpoints lie here, newest first: {shown}")


def of_run(found: Found, peeked: Peeked | None) -> Iterator[Finding]:
    """What the saved config tells."""
    evidence = precision_evidence(found, peeked)
    if len(set(evidence.values())) > 1:
        said = ", ".join(f"{what}: {precision}" for what, precision in evidence.items())
        yield Finding(WARNING, "precision", f"it is not told in one voice in which precision the run trained: {said}")
    options = zero_options(peeked)
    if options.get("round_robin_gradients") is True and options.get("stage") in (1, 2):
        yield Finding(
            NOTE,
            "round_robin_gradients",
            "saved with round_robin_gradients: partitions are in another order, which DeepSpeed's converter and "
            "getters get wrong; elastic_ckpt restores the true one",
        )
    if options.get("stage") == 0 and found.files.optimizer:
        text = "the saved config says ZeRO stage 0: BF16_Optimizer saves its partitions as stage 1 does"
        yield Finding(NOTE, "bf16_optimizer", text)
    if options.get("elastic_checkpoint") is True:
        text = "saved with the legacy zero_optimization.elastic_checkpoint, which loses hyperparameters and states"
        yield Finding(WARNING, "legacy_elastic", text)
    section = ((peeked.config or {}) if peeked else {}).get("elastic_checkpoint")
    if isinstance(section, Mapping) and section.get("align_partitions"):
        text = f'saved with "align_partitions": {section["align_partitions"]}'
        yield Finding(NOTE, "align_partitions", text)


def in_catalog(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """What the metadata of all files together tells."""
    yield from (Finding(WARNING, "reader", text) for text in metadata.warnings)
    yield from (Finding(NOTE, "reader", text) for text in metadata.notes)
    for key, why in sorted(metadata.damaged_states.items()):
        text = f"optimizer state {key!r} is damaged: {why}"
        yield Finding(ERROR, "damaged_state", text, parameter=key, remedy="load_optimizer_states=False")
    for key, why in sorted(metadata.opaque_states.items()):
        text = f"optimizer state {key!r} has a layout that cannot be cut for another topology: {why}"
        remedy = f'"elastic_checkpoint": {{"state_schema": {{"{key}": ...}}}}, or load_optimizer_states=False'
        yield Finding(ERROR, "opaque_state", text, parameter=key, remedy=remedy)
    yield from _incomplete(metadata)
    differing = {state.key for saved in metadata.parameters.values() for state in saved.replicated if state.differs}
    if differing:
        text = f"ranks saved different values of what every rank should hold alike: {listed(differing)}"
        yield Finding(WARNING, "replicated_state", text)
    if metadata.source.format == "native" and metadata.source.zero_stage >= 2 and not metadata.frozen_recorded:
        text = "frozen parameters are not listed: if there were any, they were left out (exclude_frozen_parameters)"
        yield Finding(NOTE, "frozen_left_out", text)


def _incomplete(metadata: CheckpointMetadata) -> Iterator[Finding]:
    gone = [name for name in metadata.parameters if (name, MASTER) not in metadata.tensors]
    if gone:
        yield Finding(ERROR, "no_master", f"parameters without data: {listed(gone)}", parameter=gone[0])
    for tensor in metadata.tensors.values():
        problem = hole_in(tensor)
        if problem is not None:
            text = f"{tensor.key} of this parameter is incomplete: {problem}"
            yield Finding(ERROR, "incomplete_tensor", text, parameter=tensor.name)
        for chunk in tensor.chunks:
            file = metadata.files[chunk.file]
            end = chunk.byte_offset + chunk.range.numel * ITEMSIZE[tensor.dtype]
            if end > file.nbytes:
                text = f"{tensor.key} of this parameter reaches beyond the end of its file"
                sizes = {"expected": f"{end} bytes or more", "found": f"{file.nbytes} bytes"}
                yield Finding(ERROR, "short_file", text, parameter=tensor.name, file=file.path, **sizes)
    try:
        refuse_partial(metadata, keys_by_name(metadata))
    except ElasticCkptError as error:
        yield of_error(error, kind="partial_states")


def hole_in(tensor: TensorMetadata) -> str | None:
    """Which elements of a tensor lie in no file, or in two; ``None``: each lies in one."""
    for shard, shape in enumerate(tensor.shard_shapes):
        position, numel = 0, math.prod(shape)
        where = f" of tensor-parallel shard {shard}" if len(tensor.shard_shapes) > 1 else ""
        ranges = sorted((e.range.start, e.range.stop) for e in tensor.chunks if e.shard == shard and e.range.numel)
        for start, stop in [*ranges, (numel, numel)]:
            if start != position:
                what = "are nowhere" if start > position else "lie in two places"
                return f"elements {min(start, position)} to {max(start, position) - 1}{where} {what}"
            position = stop
    return None


def of_copies(metadata: CheckpointMetadata, layouts: Mapping[str, Layout]) -> Iterator[Finding]:
    """What is stored more than once; reading the metadata does not tell whether the copies agree."""
    if metadata.replicas:
        names = dict.fromkeys(name for name, _ in metadata.replicas)
        nbytes = sum(stored_nbytes(copy) for copies in metadata.replicas.values() for copy in copies)
        text = f"pipeline stages share {listed(names)}, and each saved them: {nbytes} bytes of further copies"
        yield Finding(NOTE, "twins", text, parameter=next(iter(names)))
    count, nbytes = replicas(metadata, layouts)
    if count:
        text = f"parameters saved whole by every tensor-parallel rank: {count}, {nbytes} bytes of further copies"
        yield Finding(NOTE, "replicas", text)


def of_rules(rules: RuleFacts) -> Iterator[Finding]:
    """What is not known about tensor-parallel shards."""
    if rules.unreadable:
        text = f"universal_checkpoint_info cannot be understood, and nothing of it is used: {rules.unreadable}"
        yield Finding(WARNING, "declaration", text)
    for name, problem in rules.contradictions.items():
        yield Finding(ERROR, "contradiction", f"it is not known how its shards fit together: {problem}", parameter=name)
    if rules.undecided:
        text = (
            f"nothing here says how the shards of {len(rules.undecided)} parameters were cut: {listed(rules.undecided)}"
        )
        known = [f"{name} (for {count})" for name, count in rules.fitting_presets.items()]
        presets = f"; presets with rules for such names: {', '.join(known)}" if known else ""
        remedy = (
            "a live model of Megatron Core or AutoTP says it at load time; without one: --preset, or rules of your "
            f'own ("tp_preset", "tp_rules" in the config){presets}'
        )
        yield Finding(NOTE, "undecided_shards", text, parameter=rules.undecided[0], remedy=remedy)
