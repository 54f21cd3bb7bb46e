"""What a file states of the run that saved it: config, features, parallel degrees, arguments, and training state.

Rules for tensor-parallel shards may depend on the arguments.

Megatron saves its ``args`` whole. gpt-neox saves eight of them, none about layouts, and the user's YAML files in a
folder ``configs`` in the tag's or beside it (``save_ds_checkpoint``, megatron/checkpointing.py), of which top-level
options with plain values are read. If a file cannot be read, all options and defaults are unknown.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from numbers import Integral
from typing import Any

import yaml

from elastic_ckpt.config import CONFIG_KEY
from elastic_ckpt.core.local_state import SequenceParallel
from elastic_ckpt.core.values import (
    AHEAD,
    AT_SAVE,
    BATCH_KEYS,
    ONE_BIT_OPTIMIZERS,
    WITHIN_STEP,
    BatchSizes,
    Features,
    LossScale,
    RecordedCounts,
    TrainingState,
    is_number,
)
from elastic_ckpt.errors import WITHOUT_STATES, DamagedError, LayoutError, Remedy, UnsupportedError
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.known_states import value_text
from elastic_ckpt.formats.objects import materialise_entries
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.storage import absolute, file_names, is_folder, open_stream

#: DeepSpeed's counters, and the degrees of the run.
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")
_ONE_BIT_STATES = {"worker_error", "server_error", "momentum_accumulator", "lamb_coeff_freeze", "scaling_coeff"}
#: What PyYAML raises for scalars that are not of the type that they are tagged with.
_MALFORMED = (ValueError, KeyError, IndexError, OverflowError, AttributeError, TypeError)
_PLAIN = (str, int, float, bool, type(None))
_ENDINGS = (".yml", ".yaml", ".json")
#: In untrusted files, above any real configuration: files.
_MOST_FILES = 32
#: Bytes of all of them together.
_MOST_BYTES = 1 << 18
#: Ranks.
_MOST_RANKS = 1 << 17
_NEOX_MARK = "model_parallel_size"  # the option that identifies a dict of arguments as gpt-neox's
#: gpt-neox's defaults of options that decide about layouts (megatron/neox_arguments/neox_args.py).
_NEOX_DEFAULTS = {
    "activation": "gelu",
    "gpt_j_residual": False,
    "num_kv_heads": None,
    "output_layer_parallelism": "column",
}
#: A dynamic scaler's state as in ``FP16_Optimizer.state_dict``; ``DynamicLossScaler`` adds more (loss_scaler.py).
_DYNAMIC = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_HYSTERESIS = ("cur_hysteresis", "delayed_shift", "consecutive_hysteresis", "min_scale", "raise_error_at_min_scale")
#: Larger scales are infinite.
_MOST_SCALE = 2.0**1023
#: Larger integers are none that torch takes.
_MOST_COUNT = 1 << 63
#: What of a loss scaler is a count, of which the first two begin at -1 and 0, and what is a flag. All else is a scale.
_COUNTERS = frozenset({"last_overflow_iter", "cur_iter"})
_COUNTS = _COUNTERS | {"cur_hysteresis", "delayed_shift"}
_FLAGS = frozenset({"consecutive_hysteresis", "raise_error_at_min_scale"})
#: Entries that are DeepSpeed's and not the client's.
_DEEPSPEEDS = frozenset({"lr_scheduler", "random_ltd", "data_sampler"})
#: Entries that are no training state; DeepSpeed's own loader returns frozen fragments as client state.
_NOT_READ = frozenset({"module", "optimizer", "lr_scheduler", "frozen_param_fragments"})


def saved_config(file: PickledFile) -> Mapping[str, Any] | None:
    """The DeepSpeed config in a model-states file; ``None``: not saved, or only its path."""
    config = file.tree.get("ds_config") if isinstance(file.tree, Mapping) else None
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            return None  # a path on the machine that saved it: the config is unknown, not empty
    return config if isinstance(config, Mapping) else None


def config_section(file: PickledFile, key: str) -> Mapping[str, Any]:
    """One section of the config, such as ``zero_optimization``; empty if unknown."""
    return section_of(saved_config(file) or {}, key)


def section_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """One section of a config; empty where it has none."""
    section = config.get(key)
    return section if isinstance(section, Mapping) else {}


def counts_ahead(file: PickledFile) -> RecordedCounts:
    """By how many steps the optimizer's counts are ahead of the counters, as far as the run has recorded it."""
    record = section_of(config_section(file, CONFIG_KEY), AHEAD)
    lists = {key: each for key, each in record.items() if isinstance(each, list)}
    # of 64 bits: of longer ones, any number may share a hash
    ahead = {
        key: frozenset(each for each in steps if type(each) is int and is_number(each)) for key, steps in lists.items()
    }
    return RecordedCounts(ahead, record.get(AT_SAVE) is True, record.get(WITHIN_STEP) is True)


