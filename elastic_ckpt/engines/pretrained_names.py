"""Pretrained weights under the names of a live module, as Transformers' ``from_pretrained`` gives them.

Names are changed by Transformers' own rules (``conversion_mapping.py``), a base model's prefix is added or dropped, and
weights are concatenated, stacked or split by Transformers' own operations, which say where each element is in the files
(:class:`~elastic_ckpt.core.boxed_tensor.BoxedTensor`). Sources: ``convert_and_load_state_dict_in_model``
(core_model_loading.py) and ``_finalize_model_loading`` (modeling_utils.py), Transformers 5.23.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from elastic_ckpt.core.boxed_tensor import BoxedTensor
from elastic_ckpt.core.metadata import FROZEN, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.errors import UnsupportedError, listed

#: Modules of torch that load their entries in a way of their own, which comes to the same, and that of all others.
_KNOWN_LOADERS = ("torch.nn.modules.module", "torch.nn.modules.batchnorm")


@dataclass(frozen=True)
class LiveWeights:
    """The saved weights that a live module has, under its names; and those that only one of both has."""

    metadata: CheckpointMetadata
    missing: frozenset[str]  # entries of the module's state dict
    unexpected: frozenset[str]  # saved weights, under the names that they would have in the module
    mismatched: frozenset[tuple[str, Shape, Shape]] = frozenset()  # left out for their shapes: saved, and live
    rules: tuple[Any, ...] = ()  # those of Transformers that were used, which save_pretrained reverts


def pretrained_model(module: Any) -> bool:
    """Whether a module is one of Transformers, to which its rules apply."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def live_weights(
    metadata: CheckpointMetadata,
    module: Any,
    rules: Sequence[Any] | None = None,
    fqns: Mapping[str, str] = MappingProxyType({}),
) -> LiveWeights:
    """The weights in ``metadata`` that a module has, by FQN. Local.

    ``rules``: instead of those that Transformers has for it; ``fqns``: of what the module calls by another name.
    Raises :class:`UnsupportedError` for a conversion that is no rearrangement of the saved elements.
    """
    entries = module.state_dict(keep_vars=True).items()
    state = {fqns.get(name, name): each for name, each in entries if isinstance(each, torch.Tensor)}
    saved = {name: tensor for (name, _), tensor in metadata.tensors.items()}
    found = {name: saved[name] for name in saved if name in state}
    unexpected = saved.keys() - state.keys()
    used = ()
    if pretrained_model(module):
        found, unexpected, used = _converted(saved, state, module, rules)
    tensors = {(name, FROZEN): replace(tensor, name=name) for name, tensor in found.items()}
    names = {name: tensor.name for name, tensor in found.items()}
    named = replace(metadata, tensors=tensors, saved_names=names)
    return LiveWeights(named, frozenset(state.keys() - found.keys()), frozenset(unexpected), rules=used)


