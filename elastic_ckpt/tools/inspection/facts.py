"""Input and result of an inspection: plain facts that become JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.base import Checkpoint, Found
from elastic_ckpt.formats.peek import Peeked
from elastic_ckpt.tools.files import FileEntry
from elastic_ckpt.tools.findings import ERROR, Finding

Shape = tuple[int, ...]
#: Roles of a parameter or tensor. ``WEIGHT``: states are unnamed, so it is unknown whether it is trained.
ROLES = TRAINED, WEIGHT, FROZEN_ROLE, BUFFER_ROLE = "trained", "weight", "frozen", "buffer"


@dataclass(frozen=True)
class Evidence:
    """What was read of a checkpoint, consistent or not.

    Attributes:
        found, sizes: the tag's folder; file path relative to it, with ``/`` -> bytes.
        tags, latest: all tags beside it and itself, newest first; name of a ``latest`` file -> its tag.
        peeked: facts from one model-states file, if any can be read.
        checkpoint, refusal: the metadata of all files, or why they are inconsistent.
        unnamed: why optimizer states could not be named, so that ``checkpoint`` holds only weights.
        misled: why the tag in ``latest`` was not used.
    """

    found: Found
    sizes: Mapping[str, int]
    tags: tuple[str, ...] = ()
    latest: Mapping[str, str] = field(default_factory=dict)
    peeked: Peeked | None = None
    checkpoint: Checkpoint | None = None
    refusal: ElasticCkptError | None = None
    unnamed: ElasticCkptError | None = None
    misled: ElasticCkptError | None = None

    @property
    def metadata(self) -> CheckpointMetadata | None:
        """Metadata of all files."""
        return None if self.checkpoint is None else self.checkpoint.metadata

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the run's DeepSpeed config; empty if unknown."""
        config = None if self.peeked is None else self.peeked.config
        section = (config or {}).get(name)
        return section if isinstance(section, Mapping) else {}


