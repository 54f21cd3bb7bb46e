"""Who says how a parameter is sharded: the user, the checkpoint, the live model, a preset, or shapes. Pure."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import ModelLayout
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.shard_specs import BY_SHAPES, COLUMN, KV_HEADS, REPLICATED, ROW, USER, Kind, ShardSpec
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.errors import ConfigError, MismatchError, Remedy

if TYPE_CHECKING:
    from elastic_ckpt.sharding.specs import Sharding


class Preset(BaseModel):
    """Tensor-parallel rules of a well-known code base; the first rule that applies to a parameter wins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str
    has: list[str] = []  # a run whose arguments have all of these, and none of ``lacks``, is of it; if empty, no run
    lacks: list[str] = []
    unsaved: list[str] = []  # arguments that such a run does not save with its checkpoints: the live run's count
    one_stage: list[str] = []  # patterns of what a tied pipeline module's first stage alone trains
    rules: list[ShardSpec]

    @classmethod
    def names(cls) -> list[str]:
        """Names of the presets that the package ships."""
        return sorted(path.stem for path in _folder().glob("*.json"))  # asks the system: a folder of this package

    @classmethod
    def load(cls, name: str) -> Preset:
        """Load a shipped preset by name, or any by its ``.json`` path; :class:`ConfigError` if absent or malformed."""
        is_path = name.endswith(".json")
        names = cls.names()
        if not is_path and name not in names:
            expected = f"one of {', '.join(names)}, or the path of a JSON file"
            remedy = [Remedy(config={"tp_preset": each}) for each in get_close_matches(name, names, n=1)]
            raise ConfigError(f'there is no preset "{name}"', None, expected, name, remedy=remedy)
        path = Path(name) if is_path else _folder() / f"{name}.json"
        try:
            # asks the system: a preset, of this package or the user's
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
            expected = '{"name": ..., "description": ..., "rules": [{"pattern": ..., "kind": ...}]}'
            problem = "this file of tensor-parallel rules cannot be read"
            raise ConfigError(problem, str(path), expected, error) from error

    @property
    def evidence(self) -> str:
        """What the arguments of such a run have and lack, in words."""
        return f"args with {', '.join(self.has)}" + f", without {', '.join(self.lacks)}" * bool(self.lacks)

    def rule(self, name: str, run: Mapping[str, Any]) -> ShardSpec | None:
        """The rule for a parameter of a run with these arguments, if any."""
        return next((rule for rule in self.rules if rule.applies(name, run)), None)


def _folder() -> Path:
    installed = Path(str(resources.files("elastic_ckpt"))) / "configs" / "rules"
    # asks the system: a folder of this package
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
class ShardingRules:
    """The rules and preset of the user's config; ``builtin`` applies to Megatron Core, after the live parameters."""

    rules: Sequence[ShardSpec] = ()
    preset: Preset | None = None
    builtin: Preset | None = None

    @classmethod
    def of(cls, config: ElasticConfig) -> ShardingRules:
        """The rules and preset of a config. Raises :class:`ConfigError` if there is no such preset."""
        preset = Preset.load(config.tp_preset) if config.tp_preset else None
        return cls(tuple(config.tp_rules), preset, Preset.load("megatron-core"))

    def preset_for(self, run: Mapping[str, Any]) -> Preset | None:
        """The user's preset, or that which the arguments of the saved run prove."""
        return self.preset or recognized(run)

    def of_user(self, name: str, saved_name: str, run: Mapping[str, Any]) -> ShardSpec | None:
        """The first of the user's rules that applies to a parameter, by either name."""
        found = (rule for rule in self.rules if rule.applies(name, run) or rule.applies(saved_name, run))
        return next(found, None)

    def specs_for(self, sharding: Sharding) -> list[ShardSpec]:
        """All that is said of a parameter, by precedence; a rule of the user's excludes all else.

        Raises :class:`CannotSplit` if the checkpoint's declaration cannot be understood.
        """
        if (rule := self.of_user(sharding.name, sharding.saved_name, sharding.metadata.run)) is not None:
            return [rule.by(USER)]
        declared = sharding.metadata.declared.spec(sharding.saved_name)
        found = [
            None if declared is None else declared.by("the checkpoint's universal_checkpoint_info"),
            _by_preset(sharding.checkpoint.preset, sharding, is_recognized=self.preset is None),
            _by_live_parameter(sharding),
            _by_preset(self.builtin, sharding) if sharding.live.owner.startswith(_MEGATRON) else None,
            None if sharding.is_fused else _by_shapes(sharding),
        ]
        return [spec for spec in found if spec is not None]


def _by_preset(preset: Preset | None, sharding: Sharding, is_recognized: bool = False) -> ShardSpec | None:
    """A preset's rules may depend on what shapes prove, as on the run's arguments."""
    if preset is None:
        return None
    by_shapes = sharding.checkpoint.shapes.proven(sharding.name)
    by_live = sharding.checkpoint.by_live
    known = {**sharding.metadata.run, **by_shapes}
    if (rule := preset.rule(sharding.saved_name, known)) is None:
        return None
    why = f", by the checkpoint's {preset.evidence}" if is_recognized else ""
    for by, keys in (("the live run", by_live), ("the shapes", by_shapes)):
        why += "".join(f", {key} {known[key]} by {by}" for key in rule.when if key in keys)
    return rule.by(f'the preset "{preset.name}"{why}')