def features_in(file: PickledFile) -> Features:
    """The features of a model-states or optimizer-states file. Local."""
    tree = file.tree if isinstance(file.tree, Mapping) else {}
    experts = tree.get("num_experts") or ()
    states = base_state(file).get("state")
    keys = [set(each) for each in states.values() if isinstance(each, Mapping)] if isinstance(states, Mapping) else []
    optimizer = str(config_section(file, "optimizer").get("type", "")).lower()
    zero = config_section(file, "zero_optimization")
    mics = zero.get("mics_shard_size", 0)
    return Features(
        experts=tuple(experts) if isinstance(experts, (list, tuple)) else (experts,),
        expert_groups=tuple(sorted({str(group.get("name")) for group in base_groups(file) if group.get("moe")})),
        one_bit=optimizer in ONE_BIT_OPTIMIZERS or any(_ONE_BIT_STATES & each for each in keys),
        mics=max(mics, 0) if isinstance(mics, int) else 0,
        zenflow=isinstance(zero.get("zenflow"), Mapping),
    )


def read_counters(file: PickledFile) -> dict[str, int]:
    """The counters that are in a file; :class:`DamagedError` for one that does not count."""
    counters = {key: file.tree[key] for key in COUNTERS if key in file.tree}
    for key, value in counters.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) < _MOST_COUNT:
            problem = "a counter of this file is not a number of steps, samples or ranks"
            found = value_text(value)
            remedy = f"leave {key} out of the saved client state, where it replaces DeepSpeed's own; use another tag"
            raise DamagedError(problem, file.path, f"{key}: an integer from 0 to 2 ** 63 - 1", found, remedy=remedy)
    return counters


def base_groups(file: PickledFile) -> list[Mapping[str, Any]]:
    """The base optimizer's param groups in a file; empty without an optimizer."""
    groups = base_state(file).get("param_groups")
    return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, (list, tuple)) else []


def base_state(file: PickledFile) -> Mapping[str, Any]:
    """The base optimizer's ``state_dict``, wherever the ZeRO stage puts it."""
    tree = file.tree if isinstance(file.tree, Mapping) else {}
    state = tree.get("optimizer_state_dict", tree.get("optimizer"))
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    return state if isinstance(state, Mapping) else {}


def refuse_features(features: Features, file: str) -> None:
    """Raise :class:`UnsupportedError` for what cannot be restored at another topology, by name."""
    if features.zenflow:
        problem = "the checkpoint was saved with ZenFlow, whose selective optimizer's states are in no file"
        without = Remedy("lets DeepSpeed continue without them, at the saved topology", config={"mode": "off"})
        raise UnsupportedError(problem, file, 'a run without "zenflow"', "ZenFlow", remedy=without)
    if features.names:
        problem = f"the checkpoint was saved with {features.names}, whose states are not laid out as ZeRO's"
        remedy = "resume it with the number of ranks, the layout and the optimizer that saved it"
        raise UnsupportedError(problem, file, "a run of plain ZeRO", features.names, remedy=remedy)


