"""The parallel degrees that a model-states file states, and which of them the number of files confirms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.core.local_state import SequenceParallel


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of the run that saved a checkpoint; ``tp`` and ``pp`` are ``None`` where no file states them."""

    tp: int | None
    pp: int | None
    sequence: SequenceParallel

    @property
    def model_parallel(self) -> int:
        """Number of model-parallel ranks, each with files of its own; 0: unknown."""
        return (self.tp or 0) * (self.pp or 0)


@dataclass(frozen=True, slots=True)
class StatedDegrees:
    """What a model-states file states, not all of it necessarily right; ``None``: not stated.

    Attributes:
        dimensions: TP and PP degree (``checkpoint_parallel_dimensions``, since DeepSpeed 0.17).
        mp, dp: ``mp_world_size``, the TP degree, and ``dp_world_size``, the number of ranks that ZeRO partitions over.
        sequence: sequence-parallel degree of the saved config or arguments.
        possible: sequence-parallel degrees that fit the batch size, or the samples counted so far if no earlier run had
            another batch size.
        mesh: whether the config makes a device mesh, over whose sequence ranks ZeRO-1/2 does not partition.
    """

    dimensions: tuple[int, int] | None = None
    mp: int | None = None
    dp: int | None = None
    sequence: int | None = None
    possible: frozenset[int] = frozenset()
    mesh: bool = False

    def borne_out(self, model_parallel_ranks: int) -> Degrees:
        """The degrees that the number of model-parallel ranks with files confirms.

        DeepSpeed 0.19 mistakes the sequence-parallel degree of ``parallel_state_sp`` for the tensor-parallel one
        (``bwc_tensor_model_parallel_world_size`` calls its ``get_model_parallel_world_size``, which is an alias).
        ``mp_world_size`` then states another degree, and the one that the files confirm counts.
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
        """The two statements about model-parallel ranks that contradict each other, for errors; empty: none do."""
        if self.dimensions is None or self.mp in (None, self.dimensions[0]):
            return ""
        tp, pp = self.dimensions
        return f"mp_world_size {self.mp} and checkpoint_parallel_dimensions {{'tp_degree': {tp}, 'pp_degree': {pp}}}"


def stated_degrees(tree: Mapping[str, Any], config: Mapping[str, Any], run: Mapping[str, Any]) -> StatedDegrees:
    """What a model-states file with the entries ``tree`` states, with the DeepSpeed config and arguments of its run."""
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
    """How many ranks share their samples; ``None``: none, or unknown.

    A custom ``mpu`` need not record its degree. DeepSpeed requires ``batch`` to be the data-parallel degree times
    ``rows``, the samples of one step on each rank: if fewer ranks than there are suffice, the others share.
    """
    data, rest = divmod(batch, rows or 1)
    if not ranks or not rows or not data or rest or ranks % data or ranks == data:
        return None
    return ranks // data


def positive_int(values: Mapping[str, Any], key: str) -> int | None:
    """The positive integer under ``key`` in untrusted values, else ``None``."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
