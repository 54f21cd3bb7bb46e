"""The parallel degrees that a model-states file states, and which of them the number of files bears out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.core.sequence import SequenceParallel


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of the run that saved a checkpoint; tensor and pipeline are ``None`` where no file states them."""

    tp: int | None
    pp: int | None
    sequence: SequenceParallel

    @property
    def model_parallel(self) -> int:
        """Model-parallel ranks, each with files of its own; 0: not known."""
        return (self.tp or 0) * (self.pp or 0)


@dataclass(frozen=True, slots=True)
class StatedDegrees:
    """What a model-states file states, not all of which need be right.

    Attributes:
        dimensions: tensor- and pipeline-parallel degree (``checkpoint_parallel_dimensions``, since DeepSpeed 0.17).
        mp: ``mp_world_size``, the tensor-parallel degree; ``None``: not stated.
        dp: ``dp_world_size``, the ranks that ZeRO partitions over; ``None``: not stated.
        sequence: sequence-parallel degree of the saved config or arguments; ``None``: not stated.
        possible: sequence-parallel degrees that the batch leaves open, or the samples counted so far, if no run before
            had another batch.
        mesh: whether the config makes a device mesh, over whose sequence ranks ZeRO-1 and 2 do not partition.
    """

    dimensions: tuple[int, int] | None = None
    mp: int | None = None
    dp: int | None = None
    sequence: int | None = None
    possible: frozenset[int] = frozenset()
    mesh: bool = False

    def borne_out(self, model_parallel_ranks: int) -> Degrees:
        """The degrees, given how many model-parallel ranks have files.

        DeepSpeed 0.19 takes the sequence-parallel degree of ``parallel_state_sp`` for the tensor-parallel one
        (``bwc_tensor_model_parallel_world_size`` finds ``get_model_parallel_world_size`` there, which is an alias).
        Then ``mp_world_size`` states another degree, and of the two the one counts that the files bear out.
        """
        sequence = SequenceParallel(self.sequence or 1, partitioned=not self.mesh)
        if self.dimensions is None:
            return Degrees(None, None, sequence)
        tp, pp = self.dimensions
        is_sequence = tp * pp != model_parallel_ranks and self.mp is not None and self.mp * pp == model_parallel_ranks
        if is_sequence and tp > 1 and (self.dp or 0) % tp == 0:
            return Degrees(self.mp, pp, SequenceParallel(tp))
        return Degrees(tp, pp, sequence)

    @property
    def contradiction(self) -> str:
        """Two statements about model-parallel ranks that contradict each other, for errors; empty: none do."""
        if self.dimensions is None or self.mp in (None, self.dimensions[0]):
            return ""
        tp, pp = self.dimensions
        return f"mp_world_size {self.mp} and checkpoint_parallel_dimensions {{'tp_degree': {tp}, 'pp_degree': {pp}}}"


def stated_degrees(tree: Mapping[str, Any], config: Mapping[str, Any], run: Mapping[str, Any]) -> StatedDegrees:
    """What a model-states file with these entries states, with the run's DeepSpeed config and its arguments."""
    saved = tree.get("checkpoint_parallel_dimensions")
    saved = saved if isinstance(saved, Mapping) else {}
    tp, pp = positive_int(saved, "tp_degree"), positive_int(saved, "pp_degree")
    sequence = positive_int(config, "sequence_parallel_size")
    ranks, micro = positive_int(tree, "dp_world_size"), positive_int(config, "train_micro_batch_size_per_gpu") or 0
    steps, batch = positive_int(config, "gradient_accumulation_steps"), positive_int(config, "train_batch_size")
    samples, counted = positive_int(tree, "global_samples"), positive_int(tree, "global_steps")
    possible: set[int] = set()
    if batch is None and samples and counted and samples % counted == 0:
        possible = {_sharing(ranks, samples // counted, micro * (steps or 1)) or 0} - {0}
    elif batch and ranks and micro and not steps:
        possible = {sp for sp in range(1, ranks + 1) if ranks % sp == 0 and batch % (micro * ranks // sp) == 0}
        possible = set() if 1 in possible else possible  # the batch alone does not speak for sequence parallelism
    return StatedDegrees(
        dimensions=None if tp is None or pp is None else (tp, pp),
        mp=positive_int(tree, "mp_world_size"),
        dp=ranks,
        sequence=sequence
        or positive_int(run, "ds_sequence_parallel_size")
        or _sharing(ranks, batch or 0, micro * (steps or 0)),
        possible=frozenset(possible),
        mesh=sequence is not None and positive_int(config, "data_parallel_size") is not None,
    )


def _sharing(ranks: int | None, batch: int, rows: int) -> int | None:
    """How many ranks share their samples, if fewer than there are suffice for the batch; ``None``: none, or unknown.

    A custom ``mpu`` need not record its degree anywhere. DeepSpeed insists on a ``batch`` of the data-parallel degree
    times ``rows``, the samples of one step on each rank.
    """
    data, rest = divmod(batch, rows or 1)
    if not ranks or not rows or not data or rest or ranks % data or ranks == data:
        return None
    return ranks // data


def positive_int(values: Mapping[str, Any], key: str) -> int | None:
    """A positive integer among values from a file; ``None`` where there is none."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