def run_arguments(saved: Any, folder: str) -> dict[str, Any]:
    """Plain values of the saved ``args`` (Megatron's namespace, gpt-neox's dict) and of the configuration beside it."""
    values = vars(saved) if isinstance(saved, Namespace) else saved
    if not isinstance(values, Mapping):
        return {}
    plain = {str(key): value for key, value in values.items() if _is_plain(value)}
    if isinstance(saved, Namespace) or _NEOX_MARK not in plain:
        return plain
    return {**_neox_options(folder), **plain}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) and (not isinstance(value, int) or is_number(value))


def _neox_options(folder: str) -> dict[str, Any]:
    """Options of the configuration beside a checkpoint, and the defaults of those that it does not set.

    An option on which files disagree is unknown: configurations of several models may have been released together.
    """
    paths: list[str] = []
    for parent in (folder, os.path.dirname(absolute(folder))):  # of the nearest folder that has any
        configs = os.path.join(parent, "configs")
        names = sorted(file_names(configs)) if not paths and is_folder(configs) else []
        paths += [os.path.join(configs, name) for name in names if name.endswith(_ENDINGS)]
    read = list(_read_configs(paths)) if len(paths) <= _MOST_FILES else []  # more are not of one run
    options: dict[str, Any] = {} if not read or None in read else dict(_NEOX_DEFAULTS)
    known = [each for each in read if each is not None]
    for key in dict.fromkeys(chain.from_iterable(known)):  # in an order that is the same on all ranks
        values = [each[key] for each in known if key in each]
        options.pop(key, None)
        if len(set(map(repr, values))) == 1:
            options[key] = values[0]
    return options


def _read_configs(paths: Sequence[str]) -> Iterator[dict[str, Any] | None]:
    """The options of each file; of those that would make more than one configuration has, ``None``."""
    left = _MOST_BYTES
    for path in paths:
        text = _read_text(path, left)
        left -= len(text or b"")
        yield None if text is None else parse_options(text)


def _read_text(path: str, most_nbytes: int) -> bytes | None:
    """The text of a file; ``None``: it cannot be read, or is longer."""
    try:
        with open_stream(path) as stream:
            text = stream.read(most_nbytes + 1)
    except (DamagedError, OSError):
        return None
    return text if len(text) <= most_nbytes else None


@lru_cache(maxsize=_MOST_FILES)  # each model-states file of a checkpoint asks for the same
def parse_options(text: bytes) -> dict[str, Any] | None:
    """Plain top-level options of YAML, with underscores in their names; ``None``: it is no mapping of names.

    Only plain scalars are constructed: aliases and merge keys of hostile text would grow exponentially.
    """
    options = {}
    try:
        loader = yaml.SafeLoader(text.decode())
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            return None
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode) or not name.value:
                return None
            if isinstance(value, yaml.ScalarNode) and _is_plain(plain := loader.construct_object(value)):
                options[name.value.replace("-", "_")] = plain
    except (yaml.YAMLError, RecursionError, *_MALFORMED):
        return None
    return options


