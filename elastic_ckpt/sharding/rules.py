"""Sources of a parameter's layout: the user, checkpoint, live model, a preset, or its shapes alone. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import ModelLayout
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.tp_rules import AMBIGUOUS, COLUMN, REPLICATED, ROW, Kind, Rule
from elastic_ckpt.errors import ConfigError, MismatchError

if TYPE_CHECKING:
    from elastic_ckpt.sharding.specs import ShardSpec


class Preset(BaseModel):
    """Tensor-parallel rules of a well-known code base; the first rule that applies to a parameter wins.

    ``one_stage``: patterns of what a tied pipeline module has beside the tied weight: its first stage alone trains it.
    A run whose arguments have all of ``has`` and none of ``lacks`` is of that code base; without ``has``, none is.
    ``unsaved``: arguments that such a run does not save with its checkpoints: the live run's count.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str
    has: list[str] = []
    lacks: list[str] = []
    unsaved: list[str] = []
    one_stage: list[str] = []
    rules: list[Rule]

    @classmethod
    def names(cls) -> list[str]:
        """Names of the presets that the package ships."""
        return sorted(path.stem for path in _folder().glob("*.json"))

    @classmethod
    def load(cls, name: str) -> Preset:
        """Load a shipped preset by name, or any by its ``.json`` path; :class:`ConfigError` if absent or malformed."""
        is_path, names = name.endswith(".json"), cls.names()
        if not is_path and name not in names:
            expected = f"one of {', '.join(names)}, or the path of a JSON file"
            remedy = f'"elastic_checkpoint": {{"tp_preset": "{names[0]}"}}' if names else None
            raise ConfigError(f'there is no preset "{name}"', None, expected, name, remedy=remedy)
        path = Path(name) if is_path else _folder() / f"{name}.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
            expected = '{"name": ..., "description": ..., "rules": [{"pattern": ..., "kind": ...}]}'
            problem = "this file of tensor-parallel rules cannot be read"
            raise ConfigError(problem, str(path), expected, error) from error

    @property
    def evidence(self) -> str:
        """What the arguments of such a run have and lack, in words."""
        return f"args with {', '.join(self.has)}" + f", without {', '.join(self.lacks)}" * bool(self.lacks)

    def rule(self, name: str, run: Mapping[str, Any]) -> Rule | None:
        """The rule for a parameter of a run with these arguments, if any."""
        return next((rule for rule in self.rules if rule.applies(name, run)), None)


def _folder() -> Path:
    installed = Path(str(resources.files("elastic_ckpt"))) / "configs" / "rules"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs" / "rules"


@cache
def _shipped() -> tuple[Preset, ...]:
    return tuple(map(Preset.load, Preset.names()))


def recognized(run: Mapping[str, Any]) -> Preset | None:
    """The preset of the code base that a run's arguments prove; ``None`` unless it is one alone."""
    found = [preset for preset in _shipped() if preset.has] if run else []
    found = [each for each in found if run.keys() >= set(each.has) and run.keys().isdisjoint(each.lacks)]
    return found[0] if len(found) == 1 else None


#: Transformer Engine's names of a norm within a fused layer, which is whole.
_NORM_INSIDE = (".layer_norm_weight", ".layer_norm_bias")
#: Names of fused parameters, whose arrangement neither shapes nor ``partition_dim`` show.
_FUSED = re.compile(
    r"query_key_value|qkv|(^|[._])(q_k_v|kv_proj|key_value)([._]|$)|gate_up|up_gate|gate_and_up|w1_w3|w1?[23]([._]|$)"
    r"|h_to_4h|linear_fc1|(^|[._])(fc1|fc1_weight|fc1_bias|fc1_gate|linear_?1|input_linear|W_pack|c_attn|in_proj\w*|conv1d)"
    r"|(^|[._])(to_|W)?(kv|qk)(\.|$)|(^|[._])w_?i([._]|$)|(^|[._])(proj|lin)_in([._]|$)|glu([._]|$)|gated|c_kv|kv_b",
    re.IGNORECASE,
)
#: Those that Megatron Core interleaves, so that ``partition_dim`` describes them in full.
_INTERLEAVED = re.compile(r"(^|[._])linear_(qkv|kv)[._]")
_VOCABULARY = re.compile(r"^(?!.*(pos|token_?type)).*(embed|wte|lm_head|output_layer|final_linear)", re.IGNORECASE)
_MEGATRON = "megatron.core"


