"""The patch of Transformers' ``from_pretrained``: elastic_ckpt's load of its weights under ZeRO-3, where that is equal.

``from_pretrained`` itself stays: it chooses the files, builds the model, initializes what they lack, and ties weights.
Of it, ``_load_pretrained_model`` alone is replaced, which has rank 0 read every weight and scatter it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig, read_config
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.engines.pretrained_names import own_loaders
from elastic_ckpt.errors import (
    ElasticCkptError,
    Remedy,
    UnforeseenError,
    UnsafePickleError,
    UnsupportedError,
    printable_errors,
)
from elastic_ckpt.formats.objects import read_objects
from elastic_ckpt.formats.packed_states import refuse_packed
from elastic_ckpt.formats.pickled import named_errors
from elastic_ckpt.formats.pretrained import check_length, check_names, other_than_weights
from elastic_ckpt.formats.safetensors import SUFFIX, in_two_files
from elastic_ckpt.load.pretrained import PretrainedLoad
from elastic_ckpt.load.pretrained_remedies import with_ways_for_weights
from elastic_ckpt.patches import unwrap, wrap

logger = logger_of(__name__)
_MODELING = "transformers.modeling_utils"
_METHOD = "_load_pretrained_model"
_PARAMETERS = ["model", "state_dict", "checkpoint_files", "load_config"]
#: Times that the tensors of a file may have its bytes, as views of each other.
_MOST_TIMES = 8
#: What Transformers' own way may know how to load.
_LEFT = (UnsupportedError, UnforeseenError)


def watch_pretrained() -> None:
    """Patch Transformers once a ``deepspeed.zero.Init`` is entered, as ``from_pretrained`` does first. Idempotent."""
    wrap(Init, "__enter__", _enter)


def unwatch_pretrained() -> None:
    """Undo :func:`watch_pretrained`, and the patch."""
    unwrap(Init, "__enter__")
    if (modeling := sys.modules.get(_MODELING)) is not None:
        unwrap(modeling.PreTrainedModel, _METHOD)


def _enter(original: Callable[..., Any], init: Any) -> Any:
    model = getattr(sys.modules.get(_MODELING), "PreTrainedModel", None)
    method = getattr(model, _METHOD, None)
    if method is not None and list(inspect.signature(method).parameters)[: len(_PARAMETERS)] == _PARAMETERS:
        wrap(model, _METHOD, _load_pretrained_model)
    return original(init)


def _load_pretrained_model(
    original: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    *more: Any,
    **named: Any,
) -> Any:
    """Load the weights here if that gives what Transformers' own way gives; else go that way. Collective."""
    import transformers.integrations.deepspeed  # noqa: PLC0415
    from transformers.utils.loading_report import LoadStateDictInfo  # noqa: PLC0415

    def own_way() -> Any:
        return original(model, state_dict, checkpoint_files, load_config, *more, **named)

    integration: Any = transformers.integrations.deepspeed
    if named or not integration.is_deepspeed_zero3_enabled():  # as of an adapter, some of whose weights are expected
        return own_way()
    ds_config = integration.deepspeed_config()
    configs = list[ElasticConfig]()
    distributed.begin_load()

    def objection() -> str | None:
        # both are about checkpoints
        configs.append(read_config(ds_config).model_copy(update={"rename": [], "added_rows": []}))
        if configs[0].mode == "off" or configs[0].pretrained == "off":
            return ""
        return next(_objections(model, state_dict, checkpoint_files, load_config, ds_config), None)

    everybody = distributed.all_gather("read the configuration", objection)
    why = next((each for each in everybody if each is not None), None)
    if why == "":
        return own_way()
    index = (load_config.sharded_metadata or {}).get("weight_map", {})
    if why is None:
        folder = _folder_of(checkpoint_files, index)
        rules = load_config.weight_mapping
        load = PretrainedLoad(None, model, folder, configs[0], paths=checkpoint_files, index=index, rules=rules)
        load.ignores_shapes = load_config.ignore_mismatched_sizes
        try:
            _, weights = load.run()
        except _LEFT as error:
            why = error.problem
        except UnsafePickleError as error:
            raise _with_ways(error) from error.__cause__
        else:
            mismatched: set[Any] = {*weights.mismatched}
            return LoadStateDictInfo({*weights.missing}, {*weights.unexpected}, mismatched, [], {}, set()), None
    if distributed.rank() == 0:
        logger.warning("elastic_ckpt leaves these weights to Transformers: %s", why)
    try:
        with printable_errors():
            with distributed.agree("look at the index"):
                check_names(_folder_of(checkpoint_files or [""], index), index)
            # quantized weights, which every rank reads whole, are neither partitioned nor compared
            if state_dict is None and not load_config.is_quantized:
                state_dict = _read_for_transformers(checkpoint_files or (), configs[0].trust_pickle)
    except ElasticCkptError as error:
        raise _with_ways(with_ways_for_weights(error)) from error.__cause__
    info, offload_index = own_way()
    # of what rank 0 alone copies
    everybodys = distributed.all_gather("load the weights by Transformers", lambda: info.error_msgs)
    info.error_msgs = list(dict.fromkeys(chain.from_iterable(everybodys)))
    return info, offload_index