@dataclass(frozen=True, slots=True)
class StatedDegrees:
    """What a model-states file states, not all of it necessarily right; ``None``: not stated."""

    dimensions: tuple[int, int] | None = None  # TP and PP degree (``checkpoint_parallel_dimensions``, since 0.17)
    mp: int | None = None  # ``mp_world_size``, the TP degree
    partition_degree: int | None = None  # ``dp_world_size``
    sequence: int | None = None  # sequence-parallel degree of the saved config or arguments
    possible: frozenset[int] = frozenset()  # those that fit the batch size, or the samples counted so far
    mesh: bool = False  # whether the config makes a device mesh, over whose sequence ranks ZeRO-1/2 does not partition

    def borne_out(self, model_parallel_ranks: int) -> tuple[int, int, SequenceParallel]:
        """The degrees that the number of model-parallel ranks with files confirms; TP and PP are 0 if not stated.

        DeepSpeed 0.19 mistakes the sequence-parallel degree of ``parallel_state_sp`` for the tensor-parallel one
        (``bwc_tensor_model_parallel_world_size``); ``mp_world_size`` then states the degree that the files confirm.
        """
        sequence = SequenceParallel(self.sequence or 1, partitioned=not self.mesh)
        if self.dimensions is None:
            return 0, 0, sequence
        tp, pp = self.dimensions
        is_sequence = tp * pp != model_parallel_ranks and self.mp is not None and self.mp * pp == model_parallel_ranks
        if is_sequence and tp > 1 and (self.partition_degree or 0) % tp == 0:
            return self.mp or 0, pp, SequenceParallel(tp)
        return tp, pp, sequence