def presets_for(sharding: Sharding) -> list[str]:
    """Names of the shipped presets that decide a parameter."""
    found = [(preset.name, _by_preset(preset, sharding)) for preset in _shipped()]
    return [name for name, spec in found if spec is not None and not spec.is_ambiguous]


def refuse_other_code(
    metadata: CheckpointMetadata, model: ModelLayout, names: Iterable[str], rules: ShardingRules
) -> None:
    """Raise :class:`MismatchError` if the live code base fuses a parameter in another way than the one that saved it.

    Shapes are equal then. Rules and presets of the user's settle it.
    """
    saved = recognized(metadata.run)
    live = recognized(model.run)
    if saved is None or live is None or saved.name == live.name or rules.preset is not None:
        return
    for name in names:
        saved_name = metadata.saved_names.get(name, name)
        is_settled = any(rule.applies(each, metadata.run) for rule in rules.rules for each in (name, saved_name))
        both = (saved.rule(saved_name, metadata.run), live.rule(saved_name, model.run))
        parts = [None if rule is None or rule.is_ambiguous else (rule.sub_parameters,) for rule in both]
        if not is_settled and None not in parts and parts[0] != parts[1]:
            problem = "the live code arranges this parameter in another way than the code that saved it"
            sides = f"{live.name}, by the live {live.evidence}", f"{saved.name}, by the checkpoint's {saved.evidence}"
            same_code = Remedy("use the version of the code that saved it")
            rearranged = Remedy(when="if the weights were rearranged since", config={"tp_preset": live.name})
            raise metadata.error(MismatchError, problem, name, *sides, (same_code, rearranged))


def _by_live_parameter(sharding: Sharding) -> ShardSpec | None:
    live = sharding.live
    if live.dim is None:
        return None
    if live.dim < 0:
        return _spec(sharding, REPLICATED, "the live parameter (not tensor_model_parallel)")
    is_whole_truth = live.owner.startswith(_MEGATRON) and _INTERLEAVED.search(sharding.name) is not None
    if live.stride == 1 and sharding.is_fused and not is_whole_truth:
        return None  # sub-parameters remain unknown
    origin = live.origin or f"the live parameter (partition_dim {live.dim}, partition_stride {live.stride})"
    return _spec(sharding, COLUMN, origin, live.dim, [1] * live.stride if live.stride > 1 else None)


def _by_shapes(sharding: Sharding) -> ShardSpec | None:
    """Equal shards are replicated; else the sharded dimension is the only one that sums to the same on both sides."""
    saved = sharding.shapes
    live = sharding.live.shapes
    if len({*saved, *live}) == 1:
        if len(saved) == 1 and len(saved[0]) > 1 and is_vocabulary(sharding.name):
            return None  # as large on each of several ranks as on one: it may be a padded vocabulary
        if len(set(sharding.live.values)) > 1:
            return None  # a buffer whose values differ between live ranks
        return _spec(sharding, REPLICATED, BY_SHAPES)
    if not live or len({len(shape) for shape in (*saved, *live)}) > 1:
        return None
    fitting = []
    for dim in range(len(live[0])):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in (*saved, *live)}
        if len(rest) == 1 and _total(saved, dim) == _total(live, dim):
            fitting.append(dim)
    return _spec(sharding, COLUMN, BY_SHAPES, fitting[0]) if len(fitting) == 1 else None


def _spec(
    sharding: Sharding, kind: Kind, origin: str, dim: int | None = None, parts: list[int] | None = None
) -> ShardSpec:
    """Of one parameter, not validated: for every parameter, that would dominate planning time."""
    kind = ROW if kind == COLUMN and dim == 1 else kind
    pattern = re.escape(sharding.name)
    return ShardSpec.model_construct(pattern=pattern, kind=kind, dim=dim, sub_parameters=parts, origin=origin)


#: Widening layer -> narrowing layer.
_COUNTERPARTS = (("h_to_4h", "4h_to_h"), ("fc1", "fc2"), ("linear1", "linear2"), ("wi", "wo"))
_QKV = re.compile(r"query_key_value|qkv|W_pack|c_attn", re.IGNORECASE)


