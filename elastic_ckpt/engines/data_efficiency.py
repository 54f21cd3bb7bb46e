"""States of DeepSpeed's data-efficiency schedulers: whether the live ones can continue with a checkpoint's. Local.

DeepSpeed takes these entries as they are, and not all of them fail where they are wrong. numpy does not check the
position in its generator's state, and then reads beyond it. The data sampler opens the clusters that a state names,
and rewrites them, in a folder that is the user's.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

from elastic_ckpt.core.kinds import LARGEST_COUNT, LIST, MAPPING, Strange, described, is_finite, kind_of, strange_value
from elastic_ckpt.errors import WEIGHTS_ALONE, ElasticCkptError, MismatchError, Remedy, shortened

#: The schedulers, by their keys in a checkpoint.
_NAMES = {"random_ltd": "random layerwise token dropping", "data_sampler": "DeepSpeed's data sampler"}
_TURNED_OFF = {
    "random_ltd": 'set "enabled": false in "random_ltd" of the DeepSpeed config, which restores everything else',
    "data_sampler": 'set "enabled": false in "curriculum_learning" of "data_sampling" in the DeepSpeed config, which '
    "restores everything else",
}
#: The generator that ``numpy.random.get_state`` describes, and how many words its state has.
_ALGORITHM = "MT19937"
_WORDS = 624
#: A difficulty in the name of a cluster.
_NUMBER = r"(-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-][0-9]{1,3})?)"
_PREFIX = "cluster"


def own_schedulers(engine: Any) -> dict[str, Any]:
    """The data-efficiency schedulers of an engine, by their keys in a checkpoint."""
    own = {}
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None:
        own["random_ltd"] = engine.random_ltd_scheduler
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        own["data_sampler"] = engine.training_dataloader.data_sampler
    return own


def refuse_strange_state(key: str, own: Any, saved: Any) -> None:
    """Raise :class:`MismatchError` for a saved state with an entry that the live scheduler cannot take.

    ``key``: of the state in the checkpoint.
    """
    strange = strange_state(own, saved)
    if strange is None:
        return
    problem = f"the checkpoint's state of {_NAMES[key]} has an entry that the live one cannot take"
    name = f"{strange.name} of {key}"
    remedy = Remedy(_TURNED_OFF[key]), WEIGHTS_ALONE
    raise MismatchError(problem, None, strange.expected, strange.found, parameter=name, remedy=remedy)


def begin_clusters_anew(own: Any) -> None:
    """Let a data sampler that has trained or loaded forget its clusters: a load appends those of its state to them."""
    if isinstance(own, DeepSpeedDataSampler) and hasattr(own, "data_clusters"):  # on the first rank alone
        own.data_clusters = []
        own.data_cluster_sizes = []


@contextmanager
def clusters_anew(engine: Any) -> Iterator[None]:
    """While the body runs, whoever loads the state of an engine's data sampler has it forget its clusters first."""
    sampler = getattr(getattr(engine, "training_dataloader", None), "data_sampler", None)
    if not isinstance(sampler, DeepSpeedDataSampler):
        yield
        return
    load = sampler.load_state_dict

    def load_anew(state: Any) -> None:
        begin_clusters_anew(sampler)
        load(state)

    sampler.load_state_dict = load_anew
    try:
        yield
    finally:
        del sampler.load_state_dict


def load_own_state(key: str, own: Any, saved: Any) -> None:
    """Let a scheduler load its state; what its class raises is a :class:`MismatchError`."""
    begin_clusters_anew(own)
    try:
        own.load_state_dict(copy.deepcopy(saved))
    except ElasticCkptError:
        raise
    except Exception as error:
        problem = f"{_NAMES[key]} could not load the saved state"
        expected = f"a state that the live {type(own).__name__} loads"
        found = f"{type(error).__name__}: {error}"[:200]
        remedy = [Remedy(_TURNED_OFF[key]), WEIGHTS_ALONE]
        if key == "data_sampler" and isinstance(error, OSError):
            expected = 'the clusters that the state names, in "data_cluster_path" of the DeepSpeed config'
            remedy = [Remedy("restore that folder"), *remedy]
        raise MismatchError(problem, None, expected, found, parameter=key, remedy=remedy) from error


