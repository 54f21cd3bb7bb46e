"""What is exported of a checkpoint: selected parameters and buffers, their dtypes and names, and optimizer states."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from elastic_ckpt.core.metadata import BUFFER, MASTER, WEIGHTS, CheckpointMetadata, is_floating
from elastic_ckpt.core.values import common
from elastic_ckpt.errors import ConfigError, NotFoundError, listed
from elastic_ckpt.tools.export.shards import Exported
from elastic_ckpt.tools.logical import Whole, plain, refuse_unreadable_states, scalars_of

Dtype = Literal["fp32", "bf16", "fp16"]
_TORCH_NAMES: Mapping[str, str] = MappingProxyType({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})

#: How names of parameters that PEFT adds begin: ``BaseTuner.prefix`` of its methods, version 0.21.
_METHODS = (
    "adamss|beft|boft|c3a|deft|delora|fourierft|frod|glora|gralora|hada|hira|hra|ia3|lily|ln_tuning|lokr|lora|miss|oft|"
    "osf|peanut|poly|psoft|pvera|randlora|road|shadow|shira|supertuning|tinylora|trainable_tokens|unilora|vblora|vera|"
    "waveft"
)
#: What is before an adapter's name; the group is what stays of it in PEFT's files.
_PLACE = rf"(?:\.modules_to_save|((?:^|\.)(?:{_METHODS})_\w+))"


def checked_dtype(dtype: str | None) -> str | None:
    """The torch dtype that ``fp32``, ``bf16`` or ``fp16`` stands for. Raises :class:`ConfigError` for another."""
    if dtype is not None and dtype not in _TORCH_NAMES:
        raise ConfigError("an export cannot have this dtype", expected=listed(_TORCH_NAMES), found=repr(dtype))
    return None if dtype is None else _TORCH_NAMES[dtype]


def to_export(wholes: Iterable[Whole], dtype: str | None, kept: Collection[str] = (BUFFER,)) -> list[Exported]:
    """Tensors with the dtype that they are written in: integers and those with the keys ``kept`` as they are."""
    found = []
    for whole in wholes:
        converts = dtype is not None and whole.key not in kept and is_floating(whole.dtype)
        found.append(Exported(whole, replace(whole, dtype=dtype if converts and dtype else whole.dtype)))
    return found


def of_adapter(weights: Iterable[Exported], adapter: str, folder: str) -> list[Exported]:
    """The tensors of a PEFT adapter, as PEFT names them in its files: without the adapter's name; and trained biases.

    Raises :class:`ConfigError` if there are none, or if other parameters without an adapter's name were trained.
    """
    own, any_adapter = re.compile(rf"{_PLACE}\.{re.escape(adapter)}(?=\.|$)"), re.compile(_PLACE)
    found, others, is_there = [], [], False
    for tensor in weights:
        name = own.sub(r"\1", tensor.entry.name)
        is_own = name != tensor.entry.name
        is_there |= is_own
        is_trained = tensor.whole.key == MASTER and not any_adapter.search(name)
        if is_own or (is_trained and name.endswith(".bias")):  # as PEFT saves them with bias="all" or "lora_only"
            found.append(Exported(tensor.whole, replace(tensor.entry, name=name)))
        elif is_trained:
            others.append(name)
    if is_there and others:
        raise ConfigError(
            "parameters without the name of a PEFT adapter were trained too, and would be missing from its file",
            parameter=listed(others),
            file=folder,
            expected="the adapter's parameters, and biases",
            found=f"{len(others)} others",
            remedy="export without --adapter, or leave them out with --exclude",
        )
    if not is_there:
        raise ConfigError(
            "the checkpoint has no tensors of this PEFT adapter",
            file=folder,
            expected=f"names such as ....lora_A.{adapter}.weight",
            found="none",
            remedy='name the adapter as PEFT does: "default", unless get_peft_model was told otherwise',
        )
    return found


def states_of(metadata: CheckpointMetadata, wholes: Iterable[Whole], names: Collection[str]) -> list[Exported]:
    """Optimizer states of the named parameters, as they were saved; state ``exp_avg`` of ``w`` is ``exp_avg.w``.

    8-bit states are dequantized to fp32. Raises :class:`NotFoundError` if the checkpoint holds no optimizer state, and
    an error that names the state if one is damaged or of unknown layout.
    """
    refuse_unreadable_states(metadata)
    if not metadata.keys_by_name:
        raise NotFoundError(
            "the checkpoint holds no optimizer states to export",
            file=metadata.source.folder,
            remedy="leave out --optimizer; it was saved before the first step, or without them",
        )
    states = (whole for whole in wholes if whole.key not in WEIGHTS and whole.name in names)
    return [Exported(whole, replace(whole, name=f"{whole.key}.{whole.name}")) for whole in states]


def optimizer_facts(metadata: CheckpointMetadata, names: Collection[str]) -> dict[str, str]:
    """Metadata of the optimizer states' first file, each JSON.

    ``scalars``: FQN -> scalar states (``{"w": {"step": 3}}``); ``param_groups``: hyperparameters of each param group,
    and under ``params`` the FQNs of its parameters, of those that are exported.
    """
    owned = {name: saved.group for name, saved in metadata.parameters.items() if name in names}
    scalars = {name: found for name in owned if (found := scalars_of(metadata, name))}
    groups = [
        {**_with_text_keys(plain(common(group))), "params": [name for name, of in owned.items() if of == number]}
        for number, group in enumerate(metadata.groups)
    ]
    return {"scalars": json.dumps(scalars, default=_plain), "param_groups": json.dumps(groups, default=_plain)}


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(each) for key, each in value.items()}
    return list(map(_with_text_keys, value)) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else str(value)


def selected(
    metadata: CheckpointMetadata, wholes: Iterable[Whole], include: Sequence[str], exclude: Sequence[str]
) -> list[Whole]:
    """Weights of which a name, or a tied one, matches a pattern of ``include``, if any, and none matches ``exclude``.

    Patterns are regular expressions, searched for anywhere in the name. Raises :class:`ConfigError` for one that is
    invalid or matches nothing, or if nothing is selected.
    """
    names: dict[Whole, list[str]] = {whole: [whole.name] for whole in wholes if whole.key in WEIGHTS}
    by_name = {whole.name: whole for whole in names}
    for alias, name in metadata.aliases.items():
        if name in by_name:
            names[by_name[name]].append(alias)
    keep, drop = (
        [_matching(pattern, names, metadata.source.folder) for pattern in patterns] for patterns in (include, exclude)
    )
    kept = [whole for whole in names if not keep or any(whole in match for match in keep)]
    kept = [whole for whole in kept if not any(whole in match for match in drop)]
    if not kept:
        found = f"{len(names)} tensors, none of which is selected" if names else "none"
        raise ConfigError("there is nothing to export", file=metadata.source.folder, expected="tensors", found=found)
    return kept


def _matching(pattern: str, names: Mapping[Whole, Sequence[str]], folder: str) -> set[Whole]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError("a pattern is no regular expression", expected=pattern, found=str(error)) from error
    found = {whole for whole, known in names.items() if any(map(expression.search, known))}
    if not found:
        raise ConfigError(
            "a pattern matches no tensor of the checkpoint",
            file=folder,
            expected=pattern,
            found=listed(whole.name for whole in names),
            remedy="elastic-ckpt inspect --params lists the names",
        )
    return found
