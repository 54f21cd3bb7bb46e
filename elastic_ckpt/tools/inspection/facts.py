"""What an inspection is made from, and what it finds out: plain facts that become JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.base import Checkpoint, Found
from elastic_ckpt.formats.peek import Peeked
from elastic_ckpt.tools.findings import ERROR, Finding

Shape = tuple[int, ...]
#: Roles of a parameter or tensor. ``WEIGHT``: the optimizer states are not named, so nothing says whether it trained.
ROLES = TRAINED, WEIGHT, FROZEN_ROLE, BUFFER_ROLE = "trained", "weight", "frozen", "buffer"


@dataclass(frozen=True)
class Evidence:
    """What was read of a checkpoint, whether it fits together or not.

    Attributes:
        found: the folder of its tag.
        sizes: path of a file below that folder, with ``/`` -> bytes.
        tags: names of all checkpoints beside it, itself included, newest first.
        latest: name of a ``latest`` file -> the tag in it.
        peeked: what one model-states file says by itself; ``None``: none can be read.
        checkpoint, refusal: the metadata of all files together, or why they do not fit together.
        unnamed: why optimizer states could not be named, so that ``checkpoint`` holds the weights alone.
        misled: why another tag than the one in ``latest`` was taken.
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
        """Of all files together."""
        return None if self.checkpoint is None else self.checkpoint.metadata

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the run's DeepSpeed config; empty where it is not known."""
        config = None if self.peeked is None else self.peeked.config
        section = (config or {}).get(name)
        return section if isinstance(section, Mapping) else {}


@dataclass(frozen=True)
class SavedRun:
    """The run that saved a checkpoint; ``None``: not known.

    Attributes:
        zero_stage: 0 to 3; ``BF16_Optimizer`` without ZeRO partitions as stage 1 does, and counts as that.
        dp, sp, tp, pp: data-, sequence-, tensor- and pipeline-parallel degree; ``sp`` is ``None`` where it is 1.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"unknown"``.
        precision_from, optimizer_from: what says so, in words.
        global_batch, micro_batch, accumulation_steps: samples a step, samples of a rank at once, micro-batches a step.
        lr_scheduler: the short entries of its state; ``None``: there is none.
        loss_scale: of fp16: ``kind`` and its values.
        overflow: whether the last step before the save was skipped.
        client_state: entries that the training script put in.
        config: the saved DeepSpeed config.
        arguments: of the training script (Megatron's ``args``).
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
    """Tensors of one role, all tensor-parallel shards together; the bytes of 8-bit states are without their scales."""

    tensors: int = 0
    numel: int = 0
    nbytes: int = 0
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateSummary:
    """One kind of one optimizer state; 8-bit optimizers keep some states of a key in blocks and some in 32 bits.

    Attributes:
        kind: ``"elementwise"``, ``"blocks"`` (8-bit codes with a scale each), ``"whole"`` (a shape of its own),
            ``"replicated"``, ``"scalar"``, ``"opaque"``, ``"damaged"``, ``"fresh"`` (the config says to leave it) or
            ``"unnamed"`` (numbered, of nobody knows which parameter).
        dtype: of its tensors; of a scalar, how it was saved.
        parameters: how many have it.
        rows: values for each element.
        block_numel: elements in a block; 0: no blocks.
        values: the least and the greatest of a scalar.
        why: why it is opaque, damaged or fresh.
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
    """A param group: its hyperparameters, number of members, and elements in their masters (all shards)."""

    number: int
    members: int
    numel: int | None
    hyperparameters: Mapping[str, Any]


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter or buffer.

    Attributes:
        role: one of :data:`ROLES`.
        shape: of the whole; ``None``: there are shards, and nothing says how they were cut.
        shards: shape of each tensor-parallel shard.
        dtype: of its master, or of its weights where it did not train.
        states: keys of its optimizer states, scalar ones too.
        numel: elements of its master or weights, of all shards together.
        nbytes: bytes of all that is stored of it, states and further copies included.
        tied: its other names.
        copies: how often its master is stored: more than once where pipeline stages share it.
        rule, rule_from: how its shards were cut, in words, and who says so; empty: there is one, and no rule for it.
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
    """What is known of the tensor-parallel shards.

    Attributes:
        patterns: kind -> number of patterns that the checkpoint declares of it.
        recorded: number of parameters whose shards the checkpoint records in full (AutoTP).
        vocabulary_rows: rows of the vocabulary that are no padding, as far as the checkpoint declares them.
        unreadable: what of the declaration cannot be understood.
        user_rules, preset: number of ``"tp_rules"`` in the config, and the preset that it names.
        uses: ``rule``, its ``origin``, and the ``parameters`` that are cut by it.
        undecided: parameters of which nothing says how their shards were cut.
        contradictions: parameter -> why its shards contradict its rule.
        fitting_presets: those that know the most undecided parameters -> how many.
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
class FileEntry:
    """A file of the tag's folder.

    Attributes:
        name: below the folder.
        kind: ``"model states"``, ``"optimizer states"``, ``"layer"``, ``"parameter"`` (of a universal checkpoint),
            ``"optimizer"`` (of one), ``"expert"``, ``"swapped"`` (from NVMe) or ``"other"``.
        dp, tp, pp, mp: ranks it is of; ``mp`` counts stages and tensor-parallel ranks together.
        tensors: key -> number of parameters of which it holds some.
    """

    name: str
    kind: str
    nbytes: int
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    mp: int | None = None
    layer: int | None = None
    tensors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspection:
    """Everything that the metadata of a checkpoint shows.

    Attributes:
        readable: whether its metadata fits together; if not, the rest comes from single files and file names.
        weights_only: whether optimizer states could not be named, so that only weights are listed.
        masters, frozen, buffers, weights: totals of each role; ``weights`` where ``weights_only``.
        parameters: and buffers.
        aliases: tied name -> the name that holds the data.
        files: in the tag's folder, by name.
        missing: files that should be there.
        tags, latest: as in :class:`Evidence`.
        findings: what is odd, the gravest first.
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
        """Whether nothing was found that a load would stumble over."""
        return not any(finding.level == ERROR for finding in self.findings)
