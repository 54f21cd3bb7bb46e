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
        checkpoint: the metadata of all files together; ``None``: they do not fit together.
        refusal: why they do not.
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

    @property
    def config(self) -> Mapping[str, Any]:
        """The DeepSpeed config of the run; empty where it is not known."""
        return (None if self.peeked is None else self.peeked.config) or {}

    @property
    def zero_options(self) -> Mapping[str, Any]:
        """The ``zero_optimization`` section of that config."""
        section = self.config.get("zero_optimization")
        return section if isinstance(section, Mapping) else {}


@dataclass(frozen=True)
class SavedRun:
    """The run that saved a checkpoint; ``None``: not known.

    Attributes:
        step, samples, skipped_steps: its counters.
        ds_version: DeepSpeed version.
        zero_stage: 0 to 3; ``BF16_Optimizer`` without ZeRO partitions as stage 1 does, and counts as that.
        dp, sp, tp, pp: data-, sequence-, tensor- and pipeline-parallel degree; ``sp`` is ``None`` where it is 1.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"unknown"``.
        precision_from: what says so, in words.
        optimizer, optimizer_from: in words, and what says so.
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
    """Tensors of one role, as they are stored: of all tensor-parallel shards together.

    Attributes:
        tensors: how many.
        numel, nbytes: elements and bytes; of 8-bit states, of the codes, without their scales.
        dtypes: names of their dtypes.
    """

    tensors: int = 0
    numel: int = 0
    nbytes: int = 0
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateSummary:
    """One kind of one optimizer state; 8-bit optimizers keep some states of a key in blocks and some in 32 bits.

    Attributes:
        key: its name.
        kind: ``"elementwise"``, ``"blocks"`` (8-bit codes with a scale each), ``"whole"`` (a shape of its own),
            ``"replicated"``, ``"scalar"``, ``"opaque"``, ``"damaged"``, ``"fresh"`` (the config says to leave it) or
            ``"unnamed"`` (numbered, of nobody knows which parameter).
        dtype: of its tensors; of a scalar, how it was saved.
        parameters: how many have it.
        rows: values that it has for each element.
        block_numel: elements in a block; 0: no blocks.
        numel, nbytes: as in :class:`Totals`.
        values: of a scalar: the least and the greatest.
        why: of an opaque or damaged one.
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
        name, role: :data:`TRAINED`, :data:`FROZEN_ROLE`, :data:`BUFFER_ROLE` or :data:`WEIGHT`.
        shape: of the whole; ``None``: there are shards, and nothing says how they were cut.
        shards: shape of each tensor-parallel shard.
        dtype: of its master, or of its weights where it did not train.
        group: its param group; ``None``: it has none.
        states: keys of its optimizer states, scalar ones too.
        numel: elements of its master or weights, as stored, of all shards together.
        nbytes: bytes of all that is stored of it, states and further copies included.
        tied: other names of it.
        copies: how often its master is stored: more than once where pipeline stages share it.
        rule: how its shards were cut, in words; empty: there is one shard, and no rule for it.
        rule_from: who says so.
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
        vocabulary_rows: rows of the vocabulary that are no padding, where the checkpoint says so.
        unreadable: what of the declaration cannot be understood; empty: it can.
        user_rules: number of ``"tp_rules"`` in the config.
        preset: that the user named.
        uses: which parameters are cut in which way, by the word of one source: ``rule``, ``origin``, ``parameters``.
        undecided: parameters of which nothing says how their shards were cut.
        contradictions: parameter -> why its shards contradict its rule.
        fitting_presets: presets that have rules for undecided parameters -> for how many; those that know the most.
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
        nbytes: its size.
        dp, tp, pp, mp: ranks it is of; ``mp`` counts stages and tensor-parallel ranks together.
        layer: pipeline layer.
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
        format, folder, tag: of the checkpoint.
        readable: whether its metadata fits together; if not, the rest comes from single files and file names.
        weights_only: whether optimizer states could not be named, so that only weights are listed.
        run: the run that saved it.
        masters, frozen, buffers, weights: totals of each role; ``weights`` where ``weights_only``.
        states, groups: optimizer states and param groups.
        rules: of tensor-parallel shards.
        parameters: parameters and buffers.
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
