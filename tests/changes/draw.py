"""Changes: the axes of a script, how a pair is drawn, and how one that fails is reduced. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace


@dataclass(frozen=True)
class Script:
    """What a training script builds; the defaults are the plainest.

    Attributes:
        stage, precision: of ZeRO; a key of ``tests.distributed.model.PRECISIONS``.
        wrapper: what wraps modules, or the whole model.
        names: of two modules in each layer.
        frozen: which parameters do not train.
        groups: of the optimizer.
        tied: whether the head has the embedding's weights.
        rows: of the vocabulary.
        adapter: names and rank of adapters beside two layers.
        quantized: a frozen base of bitsandbytes.
        more: a module or a buffer that others do not have.
        optimizer, scheduler: ``none``: without one; a scheduler may be ``held`` by the script, which restores it.
        accumulation: micro-batches of a step.
        stages: of a ``PipelineModule``; 0: the model is none.
    """

    stage: int = 1
    precision: str = "fp32"
    wrapper: str = "none"
    names: str = "plain"
    frozen: str = "none"
    groups: str = "one"
    tied: bool = False
    rows: int = 37
    adapter: str = "none"
    quantized: str = "none"
    more: str = "none"
    optimizer: str = "adamw"
    scheduler: str = "step"
    accumulation: int = 1
    stages: int = 0


@dataclass(frozen=True)
class Change:
    """A script that saves, one that loads, and how the load is called.

    Attributes:
        saved_ranks, ranks: that save and that load.
        arguments: of the load, a key of :data:`LOADS`.
        files: what happened to the files meanwhile: ``as saved``; ``without states``: those of the optimizer are gone;
            ``without latest``; ``without frozen``: the save left out what does not train.
        given: how the folder is named: ``folder``, or ``tag``, beside it.
        format: ``native``; or ``universal``, as DeepSpeed's converter or ``elastic-ckpt convert`` makes it of that.
    """

    saves: Script = field(default_factory=Script)
    loads: Script = field(default_factory=Script)
    saved_ranks: int = 2
    ranks: int = 2
    arguments: str = "all"
    files: str = "as saved"
    given: str = "folder"
    format: str = "native"

    @property
    def is_of_deepspeed(self) -> bool:
        """Whether DeepSpeed's own loader may be asked."""
        saved = (self.saved_ranks, self.saves.stage, self.saves.stages)
        return self.format != "native" or saved == (self.ranks, self.loads.stage, self.loads.stages)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The axes on which the two scripts differ, for counting."""
        return tuple(
            each.name for each in fields(Script) if getattr(self.saves, each.name) != getattr(self.loads, each.name)
        )


#: Arguments of ``load_checkpoint``.
LOADS: dict[str, dict[str, object]] = {
    "all": {},
    "not strict": {"load_module_strict": False},
    "no states": {"load_optimizer_states": False},
    "no schedule": {"load_lr_scheduler_states": False},
    "module only": {"load_module_only": True},
}
#: Axis of a script -> what may be chosen.
AXES: Mapping[str, tuple[int | str | bool, ...]] = {
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16"),
    "wrapper": ("none", "checkpointed", "compiled", "module", "peft"),
    "names": ("plain", "other"),
    "frozen": ("none", "embedding", "norms", "base"),
    "groups": ("one", "decay", "reversed", "split", "empty"),
    "tied": (False, True),
    "rows": (37, 40),
    "adapter": ("none", "default", "other", "both", "wide"),
    "quantized": ("none", "four", "double", "eight"),
    "more": ("none", "module", "buffer", "extra state"),
    "optimizer": ("adamw", "sgd", "none"),
    "scheduler": ("step", "lambda", "cosine", "sequential", "held", "none"),
    "accumulation": (1, 2),
    "stages": (0, 1, 2),
}
#: Those of a model that is no pipeline, and of one that is.
_PLAIN_AXES = {axis: choices for axis, choices in AXES.items() if axis != "stages"}
_PIPELINE_AXES: Mapping[str, tuple[int | str | bool, ...]] = {
    "stage": (0, 1),
    "optimizer": ("adamw", "sgd"),
    "scheduler": ("step", "lambda", "cosine", "sequential", "none"),
    "stages": (1, 2),
    **{axis: AXES[axis] for axis in ("precision", "names", "adapter", "rows", "accumulation")},
}
RANKS = (1, 2, 3, 4)
FILES = ("as saved", "without states", "without latest", "without frozen")
GIVEN = ("folder", "tag")
FORMATS = ("native", "universal by DeepSpeed", "universal by convert")


def change_of(text: str) -> Change:
    """The change that :func:`as_json` has written."""
    read = json.loads(text)
    scripts = {which: Script(**read.pop(which, {})) for which in ("saves", "loads")}
    return Change(**scripts, **read)


def as_json(change: Change) -> str:
    """What :func:`change_of` reads: the choices that are not the default."""
    written = _not_plain(change, Change())
    for which in ("saves", "loads"):
        written[which] = _not_plain(getattr(change, which), Script())
    return json.dumps(written)


def _not_plain(chosen: Change | Script, plain: Change | Script) -> dict[str, object]:
    values = asdict(chosen)
    return {name: value for name, value in values.items() if value != asdict(plain)[name]}


def random_change(rng: random.Random, saved_ranks: int, ranks: int) -> Change:
    """A script that is odd in some ways, and the same with one or two changes."""
    while True:
        axes = _PIPELINE_AXES if rng.random() < 0.2 else _PLAIN_AXES
        saves = _odd(rng, axes)
        changed = rng.sample(sorted(axes), rng.choice((0, 1, 1, 2)))
        if "stage" not in changed and rng.random() < 0.3:
            changed.append("stage")
        loads = replace(saves, **{axis: rng.choice(axes[axis]) for axis in changed})  # type: ignore[arg-type]
        if loads.optimizer == "none":
            loads = replace(loads, scheduler="none")
        change = Change(
            saves,
            loads,
            saved_ranks,
            ranks,
            rng.choice(("all", "all", *LOADS)),
            rng.choice(("as saved", "as saved", *FILES)),
            rng.choice(("folder", "folder", *GIVEN)),
            rng.choice(("native", "native", *FORMATS)),
        )
        if is_possible(change):
            return change


def _odd(rng: random.Random, axes: Mapping[str, tuple[int | str | bool, ...]]) -> Script:
    """Most axes keep their default, so that odd choices meet in twos and threes."""
    always = ("stage", "stages")
    chosen = {axis: rng.choice(choices) for axis, choices in axes.items() if axis in always or rng.random() < 0.3}
    return Script(**chosen)  # type: ignore[arg-type]


def is_possible(change: Change) -> bool:
    """Whether a person would do it, as far as is known beforehand; what fails with DeepSpeed alone counts for nothing."""
    is_native = change.format == "native"
    saves = change.saves
    impossible = (
        saves.optimizer == "none",
        change.files == "without latest" and change.given == "folder",
        change.files in ("without states", "without latest") and not is_native,
        change.format == "universal by DeepSpeed" and saves.stage == 0,
        (saves.stages == 0) != (change.loads.stages == 0),  # other names, and another script
        change.saved_ranks % max(saves.stages, 1) != 0,
        change.ranks % max(change.loads.stages, 1) != 0,
    )
    return not any(impossible) and _is_possible(saves) and _is_possible(change.loads)


def _is_possible(script: Script) -> bool:
    if script.optimizer == "none" and (script.stage in (1, 2) or script.scheduler != "none"):
        return False  # DeepSpeed wants one
    if script.stages and not _is_possible_pipeline(script):
        return False
    if script.frozen == "base" and script.adapter == "none" and script.more != "module":
        return False  # nothing would train
    return script.quantized == "none" or (script.stage < 3 and script.precision == "fp32")


def _is_possible_pipeline(script: Script) -> bool:
    plain = asdict(Script())
    return all(value == plain[axis] or value in _PIPELINE_AXES.get(axis, ()) for axis, value in asdict(script).items())


def simpler(change: Change) -> Iterator[Change]:
    """The change with less to it: an axis on which the scripts differ made equal, or one at its default."""
    for axis in change.kinds:
        yield replace(change, loads=replace(change.loads, **{axis: getattr(change.saves, axis)}))
    for each in fields(Script):
        plain = {each.name: each.default}
        now = (getattr(change.saves, each.name), getattr(change.loads, each.name))
        if now != (each.default, each.default) and each.name not in change.kinds:
            yield replace(change, saves=replace(change.saves, **plain), loads=replace(change.loads, **plain))
    for each in fields(Change):
        if each.name not in ("saves", "loads") and getattr(change, each.name) != each.default:
            yield replace(change, **{each.name: each.default})
