"""What is exported of a checkpoint: selected parameters and buffers, their dtypes and names, and optimizer states."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_ckpt.core.metadata import MASTER, WEIGHTS, CheckpointMetadata
from elastic_ckpt.core.values import common
from elastic_ckpt.errors import ConfigError, NotFoundError, listed
from elastic_ckpt.tools.logical import LogicalTensor, plain, refuse_unreadable_states, scalars_of

#: How names of parameters that PEFT adds begin: ``BaseTuner.prefix`` of its methods, version 0.21.
_METHODS = (
    "adamss|beft|boft|c3a|deft|delora|fourierft|frod|glora|gralora|hada|hira|hra|ia3|lily|ln_tuning|lokr|lora|miss|oft|"
    "osf|peanut|poly|psoft|pvera|randlora|road|shadow|shira|supertuning|tinylora|trainable_tokens|unilora|vblora|vera|"
    "waveft"
)
#: What is before an adapter's name; the group is what stays of it in PEFT's files.
_PLACE = rf"(?:\.modules_to_save|((?:^|\.)(?:{_METHODS})_\w+))"


def of_adapter(weights: Mapping[str, LogicalTensor], adapter: str, folder: str) -> dict[str, LogicalTensor]:
    """The tensors of a PEFT adapter, as PEFT names them in its files: without the adapter's name; and trained biases.

    Raises :class:`ConfigError` if there are none, or if other parameters without an adapter's name were trained.
    """
    own, any_adapter = re.compile(rf"{_PLACE}\.{re.escape(adapter)}(?=\.|$)"), re.compile(_PLACE)
    of_peft = {own.sub(r"\1", name): tensor for name, tensor in weights.items() if own.search(name)}
    if not of_peft:
        raise ConfigError(
            "the checkpoint has no tensors of this PEFT adapter",
            file=folder,
            expected=f"names such as ....lora_A.{adapter}.weight",
            remedy='name the adapter as PEFT does: "default", unless get_peft_model was told otherwise',
        )
    trained = {name for name, tensor in weights.items() if tensor.key == MASTER and not any_adapter.search(name)}
    biases = {name for name in trained if name.endswith(".bias")}  # as PEFT saves them with bias="all" or "lora_only"
    if others := trained - biases:
        raise ConfigError(
            "parameters without the name of a PEFT adapter were trained too, and would be missing from its file",
            parameter=listed(others),
            file=folder,
            expected="the adapter's parameters, and biases",
            remedy="export without --adapter, or leave them out with --exclude",
        )
    return of_peft | {name: weights[name] for name in weights if name in biases}


def states_of(
    metadata: CheckpointMetadata, tensors: Iterable[LogicalTensor], names: Collection[str]
) -> dict[str, LogicalTensor]:
    """Optimizer states of the named parameters; state ``exp_avg`` of ``w`` is ``exp_avg.w``.

    Raises :class:`NotFoundError` if the checkpoint holds no optimizer state, and an error that names the state if one
    is damaged or of unknown layout.
    """
    refuse_unreadable_states(metadata)
    if not metadata.keys_by_name:
        raise NotFoundError(
            "the checkpoint holds no optimizer states to export",
            file=metadata.source.folder,
            remedy="leave out --optimizer; it was saved before the first step, or without them",
        )
    states = (tensor for tensor in tensors if tensor.key not in WEIGHTS and tensor.name in names)
    return {f"{tensor.key}.{tensor.name}": tensor for tensor in states}


def optimizer_facts(metadata: CheckpointMetadata, names: Collection[str]) -> dict[str, str]:
    """Metadata of the optimizer states' first file, each JSON.

    ``scalars``: FQN -> scalar states (``{"w": {"step": 3}}``); ``param_groups``: hyperparameters of each param group,
    and under ``params`` the FQNs of its parameters, of those that are exported.
    """
    owned = {name: saved.group for name, saved in metadata.parameters.items() if name in names}
    scalars = {name: found for name in owned if (found := scalars_of(metadata, name))}
    groups = [
        {**_as_json(plain(common(group))), "params": [name for name, of in owned.items() if of == number]}
        for number, group in enumerate(metadata.groups)
    ]
    return {"scalars": json.dumps(_as_json(scalars)), "param_groups": json.dumps(groups)}


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_as_json, value))
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if value is None or isinstance(value, (int, float, str)) else str(value)


def selected(
    metadata: CheckpointMetadata, weights: Mapping[str, LogicalTensor], include: Sequence[str], exclude: Sequence[str]
) -> dict[str, LogicalTensor]:
    """Weights of which a name, or a tied one, matches a pattern of ``include``, if any, and none matches ``exclude``.

    Patterns are regular expressions, searched for anywhere in the name. Raises :class:`ConfigError` for one that is
    invalid or matches nothing, or if nothing is selected.
    """
    names = {name: [name, *(alias for alias, of in metadata.aliases.items() if of == name)] for name in weights}

    def matching(pattern: str) -> set[str]:
        try:
            found = {name for name, known in names.items() if any(map(re.compile(pattern).search, known))}
        except re.error as error:
            raise ConfigError("a pattern is no regular expression", expected=pattern, found=str(error)) from error
        if not found:
            raise ConfigError(
                "a pattern matches no tensor of the checkpoint",
                file=metadata.source.folder,
                expected=pattern,
                found=listed(names),
                remedy="elastic-ckpt inspect --params lists the names",
            )
        return found

    keep = set().union(*map(matching, include)) if include else set(names)
    keep -= set().union(*map(matching, exclude))
    if not keep:
        found = f"{len(names)} tensors, none of which is selected"
        raise ConfigError("there is nothing to export", file=metadata.source.folder, found=found)
    return {name: tensor for name, tensor in weights.items() if name in keep}