@dataclass(frozen=True)
class SavedRun:
    """The run that saved a checkpoint; ``None`` if unknown.

    Attributes:
        zero_stage: 0 to 3; ``BF16_Optimizer`` without ZeRO partitions, and counts, as stage 1.
        dp, sp, tp, pp: data-, sequence-, tensor- and pipeline-parallel degree; ``sp`` is ``None`` if 1.
        ep, experts: expert-parallel degree, ``None`` without experts; number of experts, by layer.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"unknown"``; ``precision_from``: its evidence, in words.
        global_batch, micro_batch, accumulation_steps: samples per step, per rank at once, micro-batches per step.
        lr_scheduler, loss_scale: short entries of the scheduler's state; fp16 scaler's ``kind`` and values.
        overflow, client_state: whether the last step was skipped; keys of the training script's own entries.
        config, arguments: the saved DeepSpeed config; the training script's arguments (Megatron's ``args``).
    """

    step: int | None = None
    samples: int | None = None
    skipped_steps: int | None = None
    ds_version: str | None = None
    zero_stage: int | None = None
    dp: int | None = None
    sp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    experts: tuple[int, ...] = ()
    precision: str = "unknown"
    precision_from: tuple[str, ...] = ()
    optimizer: str = "unknown"
    optimizer_from: str = ""
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation_steps: int | None = None
    lr_scheduler: Mapping[str, Any] | None = None
    loss_scale: Mapping[str, Any] | None = None
    overflow: bool = False
    client_state: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """Tensors of one role, over all tensor-parallel shards; bytes of 8-bit states exclude their scales."""

    tensors: int = 0
    numel: int = 0
    nbytes: int = 0
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateSummary:
    """One kind of one optimizer state; 8-bit optimizers keep some states of a key in blocks and some in 32 bits.

    Attributes:
        kind: ``"elementwise"``, ``"blocks"`` (8-bit, with a scale per block), ``"whole"`` (a shape of its own),
            ``"replicated"``, ``"scalar"``, ``"opaque"``, ``"damaged"``, ``"fresh"`` (skipped by the config) or
            ``"unnamed"`` (of a numbered parameter without a name).
        dtype: dtype of its tensors, or form of a saved scalar.
        parameters, rows, block_numel: parameters that have it; values per element; elements per block, or 0.
        values, why: least and greatest value of a scalar; why it is opaque, damaged or fresh.
    """

    key: str
    kind: str
    dtype: str = ""
    parameters: int = 0
    rows: int = 1
    block_numel: int = 0
    numel: int = 0
    nbytes: int = 0
    values: tuple[float, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class GroupSummary:
    """A param group: number of members, elements of their masters (all shards), and hyperparameters."""

    number: int
    members: int
    numel: int | None
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter or buffer; its role is one of :data:`ROLES`.

    Attributes:
        shape, shards: logical shape, ``None`` if the layout of its shards is unknown; shape of each shard.
        dtype, numel: of its master, or its weights if it has none; elements of all shards.
        states: keys of its optimizer states, scalars included.
        nbytes: bytes stored of it, with states and copies.
        tied, copies: its other names; how often its master is stored, since pipeline stages may share it.
        rule, rule_from: its layout in words, and the origin of that; empty for one shard without a rule.
    """

    name: str
    role: str
    shape: Shape | None
    shards: tuple[Shape, ...]
    dtype: str
    group: int | None
    states: tuple[str, ...]
    numel: int
    nbytes: int
    tied: tuple[str, ...] = ()
    copies: int = 1
    rule: str = ""
    rule_from: str = ""


@dataclass(frozen=True)
class RuleFacts:
    """Rules for the tensor-parallel shards.

    Attributes:
        patterns, unreadable: kind -> patterns that the checkpoint declares; what of these cannot be understood.
        recorded: number of parameters whose shards the checkpoint records in full (AutoTP).
        vocabulary_rows: rows of the vocabulary that are not padding, if declared.
        user_rules, preset: number of ``"tp_rules"`` in the config, and its preset.
        uses: each ``rule``, its ``origin`` and its ``parameters``.
        undecided, contradictions: parameters of unknown layout; parameter -> why its shards contradict its rule.
        fitting_presets: the presets with rules for the most undecided parameters -> their number.
    """

    patterns: Mapping[str, int] = field(default_factory=dict)
    recorded: int = 0
    vocabulary_rows: int | None = None
    unreadable: str = ""
    user_rules: int = 0
    preset: str | None = None
    uses: tuple[Mapping[str, Any], ...] = ()
    undecided: tuple[str, ...] = ()
    contradictions: Mapping[str, str] = field(default_factory=dict)
    fitting_presets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspection:
    """Everything that a checkpoint's metadata shows; ``tags`` and ``latest`` as in :class:`Evidence`.

    Attributes:
        readable: whether its metadata is consistent; if not, facts come from single files and file names.
        weights_only: whether optimizer states could not be named, so that only weights are listed.
        masters, frozen, buffers, weights: totals of each role; ``weights`` if ``weights_only``.
        parameters, aliases: parameters and buffers; tied name -> the name that has the data.
        files, missing: files in the tag's folder, by name; files that should be there.
        findings: problems and notes, most severe first.
    """

    format: str
    folder: str
    tag: str
    readable: bool
    weights_only: bool
    run: SavedRun
    masters: Totals
    frozen: Totals
    buffers: Totals
    weights: Totals
    states: tuple[StateSummary, ...]
    groups: tuple[GroupSummary, ...]
    rules: RuleFacts
    parameters: tuple[ParameterEntry, ...]
    aliases: Mapping[str, str]
    files: tuple[FileEntry, ...]
    missing: tuple[str, ...]
    tags: tuple[str, ...]
    latest: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no finding of level ``"error"``."""
        return not any(finding.level == ERROR for finding in self.findings)