def stated_degrees(tree: Mapping[str, Any], config: Mapping[str, Any], run: Mapping[str, Any]) -> StatedDegrees:
    """What a model-states file with the entries ``tree`` states, with the DeepSpeed config and arguments of its run."""
    saved = tree.get("checkpoint_parallel_dimensions")
    saved = saved if isinstance(saved, Mapping) else {}
    tp = positive_int(saved, "tp_degree")
    pp = positive_int(saved, "pp_degree")
    sequence = positive_int(config, "sequence_parallel_size")
    ranks = positive_int(tree, "dp_world_size")
    (batch, per_rank, steps) = (positive_int(config, k) for k in BATCH_KEYS)
    micro = per_rank or 0
    samples = positive_int(tree, "global_samples")
    counted = positive_int(tree, "global_steps")
    possible: set[int] = set()
    if batch is None and samples and counted and samples % counted == 0:
        possible = {_ranks_per_sample(ranks, samples // counted, micro * (steps or 1)) or 0} - {0}
    elif batch and ranks and ranks <= _MOST_RANKS and micro and not steps:
        possible = {sp for sp in range(1, ranks + 1) if ranks % sp == 0 and batch % (micro * ranks // sp) == 0}
        possible = set() if 1 in possible else possible  # the batch alone does not speak for sequence parallelism
    return StatedDegrees(
        dimensions=None if tp is None or pp is None else (tp, pp),
        mp=positive_int(tree, "mp_world_size"),
        partition_degree=ranks,
        sequence=sequence
        or positive_int(run, "ds_sequence_parallel_size")
        or _ranks_per_sample(ranks, batch or 0, micro * (steps or 0)),
        possible=frozenset(possible),
        mesh=sequence is not None and positive_int(config, "data_parallel_size") is not None,
    )


def _ranks_per_sample(ranks: int | None, batch: int, samples: int) -> int | None:
    """How many ranks share their samples; ``None``: none, or unknown.

    DeepSpeed requires ``batch`` to be the data-parallel degree times the ``samples`` of a step on each rank: if fewer
    ranks suffice, the others share.
    """
    dp, rest = divmod(batch, samples or 1)
    known = ranks and samples and dp and not rest and ranks % dp == 0 and ranks != dp
    return ranks // dp if ranks and known else None


def positive_int(values: Mapping[str, Any], key: str) -> int | None:
    """The positive integer under ``key`` in untrusted values, else ``None``."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST_COUNT else None


def read_training_state(
    file: PickledFile,
    loss_scale: LossScale | None,
    overflow: bool,
    same_ranks: bool,
    sequence: SequenceParallel,
    options: MetadataOptions = MetadataOptions(),  # noqa: B008  frozen
) -> TrainingState:
    """The training state in a model-states file; ``checkpoint`` is empty without client state."""
    entries = {key: value for key, value in file.tree.items() if key not in _NOT_READ}
    scheduler = {"lr_scheduler": file.tree.get("lr_scheduler")}
    wanted = entries | scheduler if options.with_client_state else scheduler
    read, refused = materialise_entries(file, wanted, lambda key: options.skip_unreadable and key not in _DEEPSPEEDS)
    in_fp16 = loss_scale is not None and (loss_scale.dynamic or loss_scale.values["cur_scale"] != 1.0)
    if saved_config(file) is not None:
        in_fp16 = bool(config_section(file, "fp16").get("enabled"))
    return TrainingState(
        counters=read_counters(file),
        batch=complete_batch(saved_config(file) or {}, sequence.data_degree(int(file.tree.get("dp_world_size") or 0))),
        lr_scheduler=read.pop("lr_scheduler"),
        loss_scale=loss_scale if in_fp16 else None,
        overflow=overflow,
        checkpoint=read,
        same_ranks=same_ranks,
        left_out={str(key): f"{error.problem}: {error.found}; it is left out" for key, error in refused.items()},
        file=file.path,
    )


def loss_scale_of(saved: Any, wanted: bool = True) -> LossScale | None:
    """The loss scale in the scaler that partitioned optimizers pickle, or in the entries that others write.

    ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer`` write entries. Partitioned optimizers write a scaler in every
    precision, which scales anything only in fp16. Raises :class:`DamagedError` for values that no scaler has, unless
    the scale is not ``wanted``; the caller names the file (:func:`errors_of_file`).
    """
    if saved is None or (isinstance(saved, Mapping) and "cur_scale" not in saved):
        return None
    values = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    dynamic = values.get("dynamic_loss_scale" if values is saved else "dynamic") is True
    keys = (*_DYNAMIC, *_HYSTERESIS) if dynamic else _DYNAMIC[:2]
    found = {key: values[key] for key in keys if key in values}
    remedy = Remedy("use another tag"), WITHOUT_STATES
    for key, value in found.items():
        expected = _expected_of_scaler(key, value)
        if expected is not None and not wanted:
            return None
        if expected is not None:
            problem = "the loss scaler of this checkpoint has a value that no loss scaler of DeepSpeed has"
            both = f"{key}: {expected}", repr(value)[:200]
            raise DamagedError(problem, None, *both, parameter="loss_scaler", remedy=remedy)
    if "cur_scale" not in found and wanted:
        problem = "the loss scaler of this checkpoint has no scale"
        expected = "cur_scale"
        entries = sorted(map(str, values))[:12]
        raise LayoutError(problem, None, expected, entries, parameter="loss_scaler", remedy=remedy)
    return LossScale(dynamic, found) if "cur_scale" in found else None


def _expected_of_scaler(key: str, value: Any) -> str | None:
    """What an entry of a loss scaler has to be, in words; ``None`` if it is."""
    if key in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "a number"
    if not -_MOST_SCALE <= value <= _MOST_SCALE or (isinstance(value, int) and abs(value) >= _MOST_COUNT):
        return "a finite number"
    if key in _COUNTS:
        fits = isinstance(value, int) and (value >= -1 or key not in _COUNTERS)
        return None if fits else "a count"
    return None if value > 0 or (value == 0 and key == "min_scale") else "a positive number"


def complete_batch(config: Mapping[str, Any], dp: int) -> BatchSizes:
    """Batch sizes of a config, completed as in ``DeepSpeedConfig._set_batch_related_parameters``."""
    batch, micro, steps = (positive_int(config, key) for key in BATCH_KEYS)
    if batch is not None and micro is None and steps is None:
        steps = 1
    if batch is None and micro is not None and dp:
        batch = micro * (steps or 1) * dp
    if steps is None and batch and micro and dp:
        steps = batch // (micro * dp)
    if micro is None and batch and steps and dp:
        micro = batch // (steps * dp)
    if micro and steps and dp:
        batch = micro * steps * dp
    return BatchSizes(batch, micro, steps)