def tensor_of(metadata: CheckpointMetadata, name: str) -> TensorMetadata | None:
    """The weights of a parameter, or a buffer."""
    tensors = metadata.tensors
    return tensors.get((name, MASTER)) or tensors.get((name, FROZEN)) or tensors.get((name, BUFFER))


def is_fused(name: str) -> bool:
    """Whether a parameter's name is one of fused parameters, whose arrangement the shape does not show."""
    return _FUSED.search(name) is not None and not name.endswith(_NORM_INSIDE)


def is_vocabulary(name: str) -> bool:
    """Whether a parameter's name is that of a vocabulary, whose first dimension may be padded."""
    return _VOCABULARY.search(name) is not None


@dataclass(frozen=True)
class RuleSource:
    """A rule and its origin, in words; whether that is the user's config, or a guess from the shapes alone."""

    rule: Rule
    origin: str
    is_users: bool = False
    is_guess: bool = False

    @property
    def is_ambiguous(self) -> bool:
        """Whether the rule only declares the layout ambiguous."""
        return self.rule.kind == AMBIGUOUS


@dataclass(frozen=True)
class ShardingRules:
    """The rules and preset of the user's config; ``builtin`` applies to Megatron Core, after the live parameters.

    Without a preset of the user's, that which the saved run's arguments prove applies (``is_recognized``).
    """

    rules: Sequence[Rule] = ()
    preset: Preset | None = None
    builtin: Preset | None = None
    is_recognized: bool = False

    @classmethod
    def of(cls, config: ElasticConfig) -> ShardingRules:
        """The rules and preset of a config. Raises :class:`ConfigError` if there is no such preset."""
        preset = Preset.load(config.tp_preset) if config.tp_preset else None
        return cls(tuple(config.tp_rules), preset, Preset.load("megatron-core"))

    def for_run(self, run: Mapping[str, Any]) -> ShardingRules:
        """The rules for a checkpoint of a run with these arguments."""
        found = recognized(run) if self.preset is None else None
        return replace(self, preset=found, is_recognized=True) if found is not None else self

    def completed(self, metadata: CheckpointMetadata, live_run: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that the code base does not save, from the live run.

        Raises :class:`MismatchError` if the configuration beside the checkpoint states others.
        """
        unsaved = () if self.preset is None else self.preset.unsaved
        live, saved = {key: live_run[key] for key in unsaved if key in live_run}, metadata.run
        other = [key for key in live if key in saved and saved[key] != live[key]]
        if other:
            problem = (
                "the live model was built with other arguments than the configuration beside the checkpoint states"
            )
            expected, found = (", ".join(f"{key}: {side[key]}" for key in other) for side in (saved, live))
            remedy = 'build the model as it was saved, or correct the files in the folder "configs"'
            raise MismatchError(problem, metadata.source.folder, expected, found, remedy=remedy)
        return live

    def of_first_stage(self, names: Iterable[str]) -> set[str]:
        """Those of the saved names that, of several pipeline stages, only the first trains."""
        patterns = () if self.preset is None else self.preset.one_stage
        return {name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)}

    def sources(self, spec: ShardSpec) -> list[RuleSource]:
        """Every rule about a parameter, by precedence; a rule of the user's excludes all others.

        Raises :class:`CannotSplit` if the checkpoint's declaration cannot be understood.
        """
        run = spec.metadata.run
        for rule in self.rules:
            if rule.applies(spec.name, run) or rule.applies(spec.saved_name, run):
                return [RuleSource(rule, 'your "tp_rules"', is_users=True)]
        declared = spec.metadata.declared.rule(spec.saved_name)
        found = [
            None if declared is None else RuleSource(declared, "the checkpoint's universal_checkpoint_info"),
            _of_preset(self.preset, spec, self.is_recognized),
            _of_live_parameter(spec),
            _of_preset(self.builtin, spec) if spec.live.owner.startswith(_MEGATRON) else None,
            None if spec.is_fused else _of_shapes(spec),
        ]
        return [source for source in found if source is not None]


def _of_preset(preset: Preset | None, spec: ShardSpec, is_recognized: bool = False) -> RuleSource | None:
    if preset is None:
        return None
    known = {**spec.metadata.run, **spec.by_shapes}
    rule = preset.rule(spec.saved_name, known)
    if rule is None:
        return None
    why = f", by the checkpoint's {preset.evidence}" if is_recognized else ""
    for by, keys in (("the live run", spec.by_live), ("the shapes", spec.by_shapes)):
        why += "".join(f", {key} {known[key]} by {by}" for key in rule.when if key in keys)
    return RuleSource(rule, f'the preset "{preset.name}"{why}')


def presets_for(spec: ShardSpec) -> list[str]:
    """Names of the shipped presets that decide a parameter."""
    found = [(preset.name, _of_preset(preset, spec)) for preset in _shipped()]
    return [name for name, source in found if source is not None and not source.is_ambiguous]


def refuse_other_code(
    metadata: CheckpointMetadata, model: ModelLayout, names: Iterable[str], rules: ShardingRules
) -> None:
    """Raise :class:`MismatchError` if the live code base fuses a parameter in another way than the one that saved it.

    Shapes are equal then, and a load of it trains another model. Rules and presets of the user's settle it.
    """
    saved, live = recognized(metadata.run), recognized(model.run)
    if saved is None or live is None or saved.name == live.name or rules.preset is not None:
        return
    for name in names:
        saved_name = metadata.saved_names.get(name, name)
        is_settled = any(rule.applies(each, metadata.run) for rule in rules.rules for each in (name, saved_name))
        both = (saved.rule(saved_name, metadata.run), live.rule(saved_name, model.run))
        parts = [None if rule is None or rule.kind == AMBIGUOUS else (rule.sub_parameters,) for rule in both]
        if not is_settled and None not in parts and parts[0] != parts[1]:
            problem = "the live code arranges this parameter in another way than the code that saved it"
            sides = f"{live.name}, by the live {live.evidence}", f"{saved.name}, by the checkpoint's {saved.evidence}"
            remedy = "go on with the version of the code that saved it; if the weights were rearranged since: "
            remedy += f'"elastic_checkpoint": {{"tp_preset": "{live.name}"}}'
            raise metadata.error(MismatchError, problem, name, *sides, remedy)


def _of_live_parameter(spec: ShardSpec) -> RuleSource | None:
    live = spec.live
    if live.dim is None:
        return None
    if live.dim < 0:
        return RuleSource(_rule(spec, REPLICATED), "the live parameter (not tensor_model_parallel)")
    is_whole_truth = live.owner.startswith(_MEGATRON) and _INTERLEAVED.search(spec.name) is not None
    if live.stride == 1 and spec.is_fused and not is_whole_truth:
        return None  # sub-parameters remain unknown
    origin = live.origin or f"the live parameter (partition_dim {live.dim}, partition_stride {live.stride})"
    return RuleSource(_rule(spec, COLUMN, live.dim, [1] * live.stride if live.stride > 1 else None), origin)


def _of_shapes(spec: ShardSpec) -> RuleSource | None:
    """Equal shards are replicated; else the sharded dimension is the only one that sums to the same on both sides."""
    saved, live = spec.shapes, spec.live.shapes
    if len({*saved, *live}) == 1:
        if len(saved) == 1 and len(saved[0]) > 1 and is_vocabulary(spec.name):
            return None  # as large on each of several ranks as on one: it may be a padded vocabulary
        if len(set(spec.live.values)) > 1:
            return None  # a buffer whose values differ between live ranks
        return RuleSource(_rule(spec, REPLICATED), "the shapes", is_guess=True)
    if not live or len({len(shape) for shape in (*saved, *live)}) > 1:
        return None
    fitting = []
    for dim in range(len(live[0])):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in (*saved, *live)}
        if len(rest) == 1 and sum(s[dim] for s in saved) == sum(s[dim] for s in live):
            fitting.append(dim)
    return RuleSource(_rule(spec, COLUMN, fitting[0]), "the shapes", is_guess=True) if len(fitting) == 1 else None


def _rule(spec: ShardSpec, kind: Kind, dim: int | None = None, parts: list[int] | None = None) -> Rule:
    """A rule for one parameter, not validated: for every parameter, that would dominate planning time."""
    kind = ROW if kind == COLUMN and dim == 1 else kind
    return Rule.model_construct(pattern=re.escape(spec.name), kind=kind, dim=dim, sub_parameters=parts)