def _converted(
    saved: Mapping[str, TensorMetadata], state: dict[str, Any], module: Any, rules: Sequence[Any] | None
) -> tuple[dict[str, TensorMetadata], set[str], tuple[Any, ...]]:
    """The saved tensors by live name, the names of those that the module lacks, and the rules that were used."""
    try:
        from transformers import conversion_mapping, core_model_loading  # noqa: PLC0415
    except ImportError as error:
        newer = "Transformers 5.23 or later"
        problem = "this version of Transformers does not say how it converts the names of weights"
        raise UnsupportedError(problem, expected=newer, found=str(error), remedy=f"install {newer}") from error

    renaming = core_model_loading.WeightRenaming
    converting = core_model_loading.WeightConverter
    rules = conversion_mapping.get_model_conversion_mapping(module) if rules is None else copy.deepcopy(rules)
    renamings = [rule for rule in rules if isinstance(rule, renaming)]
    converters = [rule for rule in rules if isinstance(rule, converting)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = module.base_model_prefix
    rename = core_model_loading.rename_source_key
    found: dict[str, TensorMetadata] = {}
    conversions: dict[str, Any] = {}
    unexpected: set[str] = set()
    for name in _in_order(saved, core_model_loading.dot_natural_key):
        new, pattern = rename(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, pattern = rename(name, [], [], prefix, state)
        rule = None if pattern is None else of_pattern[pattern]
        if new not in state:
            targets = [new] if rule is None else [new.replace(rule.target_patterns[0], k) for k in rule.target_patterns]
            unexpected.update(targets)
        elif rule is None:
            found.setdefault(new, saved[name])
        else:
            conversion = conversions.setdefault(new, copy.deepcopy(rule))
            conversion.add_tensor(new, name, pattern, BoxedTensor.of(saved[name]))
    for first, conversion in conversions.items():
        for name, tensor in _convert(first, conversion, module).items():
            if name in state:
                found[name] = tensor.metadata(first, FROZEN)
            else:
                unexpected.add(name)
    return found, unexpected, tuple(rule for rule in rules if rule.was_used())


def _in_order(names: Iterable[str], key: Callable[[str], Any]) -> list[str]:
    """The names as Transformers sorts them, by the numbers in them."""
    keys = {}
    for name in names:
        try:
            keys[name] = key(name)
        except ValueError as error:
            problem = "Transformers cannot put the name of this weight in order"
            expected = "numbers of decimal digits"
            remedy = "save the weights again, under the names of the model"
            raise UnsupportedError(problem, None, expected, str(error), parameter=name, remedy=remedy) from error
    return sorted(keys, key=keys.__getitem__)


def _convert(name: str, conversion: Any, module: Any) -> dict[str, BoxedTensor]:
    """What one conversion makes, by live name."""

    def get_parameter(name: str) -> SimpleNamespace:
        param = module.get_parameter(name)  # of which ZeRO-3 leaves an empty one
        return SimpleNamespace(shape=tuple(getattr(param, "ds_shape", param.shape)), dtype=param.dtype)

    sources = [source for targets in conversion.layer_targets.values() for source in targets]
    try:
        made = conversion.convert(name, model=SimpleNamespace(get_parameter=get_parameter), config=module.config)
        made = {target: each[0] if isinstance(each, list) else each for target, each in made.items()}
        if not all(isinstance(each, BoxedTensor) for each in made.values()):
            raise TypeError("a tensor of another kind")
    except Exception as error:
        problem = "Transformers converts these weights by code that does more than rearrange them"
        expected = "weights that are renamed, concatenated, stacked or split"
        operations = ", ".join(type(operation).__name__ for operation in conversion.operations)
        remedy = "load them with from_pretrained, and save them with save_pretrained(..., save_original_format=False)"
        found = f"{operations} of " + listed(sources) + f" ({type(error).__name__}: {error})"
        raise UnsupportedError(problem, None, expected, found, parameter=name, remedy=remedy) from error
    return made


def without_ignored(module: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """The names that ``from_pretrained`` reports, without those that the module's class says are none."""
    if not pretrained_model(module):
        return missing, unexpected
    info = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    module._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def without_other_shapes(weights: LiveWeights, module: Any) -> LiveWeights:
    """The weights without those that have another shape in the module. Local."""
    entries = module.state_dict(keep_vars=True)
    kept = {}
    mismatched = set()
    for (name, key), tensor in weights.metadata.tensors.items():
        live = tuple(getattr(entries[name], "ds_shape", entries[name].shape))
        if tensor.shape == live:
            kept[name, key] = tensor
        else:
            mismatched.add((name, tensor.shape, live))
    metadata = replace(weights.metadata, tensors=kept)
    return replace(weights, metadata=metadata, mismatched=frozenset(mismatched))


def mark_as_initialized(module: Any, weights: LiveWeights) -> None:
    """Keep Transformers from initializing what was loaded, and tell it what saves it as it was."""
    if pretrained_model(module):
        not_loaded = weights.missing | {name for name, *_ in weights.mismatched}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if name not in not_loaded:
                tensor._is_hf_initialized = True
        module._weight_conversions = list(weights.rules)


def own_loaders(model: torch.nn.Module) -> Iterator[str]:
    """What in a model loads its entries in a way of its own. The same on every rank."""
    for name, module in model.named_modules():
        where = name or type(module).__name__
        loader = type(module)._load_from_state_dict
        hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
        if loader.__module__ not in _KNOWN_LOADERS or hooks:
            yield f"{where} loads its entries in a way of its own"
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{where} has extra state"