def _with_ways(error: ElasticCkptError) -> ElasticCkptError:
    """The same error; of a file that may run code, with the ways of ``from_pretrained``."""
    if isinstance(error, UnsafePickleError) and str(error.file).endswith(SUFFIX):
        error.remedies = (*error.remedies, Remedy("save the weights without the module's extra state"))
    elif isinstance(error, UnsafePickleError):
        trusted = "if you trust whoever wrote the file"
        both = {"weights_only": False}
        error.remedies = (
            Remedy("save only the weights, as safetensors"),
            Remedy(when=trusted, config={"pretrained": "off"}, arguments=both, function="from_pretrained"),
        )
    return error


def _read_for_transformers(files: Sequence[str], trust_pickle: bool) -> dict[Any, Any] | None:
    """What Transformers would read of these files: on rank 0, tensors without values on others.

    Pickles are read by this package's reader. Read by Transformers, what fails on one rank leaves the others waiting.
    ``None`` for files of another kind. Collective.
    """
    suffixes = (SUFFIX,) if trust_pickle else (SUFFIX, ".bin")
    if not files or not all(file.endswith(suffixes) for file in files):
        return None
    made: dict[Any, Any] = {}
    owner: dict[Any, str] = {}

    def make() -> dict[Any, tuple[tuple[int, ...], torch.dtype] | None]:
        for file in files:
            content = _content(file, trust_pickle)
            check_length(file, content)
            for name in content:
                if owner.setdefault(name, file) != file:
                    raise in_two_files(name, file, owner[name])
            made.update(content)
        return {
            name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
            for name, value in made.items()
        }

    outlines = distributed.broadcast("read weights for Transformers", make)
    if distributed.rank() == 0:
        return made
    return {
        name: None if outline is None else torch.empty(outline[0], dtype=outline[1], device="meta")
        for name, outline in outlines.items()
    }


def _content(file: str, trust_pickle: bool) -> Mapping[Any, Any]:
    """The weights of a file by name, none of which a module may unpickle unless that is trusted. Local."""
    if file.endswith(SUFFIX):
        from transformers.modeling_utils import load_state_dict  # noqa: PLC0415

        with named_errors(file, "a safetensors file of dtypes that torch has"):
            weights = load_state_dict(file)
        if not trust_pickle:
            refuse_packed(file, weights)
        return weights
    content = read_objects(file)
    if not isinstance(content, Mapping):
        raise other_than_weights(file, type(content).__name__)
    nbytes = 0
    storages: dict[int, int] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            raise other_than_weights(file, f"a name of type {type(name).__name__}")
        if not isinstance(value, torch.Tensor):
            continue
        # on rank 0 alone, others are copied in other ways than the tensors without values
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_nested:
            kinds = ", quantized" * value.is_quantized + ", nested" * value.is_nested
            found = f"layout {value.layout} on {value.device}{kinds}"
            raise other_than_weights(file, f"a tensor of {found} under {name[:100]!r}")
        storage = value.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        nbytes += value.nbytes
    if nbytes > _MOST_TIMES * sum(storages.values()):  # which copies have
        raise other_than_weights(file, f"tensors of {nbytes} bytes, which share {sum(storages.values())}")
    return content


def _folder_of(files: Sequence[str], index: Mapping[str, str]) -> str:
    """Where the first of the files is, or the index that names it, which may lead out of its folder."""
    first = min(index.values(), default=os.path.basename(files[0]))
    return os.path.dirname(files[0].removesuffix(first)) or os.path.dirname(files[0])


def _objections(
    model: Any, state_dict: Any, files: Sequence[str] | None, load_config: Any, ds_config: Any
) -> Iterator[str]:
    """Why these weights are not known to be loaded here as Transformers loads them. The same on every rank."""
    if load_config.is_quantized:
        yield "they are quantized"
    if state_dict is not None or not files or not all(file.endswith((".safetensors", ".bin")) for file in files):
        yield "they are not in files of safetensors or torch.save"
    if load_config.device_map is not None:
        yield "a device_map is given"
    if ds_config.get("tensor_parallel", {}).get("autotp_size", 1) > 1:
        yield "AutoTP is on"
    yield from own_loaders(model)