class ModelShapes:
    """Relations between the shapes of a model's matrices.

    Within a module, a widening layer has as many rows as the narrowing layer has columns. More rows mean that it is
    fused with a gate, or from query, key and value. Specs made without the model at hand are checked against that.
    """

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self._metadata = metadata
        # (module, rows of a matrix on the first rank) -> histogram of columns, summed over all ranks
        self._columns: dict[tuple[str, int], Counter[int]] = {}
        for (name, key), tensor in metadata.tensors.items():
            shapes = tensor.shard_shapes if key in (MASTER, FROZEN) else ((),)
            if len(shapes[0]) == 2:
                self._columns.setdefault((_module(name), shapes[0][0]), Counter())[_total(shapes, 1)] += 1

    def is_fused(self, name: str, saved_name: str = "") -> bool:
        """Whether a parameter is fused, by its names (unless its counterpart refutes that) or its module's shapes."""
        rows, taken = self._widths(name)
        by_name = is_fused(name) or is_fused(saved_name)
        return (by_name and self._gate_factor(name) != 1) or (rows > taken > 0 and not is_vocabulary(name))

    def proven(self, name: str) -> dict[str, bool]:
        """What shapes prove of a parameter that may be fused: whether with a gate, and from fewer key-value heads."""
        factor = self._gate_factor(name)
        widths = self.qkv_widths(name) if _QKV.search(name) else None
        gated = {"gated": factor == 2} if factor in (1, 2) else {}
        return gated | ({"fewer_kv_heads": widths[0] != widths[1]} if widths else {})

    def qkv_widths(self, name: str) -> list[int] | None:
        """Relative widths of query, key and value, if the layer fuses these; ``None`` if unknown."""
        rows, taken = self._widths(name)
        if not rows > taken > 0 or (rows - taken) % 2:
            return None
        key = (rows - taken) // 2
        common = math.gcd(taken, key)
        return [taken // common, key // common, key // common]

    def widths_of_parts(self, name: str) -> list[int] | None:
        """Relative widths of what is fused in a parameter, if shapes show them; ``None`` if unknown."""
        if _QKV.search(name):
            return self.qkv_widths(name)
        rows, taken = self._widths(name)
        return [1, 1] if rows == 2 * taken > 0 else None

    def objection(self, name: str, spec: ShardSpec) -> str | None:
        """What contradicts a spec, or ``None``. A user's may state what shapes do not show."""
        if spec.is_replicated or spec.is_ambiguous:
            return None
        parts = spec.sub_parameters
        factor = self._gate_factor(name)
        if factor == 2 and parts is None and spec.origin != USER:
            return "it has twice as many rows as its counterpart has columns, so a gate is fused into it"
        if factor == 1 and parts is not None and spec.origin != USER:
            return "it has as many rows as its counterpart has columns, so nothing is fused into it"
        widths = self.qkv_widths(name) if _QKV.search(name) else None
        if isinstance(parts, list) and len(parts) == 3 and widths is not None:
            given = [part // math.gcd(*parts) for part in parts]
            return None if given == widths else f"by the shapes of its module, its parts are as wide as {widths}"
        if parts is None and spec.origin != USER and "query_key_value" in name and self._has_fewer_kv_heads(name):
            return "it does not have three times as many rows as columns, so key-value heads are fewer than query heads"
        return None

    def _gate_factor(self, name: str) -> int | None:
        """Rows of a widening layer divided by columns of its counterpart; ``None`` if unknown."""
        for wide, narrow in _COUNTERPARTS:
            if wide in name:
                counterpart = name.rpartition(".")[0].replace(wide, narrow) + ".weight"
                up = tensor_of(self._metadata, name)
                down = tensor_of(self._metadata, counterpart)
                if up is None or down is None or down is up or any(len(shape) < 2 for shape in down.shard_shapes):
                    continue
                rows = _total(up.shard_shapes, 0)
                columns = _total(down.shard_shapes, 1)
                return rows // columns if columns and rows % columns == 0 else None
        return None

    def _matrix(self, name: str) -> TensorMetadata | None:
        weight = tensor_of(self._metadata, name.rpartition(".")[0] + ".weight")
        return None if weight is None or any(len(shape) != 2 for shape in weight.shard_shapes) else weight

    def _widths(self, name: str) -> tuple[int, int]:
        """Rows of a layer's weight, and columns of the layer that takes its output; 0 if unknown."""
        weight = self._matrix(name)
        if not _module(name) or weight is None:  # layers at the root are unrelated
            return 0, 0
        rows = _total(weight.shard_shapes, 0)
        (first_rows, columns) = weight.shard_shapes[0]
        others = self._columns.get((_module(name), columns), Counter())
        if first_rows == columns and weight.key in (MASTER, FROZEN):
            others = others - Counter([_total(weight.shard_shapes, 1)])  # it is not its own counterpart
        if not others:
            return 0, 0
        return rows, rows if rows in others else max(others)

    def _has_fewer_kv_heads(self, name: str) -> bool:
        run = self._metadata.run
        if any(run.get(key) for key in KV_HEADS):
            return False  # the run states their number, and rules may refer to it
        heads, width, hidden = (run.get(key) for key in ("num_attention_heads", "kv_channels", "hidden_size"))
        if isinstance(heads, int) and isinstance(width, int) and isinstance(hidden, int) and heads * width != hidden:
            return False  # the heads together are not as wide as the hidden state
        weight = self._matrix(name)
        return weight is not None and _total(weight.shard_shapes, 0) != 3 * weight.shard_shapes[0][1]


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]


def _total(shapes: Sequence[Shape], dim: int) -> int:
    return sum(shape[dim] for shape in shapes)