def strange_state(own: Any, saved: Any) -> Strange | None:
    """The first entry of a saved state that the live scheduler cannot take; ``None`` if there is none.

    What a class of the user's own makes of its states is for that class to say.
    """
    if not isinstance(own, (RandomLTDScheduler, DeepSpeedDataSampler)):
        return None
    if not isinstance(saved, Mapping):
        return Strange("the state", MAPPING, described(saved))
    live = own.state_dict()
    missing = [name for name in live if name not in saved]
    if missing:
        return Strange(missing[0], "an entry of this name", shortened(map(str, saved)) or "no entry")
    if isinstance(own, RandomLTDScheduler):
        return _strange_dropping(live, saved)
    return _strange_sampling(own, saved)


def _strange_dropping(live: Mapping[str, Any], saved: Mapping[str, Any]) -> Strange | None:
    for name, value in live.items():
        strange = strange_value(name, value, saved[name])
        if strange is not None:
            return strange
    may_be_real = any(isinstance(value, float) for value in live.values())
    # the saved range replaces that of the config; sequences are no longer than the live one
    strange = _strange_number("max_value", saved["max_value"], 0, live["max_value"], may_be_real)
    if strange is not None:
        return strange
    most = saved["max_value"]
    ranges = {
        "min_value": (0, most),
        "current_value": (0, most),
        "current_steps": (-1, LARGEST_COUNT),
        "consumed_layer_tokens": (0, LARGEST_COUNT),
    }
    for name, (lowest, highest) in ranges.items():
        strange = _strange_number(name, saved[name], lowest, highest, may_be_real)
        if strange is not None:
            return strange
    return None


def _strange_sampling(sampler: Any, saved: Mapping[str, Any]) -> Strange | None:
    samples = int(sampler.one_epoch_total_samples)
    # what is taken at once may be larger than what is left of an epoch, or than a cluster
    at_once = max(samples, int(sampler.global_batch_size))
    return (
        _strange_list("batch", saved["batch"], samples - 1)
        or _strange_number("consumed_samples", saved["consumed_samples"], 0, sampler.total_samples + at_once)
        or _strange_number("curriculum_step", saved["curriculum_step"], 0, LARGEST_COUNT)
        or _strange_difficulties(sampler, saved["current_difficulties"])
        or _strange_clusters(sampler, saved["data_cluster_paths"])
        or _strange_list(
            "data_cluster_current_position",
            saved["data_cluster_current_position"],
            at_once,
            len(saved["data_cluster_paths"]),
        )
        or _strange_generator(saved["np_rng_state"])
    )


def _strange_difficulties(sampler: Any, saved: Any) -> Strange | None:
    name = "current_difficulties"
    schedulers = sampler.curriculum_schedulers
    if kind_of(saved) != MAPPING:
        return Strange(name, MAPPING, described(saved))
    if saved and saved.keys() != schedulers.keys():  # none before the first batch
        return Strange(name, f"the metrics {shortened(map(str, schedulers))}", shortened(map(str, saved)))
    for metric, difficulty in saved.items():
        if not _comes_to(schedulers[metric], difficulty):
            return Strange(f"{name}[{metric!r}]", "a difficulty of the live schedule", described(difficulty))
    return None


def _strange_clusters(sampler: Any, saved: Any) -> Strange | None:
    """The same of the names of clusters, each of which DeepSpeed makes a path of.

    Releases before 0.10 saved paths, of which DeepSpeed takes what is behind the last slash.
    """
    name = "data_cluster_paths"
    schedulers = sampler.curriculum_schedulers
    pattern = re.compile("".join([_PREFIX, *(f"_{re.escape(metric)}{_NUMBER}" for metric in schedulers)]))
    expected = f"names such as {_PREFIX}{''.join(f'_{metric}8' for metric in schedulers)}, of the live schedule"
    if not isinstance(saved, list):
        return Strange(name, LIST, described(saved))
    known = set[str]()
    for number, path in enumerate(saved):
        place = f"{name}[{number}]"
        found = pattern.fullmatch(path.rpartition("/")[2]) if isinstance(path, str) else None
        if found is None:
            return Strange(place, expected, described(path))
        difficulties = zip(schedulers.values(), found.groups(), strict=True)
        if not all(_comes_to_text(scheduler, text) for scheduler, text in difficulties):
            return Strange(place, expected, described(path))
        if found[0] in known and not any(map(_is_custom, schedulers.values())):
            return Strange(place, "another name than those before it", described(path))
        known.add(found[0])
    return None


