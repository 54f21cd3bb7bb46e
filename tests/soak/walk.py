"""Random walks over topologies: what a walk may visit, how one is drawn, and how a failing one is shortened. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Stop:
    """A few steps of training on one topology, after the checkpoint of the last stop was loaded.

    Attributes:
        ranks, stage, precision, tp, pp: the topology; a precision is a key of ``tests.distributed.model.PRECISIONS``.
        optimizer, groups: names that ``tests.distributed.model`` knows.
        options: keys of :data:`OPTIONS`.
        steps: how many.
        universal: whether DeepSpeed's converter ran on the last stop's checkpoint.
        deepspeed: a folder with another version of DeepSpeed; empty: the installed one.
    """

    ranks: int = 1
    stage: int = 1
    precision: str = "fp32"
    tp: int = 1
    pp: int = 1
    optimizer: str = "adamw"
    groups: str = "several"
    options: tuple[str, ...] = ()
    steps: int = 2
    universal: bool = False
    deepspeed: str = ""


@dataclass(frozen=True)
class Family:
    """What a walk never changes, and what it may.

    Attributes:
        model: a key of ``tests.distributed.model.BUILDERS``, or the kind of a ``Parallel``.
        style: of a ``Parallel``; empty for the others.
        optimizers: those that take over from each other.
        is_convertible: whether DeepSpeed's converter keeps everything.
        others as of :class:`Stop`.
    """

    model: str
    style: str = ""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    precisions: tuple[str, ...] = ("fp32", "bf16")
    tps: tuple[int, ...] = (1,)
    pps: tuple[int, ...] = (1,)
    optimizers: tuple[str, ...] = ("adamw",)
    groups: tuple[str, ...] = ("several",)
    options: tuple[str, ...] = ()
    is_convertible: bool = False


#: Entries of ``zero_optimization``, and the stages that know them.
OPTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "offload": ((1, 2, 3), {"offload_optimizer": {"device": "cpu"}}),
    "offload_param": ((3,), {"offload_param": {"device": "cpu"}}),
    "sub_groups": ((3,), {"sub_group_size": 150}),
    "not_persistent": ((3,), {"stage3_param_persistence_threshold": 0}),
    "round_robin": ((1, 2), {"round_robin_gradients": True}),
}
_GROUPS = ("several", "reversed", "split")
_EVERYTHING: dict[str, Any] = {"groups": _GROUPS, "options": tuple(OPTIONS)}
_ADAM: dict[str, Any] = {
    "precisions": ("fp32", "bf16", "bf16_fp32acc", "fp16"),
    "optimizers": ("adamw", "cpuadam"),
    "is_convertible": True,
    **_EVERYTHING,
}
FAMILIES = {
    **{f"{model}, Adam": Family(model, **_ADAM) for model in ("PoorerLM", "UntiedLM", "HalfFrozenLM", "LoraLM")},
    **{
        f"PoorerLM, {optimizer}": Family("PoorerLM", optimizers=(optimizer,), **_EVERYTHING)
        for optimizer in ("adam_amsgrad", "sgd", "nadam", "radam", "adamax", "rmsprop_centered", "adadelta", "rprop")
    },
    # with ZeRO, DeepSpeed makes Adagrad anew, of one group and without what a scheduler notes in it
    "PoorerLM, adagrad": Family("PoorerLM", stages=(1, 2, 3), optimizers=("adagrad",), groups=("one",)),
    "Megatron Core, llama": Family("megatron", "llama", tps=(1, 2, 4)),
    "Megatron Core, gpt": Family("megatron", "gpt", tps=(1, 2, 4)),
    # DeepSpeed has no ZeRO-2 and 3 for a pipeline
    "pipeline, uniform": Family("pipeline", "uniform", stages=(0, 1), pps=(1, 2, 3, 4)),
    "pipeline, parameters": Family("pipeline", "parameters", stages=(0, 1), pps=(1, 2, 4)),
    "3d": Family("3d", "uniform", stages=(0, 1), tps=(1, 2, 4), pps=(1, 2)),
    "AutoTP, llama": Family("autotp", "llama", stages=(1, 2, 3), tps=(1, 2, 4)),
    "AutoTP, tied": Family("autotp", "tied", stages=(1, 2, 3), tps=(1, 2)),
    "AutoTP, fused": Family("autotp", "fused", stages=(1, 2, 3), tps=(1, 2, 4)),
}


@dataclass(frozen=True)
class Walk:
    """Stops of one family, a key of :data:`FAMILIES`; from each to the next is a hop."""

    family: str
    stops: tuple[Stop, ...]

    @property
    def hops(self) -> int:
        """Loads of this walk."""
        return len(self.stops) - 1

    def as_json(self) -> str:
        """What :func:`walk_of` reads; of a stop, what is not the default."""
        usual = asdict(Stop())
        stops = [{key: value for key, value in asdict(stop).items() if value != usual[key]} for stop in self.stops]
        return json.dumps({"family": self.family, "stops": stops})

    def legs(self) -> Iterator[list[tuple[int, Stop]]]:
        """Numbered stops that one set of processes can visit: as many ranks, nothing to convert in between."""
        numbered = list(enumerate(self.stops))
        starts = [number for number, stop in numbered if number == 0 or self._needs_others(number, stop)]
        for start, stop in zip(starts, [*starts[1:], len(numbered)], strict=True):
            yield numbered[start:stop]

    def _needs_others(self, number: int, stop: Stop) -> bool:
        last = self.stops[number - 1]
        return stop.universal or (stop.ranks, stop.deepspeed) != (last.ranks, last.deepspeed)


def walk_of(text: str) -> Walk:
    """The walk that :meth:`Walk.as_json` has written."""
    read = json.loads(text)
    known = {field.name for field in fields(Stop)}
    assert all(stop.keys() <= known for stop in read["stops"])
    stops = [Stop(**{**stop, "options": tuple(stop.get("options", ()))}) for stop in read["stops"]]
    return Walk(read["family"], tuple(stops))


def random_walk(rng: random.Random, hops: int, versions: tuple[str, ...] = ("",)) -> Walk:
    """A walk of so many hops; ``versions``: folders with DeepSpeed to choose from."""
    name = rng.choice(list(FAMILIES))
    stops: list[Stop] = []
    for _ in range(hops + 1):
        stop = random_stop(rng, FAMILIES[name])
        if stops and rng.random() < 0.6:  # other processes take longer to start than a load takes
            last = stops[-1]
            topologies = [each for each in topologies_of(FAMILIES[name]) if each[0] == last.ranks]
            ranks, tp, pp = rng.choice(topologies)
            stop = replace(stop, ranks=ranks, tp=tp, pp=pp, deepspeed=last.deepspeed)
        elif FAMILIES[name].style == "":
            stop = replace(stop, deepspeed=rng.choice(versions))
        if stop.deepspeed:  # its kernels would have to be compiled, for minutes
            stop = replace(stop, optimizer=FAMILIES[name].optimizers[0])
            if stop.stage == 0:  # whose masters in low precision the tests do not read in older versions
                stop = replace(stop, precision="fp32")
        if stops and stops[-1].stage == 0:  # its states have no names: in other groups they cannot be told apart
            stop = replace(stop, groups=stops[-1].groups)
        is_converted = bool(stops) and _is_convertible(FAMILIES[name], stops[-1]) and rng.random() < 0.25
        stops.append(replace(stop, universal=is_converted))
    return Walk(name, tuple(stops))


def topologies_of(family: Family) -> list[tuple[int, int, int]]:
    """Ranks, tensor and pipeline parallel degree."""
    degrees = [(tp, pp) for tp in family.tps for pp in family.pps]
    return [(ranks, tp, pp) for ranks in (1, 2, 3, 4) for tp, pp in degrees if ranks % (tp * pp) == 0]


def random_stop(rng: random.Random, family: Family) -> Stop:
    """One topology of a family."""
    ranks, tp, pp = rng.choice(topologies_of(family))
    stage = rng.choice(family.stages)
    precisions = [each for each in family.precisions if each != "bf16_fp32acc" or stage == 1]
    optimizers = [each for each in family.optimizers if each != "cpuadam" or stage > 0]
    options = [each for each in family.options if stage in OPTIONS[each][0] and rng.random() < 0.4]
    precision = rng.choice(precisions)
    if precision == "bf16_fp32acc":
        options = []
    return Stop(
        ranks,
        stage,
        precision,
        tp,
        pp,
        rng.choice(optimizers),
        rng.choice(family.groups),
        tuple(options),
        rng.randint(1, 3),
    )


def _is_convertible(family: Family, stop: Stop) -> bool:
    return family.is_convertible and stop.stage > 0 and stop.precision != "fp16" and "round_robin" not in stop.options


def shortened(walk: Walk, fails: Callable[[Walk], bool]) -> Walk:
    """The shortest walk found that still fails at its last stop, which has to fail as it is.

    First the shortest end of it, then that without each of its other stops.
    """
    length = 2
    while length < len(walk.stops) and not fails(replace(walk, stops=walk.stops[-length:])):
        length = 2 * length - 1
    stops = walk.stops[-length:]
    number = len(stops) - 2
    while number >= 0 and len(stops) > 2:
        fewer = (*stops[:number], *stops[number + 1 :])
        if fails(replace(walk, stops=fewer)):
            stops = fewer
        number -= 1
    return replace(walk, stops=stops)
