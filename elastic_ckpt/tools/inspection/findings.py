"""Problems and notes that metadata shows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from elastic_ckpt.core.metadata import BUFFER, ITEMSIZE, MASTER, CheckpointMetadata
from elastic_ckpt.core.tp_rules import WHOLE_KINDS
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, listed
from elastic_ckpt.formats.naming import plain_name
from elastic_ckpt.planning.state_matching import refuse_partial, state_errors
from elastic_ckpt.tools.findings import ERROR, NOTE, WARNING, Finding, of_error, of_tensors
from elastic_ckpt.tools.inspection.contents import precision_evidence, stored_nbytes
from elastic_ckpt.tools.inspection.facts import Evidence, ParameterEntry, RuleFacts

_TAGS_SHOWN = 8


def findings_of(
    evidence: Evidence, missing: tuple[str, ...], parameters: Sequence[ParameterEntry], rules: RuleFacts
) -> tuple[Finding, ...]:
    """All findings, most severe first, without duplicates."""
    order = [ERROR, WARNING, NOTE]
    every = dict.fromkeys(_findings(evidence, missing, parameters, rules))
    return tuple(sorted(every, key=lambda finding: order.index(finding.level)))


def _findings(
    evidence: Evidence, missing: tuple[str, ...], parameters: Sequence[ParameterEntry], rules: RuleFacts
) -> Iterator[Finding]:
    if evidence.misled is not None:
        text = f"{evidence.misled.problem}; this is {evidence.found.tag!r}"
        yield replace(of_error(evidence.misled, "latest"), text=text)
    if evidence.refusal is not None:
        is_missing = evidence.refusal.file in {evidence.found.path(name) for name in missing}
        yield of_error(evidence.refusal, "missing_file" if is_missing else "refused")
        missing = missing if len(missing) > 1 or not is_missing else ()  # it is named above
    if evidence.unnamed is not None:
        yield _unnamed(evidence.unnamed)
    yield from _in_folder(evidence, missing)
    yield from _of_run(evidence)
    if evidence.metadata is None:
        yield from (Finding(NOTE, "reader", note) for note in evidence.found.notes)
        return
    yield from _in_metadata(evidence.metadata)
    yield from _incomplete(evidence.metadata)
    yield from _of_copies(evidence.metadata, parameters)
    yield from _of_rules(rules)


def _unnamed(error: ElasticCkptError) -> Finding:
    """Numbered optimizer states: only a warning if a live engine can name them."""
    if not isinstance(error, MismatchError):
        return of_error(error, "unnamed_states")
    text = f"only weights are listed: {error.problem}"
    remedy = "none needed for a load: its live param groups name them"
    return Finding(WARNING, "unnamed_states", text, file=error.file, remedy=remedy)


def _in_folder(evidence: Evidence, missing: tuple[str, ...]) -> Iterator[Finding]:
    found, tags = evidence.found, evidence.tags
    if missing:
        what = "1 file is missing" if len(missing) == 1 else f"{len(missing)} files are missing"
        remedy = "restore them from their original, or take another tag"
        yield Finding(ERROR, "missing_file", f"{what}: {listed(missing)}", file=found.folder, remedy=remedy)
    if found.files.clashes:
        text = f"files of two saves are in one folder: {listed(found.files.clashes)} have a counterpart"
        yield Finding(ERROR, "clash", text, file=found.folder)
    if experts := found.files.of_experts:
        text = f"{len(experts)} files of experts (mixture of experts)"
        yield Finding(NOTE, "experts", text, file=experts[0])
    empty = [name for name, nbytes in evidence.sizes.items() if not nbytes and plain_name(name).endswith(".pt")]
    if empty:
        yield Finding(ERROR, "empty_file", f"files without a byte: {listed(empty)}", file=found.folder)
    for name, tag in () if evidence.misled else evidence.latest.items():  # else it is reported above
        if tag not in tags:
            text = f"the file {name} names the tag {tag!r}, which is not there"
            yield Finding(WARNING, "latest", text, found=listed(tags))
        elif tag != found.tag:
            yield Finding(NOTE, "latest", f"the file {name} names the tag {tag!r}; this is {found.tag!r}")
    if len(tags) > 1:
        shown = ", ".join(tags[:_TAGS_SHOWN]) + (", ..." if len(tags) > _TAGS_SHOWN else "")
        yield Finding(NOTE, "tags", f"{len(tags)} checkpoints are here, newest first: {shown}")


def _of_run(evidence: Evidence) -> Iterator[Finding]:
    precisions = precision_evidence(evidence)
    if len(set(precisions.values())) > 1:
        found = ", ".join(f"{what}: {precision}" for what, precision in precisions.items())
        yield Finding(WARNING, "precision", f"the files disagree about the precision in which the run trained: {found}")
    options = evidence.section("zero_optimization")
    if options.get("round_robin_gradients") is True and options.get("stage") in (1, 2):
        text = (
            "saved with round_robin_gradients: partitions are in another order, which DeepSpeed's converter and "
            "getters get wrong; elastic_ckpt restores the true one"
        )
        yield Finding(NOTE, "round_robin_gradients", text)
    if options.get("stage") == 0 and evidence.found.files.optimizer:
        text = "the saved config says ZeRO stage 0: BF16_Optimizer saves its partitions as stage 1 does"
        yield Finding(NOTE, "bf16_optimizer", text)
    if options.get("elastic_checkpoint") is True:
        text = "saved with the legacy zero_optimization.elastic_checkpoint, which loses hyperparameters and states"
        yield Finding(WARNING, "legacy_elastic", text)
    aligned = evidence.section("elastic_checkpoint").get("align_partitions")
    if aligned:
        yield Finding(NOTE, "align_partitions", f'saved with "align_partitions": {aligned}')


def _in_metadata(metadata: CheckpointMetadata) -> Iterator[Finding]:
    yield from (Finding(WARNING, "reader", text) for text in metadata.warnings)
    yield from (Finding(NOTE, "reader", text) for text in metadata.notes)
    for error in state_errors(metadata):
        yield of_error(error, "damaged_state" if isinstance(error, DamagedError) else "opaque_state")
    differing = {state.key for saved in metadata.parameters.values() for state in saved.replicated if state.differs}
    if differing:
        text = f"ranks saved different values of what is the same on every rank: {listed(differing)}"
        yield Finding(WARNING, "replicated_state", text)
    if metadata.source.format == "native" and metadata.source.zero_stage >= 2 and not metadata.source.frozen_recorded:
        text = "frozen parameters are not listed: if there were any, they were left out (exclude_frozen_parameters)"
        yield Finding(NOTE, "frozen_left_out", text)


def _incomplete(metadata: CheckpointMetadata) -> Iterator[Finding]:
    gone = [name for name in metadata.parameters if (name, MASTER) not in metadata.tensors]
    if gone:
        yield Finding(ERROR, "no_master", f"parameters without data: {listed(gone)}", parameter=gone[0])
    yield from of_tensors(metadata, "incomplete_tensor", "short_file")
    try:
        refuse_partial(metadata)
    except ElasticCkptError as error:
        yield of_error(error, "partial_states")


def _of_copies(metadata: CheckpointMetadata, parameters: Sequence[ParameterEntry]) -> Iterator[Finding]:
    """Replicas; metadata does not show whether they are equal."""
    if metadata.replicas:
        names = dict.fromkeys(name for name, _ in metadata.replicas)
        nbytes = sum(stored_nbytes(copy) for copies in metadata.replicas.values() for copy in copies)
        text = f"pipeline stages share {listed(names)}, and each saved them: {nbytes} bytes of further copies"
        yield Finding(NOTE, "twins", text, parameter=next(iter(names)))
    whole = {entry.name for entry in parameters if entry.rule in WHOLE_KINDS and len(entry.shards) > 1}
    copied = [tensor for (name, key), tensor in metadata.tensors.items() if name in whole and key != BUFFER]
    if copied:
        count = len({tensor.name for tensor in copied})
        nbytes = sum(sum(map(math.prod, tensor.shard_shapes[1:])) * ITEMSIZE[tensor.dtype] for tensor in copied)
        text = f"parameters saved whole by every tensor-parallel rank: {count}, {nbytes} bytes of further copies"
        yield Finding(NOTE, "replicas", text)


def _of_rules(rules: RuleFacts) -> Iterator[Finding]:
    if rules.unreadable:
        text = f"universal_checkpoint_info cannot be understood, and nothing of it is used: {rules.unreadable}"
        yield Finding(WARNING, "declaration", text)
    for name, problem in rules.contradictions.items():
        yield Finding(ERROR, "contradiction", f"it is not known how its shards fit together: {problem}", parameter=name)
    if rules.undecided:
        count = len(rules.undecided)
        text = f"nothing here says how the shards of {count} parameters were cut: {listed(rules.undecided)}"
        known = [f"{name} (for {count})" for name, count in rules.fitting_presets.items()]
        presets = f"; presets with rules for such names: {', '.join(known)}" if known else ""
        remedy = (
            "a live model of Megatron Core or AutoTP says it at load time; without one: --tp-preset, or rules of your "
            f'own ("tp_preset", "tp_rules" in the config){presets}'
        )
        yield Finding(NOTE, "undecided_shards", text, parameter=rules.undecided[0], remedy=remedy)