def _is_custom(scheduler: Any) -> bool:
    """Whether a schedule is a function of the user's, which may come to any difficulty, and back to it."""
    return bool(scheduler.state["schedule_type"] == "custom")


def _comes_to(scheduler: Any, difficulty: Any) -> bool:
    """Whether a curriculum's schedule has a difficulty."""
    state = scheduler.state
    if not _is_integer(difficulty) and not isinstance(difficulty, float):
        return False
    if not is_finite(difficulty):
        return False
    if _is_custom(scheduler):
        return True
    if state["schedule_type"] == "fixed_discrete":
        return difficulty in state["schedule_config"]["difficulty"]
    most = state["max_difficulty"]
    step = state["schedule_config"]["difficulty_step"]
    # releases before 0.19.8 begin with a multiple of the step below the least difficulty
    is_multiple = difficulty % step == 0 and state["min_difficulty"] - step < difficulty <= most
    return bool(is_multiple or difficulty == most)


def _comes_to_text(scheduler: Any, text: str) -> bool:
    """The same of a difficulty in the name of a cluster."""
    is_integer = text.lstrip("-").isdigit()
    difficulty = int(text) if is_integer else float(text)
    return str(difficulty) == text and _comes_to(scheduler, difficulty)


def _strange_generator(saved: Any) -> Strange | None:
    """The same of the state of numpy's generator, as ``numpy.random.get_state`` returns it."""
    name = "np_rng_state"
    if kind_of(saved) != LIST or len(saved) != 5:
        return Strange(name, f"the five parts of an {_ALGORITHM} state", described(saved))
    algorithm, words, position, has_gauss, gauss = saved
    if not isinstance(algorithm, str) or algorithm != _ALGORITHM:
        return Strange(f"{name}[0]", _ALGORITHM, described(algorithm))
    if not isinstance(words, np.ndarray) or words.shape != (_WORDS,) or words.dtype != np.uint32:
        return Strange(f"{name}[1]", f"an array of {_WORDS} uint32", _described_array(words))
    if not isinstance(gauss, float) or not math.isfinite(gauss):
        return Strange(f"{name}[4]", "a finite number", described(gauss))
    return _strange_number(f"{name}[2]", position, 0, _WORDS) or _strange_number(f"{name}[3]", has_gauss, 0, 1)


def _described_array(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else described(value)


def _strange_list(name: str, saved: Any, highest: int, count: int | None = None) -> Strange | None:
    """The first member of a list that is no integer from 0 to ``highest``, or the list if it has not ``count``."""
    if not isinstance(saved, list):
        return Strange(name, LIST, described(saved))
    if count is not None and len(saved) != count:
        return Strange(name, f"{count} entries", f"{len(saved)} entries")
    for number, value in enumerate(saved):
        strange = _strange_number(f"{name}[{number}]", value, 0, highest)
        if strange is not None:
            return strange
    return None


def _strange_number(name: str, value: Any, lowest: float, highest: float, may_be_real: bool = False) -> Strange | None:
    """The value if it is no number of a range, and no integer unless it ``may_be_real``."""
    is_of_kind = _is_integer(value) or (may_be_real and isinstance(value, float))
    if is_of_kind and lowest <= value <= highest:
        return None
    return Strange(name, f"{'a number' if may_be_real else 'an integer'} from {lowest} to {highest}", described(value))


def _is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python's or numpy's: no flag, and no difference of times."""
    return type(value) is int or (isinstance(value, np.integer) and not isinstance(value, np.timedelta64))
