"""Jobs that load pretrained weights into live engines and modules, and compare them with what ``from_pretrained`` makes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import accelerate
import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.initialization import no_init_weights

import elastic_ckpt
from elastic_ckpt.load import pretrained_hook
from elastic_ckpt.load.pretrained import PretrainedLoad
from tests.distributed import truth as oracle
from tests.distributed.bucket_jobs import shared_bucket
from tests.distributed.facts import Refused, attempt, log_lines
from tests.distributed.jobs import SPOILS, spoiled
from tests.distributed.kept import close_kept, engine_of
from tests.distributed.model import PRECISIONS, Setup, build_engine, close
from tests.hostile_text import controls_in

#: Where weights are loaded into: an engine, or a module that gets its engine afterwards: under ``deepspeed.zero.Init``,
#: or on the meta device.
ENGINE, MODULE, META = "engine", "module", "meta"
#: What a job is told. All have ``folder``, with the weights, ``model``, a class, and the engine's ``setup``.
Case = dict[str, Any]


@dataclass(frozen=True)
class Hooked:
    """A ``from_pretrained`` with elastic_ckpt installed, and what differs from one without.

    Attributes:
        loads: folders that elastic_ckpt loaded.
        differences: by kind and name.
        said: what it logged, from warnings up.
        expected_keys: what Transformers' own way was given under that name, each time that it was taken.
        given: whether that was given a state dict.
    """

    loads: list[str]
    differences: dict[str, str]
    said: list[str]
    expected_keys: list[Any]
    given: list[bool]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor of floating-point values in memory that torch makes."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.is_floating_point() and not made.is_meta:
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


class OwnLoader(transformers.LlamaForCausalLM):
    """A model that loads its entries in a way of its own."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def class_of(case: Case) -> Any:
    """The class of a case's ``model``: of this module or of Transformers."""
    return globals().get(case["model"]) or getattr(transformers, case["model"])


def build(case: Case, seed: int = 11) -> torch.nn.Module:
    """The model with other weights."""
    torch.manual_seed(seed)
    return class_of(case)(config_of(case))


def config_of(case: Case) -> transformers.PreTrainedConfig:
    """Of the model. ``config``: its folder in ``folder``, if not that itself."""
    return class_of(case).config_class.from_pretrained(os.path.join(case["folder"], case.get("config", "")))


def given(case: Case) -> str:
    """What this rank is given to load: ``folder``, or ``url``; all but the first one ``elsewhere`` in it, if there is."""
    if "elsewhere" in case and dist.get_rank():
        return os.path.join(case["folder"], case["elsewhere"])
    return case.get("url", case["folder"])


@contextmanager
def zero3(case: Case) -> Iterator[None]:
    """What Transformers builds models under while this config is alive."""
    config = {
        "train_batch_size": dist.get_world_size(),
        "zero_optimization": {"stage": 3},
        **dict(case["setup"].config),
    }
    precision = PRECISIONS[case["setup"].precision]
    ds_config = transformers.integrations.HfDeepSpeedConfig(config | precision)
    yield
    del ds_config


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights and buffers, each of the dtype that it has. Collective."""
    found = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for name, param in module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            found[name] = param.data.clone()
    return found


def expected(case: Case) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model that ``from_pretrained`` makes without DeepSpeed, and what it says of it."""
    return class_of(case).from_pretrained(case["folder"], output_loading_info=True)


def load(case: Case) -> list[dict[str, str]]:
    """Load, and compare weights, buffers and masters, and the keys that are reported.

    ``into``: :data:`ENGINE`, :data:`MODULE` or :data:`META`; ``arguments``: more of a load into the first of them.
    """
    close_kept()
    model, info = expected(case)
    setup, into = replace(case["setup"], groups="one"), case["into"]
    if into != ENGINE:
        config = {"train_batch_size": dist.get_world_size(), "zero_optimization": {"stage": 3}}
        config |= PRECISIONS[setup.precision] | dict(setup.config)
        live, before = _built(case, config, into)
        with Largest() as made:
            report = elastic_ckpt.load_pretrained(live, given(case), ds_config=config if into == META else None)
        most = max(param.ds_tensor.nbytes for param in live.parameters())
        whole_made = {"largest tensor": str(made.nbytes)} if made.nbytes > most else {}
        after = whole(live)
        engine = build_engine(setup, live)
    else:
        engine = build_engine(setup, build(case))
        before = whole(engine.module)
        report = elastic_ckpt.load_pretrained(engine, given(case), **case.get("arguments", {}))
        after = whole(engine.module)
    found = oracle.gather(engine, [])
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # what the folder lacks keeps the values that it had
    weights |= {name: before[name] for name in info["missing_keys"] if name in weights}
    weights = {name: weight.detach() for name, weight in weights.items()}
    lower = {name: weights[name].to(live.dtype) for name, live in found["weights"].items()}
    masters = {name: lower[name].float() for name in found["masters"]}
    buffers = {name: weights[name].to(live.dtype) for name, live in found["buffers"].items()}
    truth = {"weights": lower, "masters": masters, "buffers": buffers, "states": {}}
    wrong = oracle.compare(found, spoiled(truth) if SPOILS else truth)
    wrong |= oracle.compare({"weights": after}, {"weights": lower | buffers})
    if into == META:
        marks = {param.own_name for param in live.parameters()}
        wrong |= whole_made | ({} if marks == {name for name, _ in live.named_parameters()} else {"marks": str(marks)})
    for kind, keys in (("missing", report.missing_keys), ("unexpected", report.unexpected_keys)):
        if set(keys) != set(info[f"{kind}_keys"]):
            wrong[kind] = f"{keys} instead of {info[f'{kind}_keys']}"
    close(engine)
    return [wrong]


def load_from_bucket(case: Case) -> list[dict[str, str]]:
    """:func:`load` from an object store, of which all ranks but the first spell the address in another way."""
    with shared_bucket(case) as shared:
        address = shared.url + "/" * (dist.get_rank() > 0)
        return load({**case, "setup": reading_from(case["setup"], shared.options), "url": address})


def refused_from_bucket(case: Case) -> list[Refused]:
    """:func:`refused`, of an address in an object store where nothing is."""
    with shared_bucket(case) as shared:
        return refused({**case, "setup": reading_from(case["setup"], shared.options)})


def reading_from(setup: Setup, options: dict[str, Any]) -> Setup:
    """An engine that may read an object store."""
    return replace(setup, config=(("elastic_checkpoint", {"storage_options": options}),))


def _built(case: Case, config: dict[str, Any], into: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A module without engine, and its whole weights, if any."""
    if into == META:
        with accelerate.init_empty_weights():
            live = build(case)
        live.tie_weights()
        for name, param in live.named_parameters():
            param.own_name = name  # as whoever builds a module marks parameters
        return live, {}
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=config):
        live = build(case)
    live.tie_weights()
    for param in live.parameters():
        param.ds_tensor.normal_()
    before = whole(live)
    [*live.parameters()][-1].all_gather()  # one that is whole by now
    return live, before


def hooked(case: Case) -> list[Hooked]:
    """``from_pretrained`` under ZeRO-3: with elastic_ckpt installed, and as Transformers does it."""
    close_kept()
    (_, other_info), others = _from_pretrained(case)
    keys: list[Any] = []
    dicts: list[bool] = []
    own = transformers.PreTrainedModel._load_pretrained_model
    with pytest.MonkeyPatch.context() as patch, noting_loads() as (loads, said):
        patch.setattr(transformers.PreTrainedModel, own.__name__, staticmethod(_noting(own, keys, dicts)))
        (_, info), weights = _from_pretrained(case)
    wrong = weights_apart(weights, others)
    wrong |= {} if info["missing_keys"] == other_info["missing_keys"] else {"missing": str(info["missing_keys"])}
    return [Hooked(loads, wrong, said, keys, dicts)]


def weights_apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, str]:
    """Weights that are not as they are without elastic_ckpt."""
    if SPOILS:
        expected = spoiled({"masters": expected, "states": {}})["masters"]
    return oracle.compare({"weights": found}, {"weights": expected})


def _noting(own: Any, keys: list[Any], dicts: list[bool]) -> Any:
    @wraps(own)
    def load(*given: Any, **named: Any) -> Any:
        keys.append(named.get("expected_keys"))
        dicts.append(given[1] is not None)
        return own(*given, **named)

    return load


@contextmanager
def noting_loads() -> Iterator[tuple[list[str], list[str]]]:
    """With elastic_ckpt installed: the folders of pretrained weights that it loads, and what it logs."""
    loads: list[str] = []

    class Noted(PretrainedLoad):
        def run(self) -> Any:
            done = super().run()
            loads.append(self.folder)
            return done

    with pytest.MonkeyPatch.context() as patch, log_lines() as said:
        patch.setattr(pretrained_hook, "PretrainedLoad", Noted)
        elastic_ckpt.install()
        yield loads, said
        elastic_ckpt.uninstall()


def _from_pretrained(case: Case) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model, what is said of it, and its whole weights and buffers, each of the dtype that it has."""
    torch.manual_seed(3)
    with zero3(case):
        arguments = {"config": config_of(case)} if "config" in case else {}
        arguments |= case.get("arguments", {})
        made = class_of(case).from_pretrained(given(case), output_loading_info=True, **arguments)
    return made, whole(made[0])


def refused_by_hook(case: Case) -> list[Refused]:
    """Try ``from_pretrained`` under ZeRO-3 with elastic_ckpt installed; the error."""
    close_kept()
    kinds, texts, remedies = (), "loaded without an error", ()
    try:
        with noting_loads():
            _from_pretrained(case)
    except elastic_ckpt.ElasticCkptError as error:
        kinds, texts, remedies = tuple(each.__name__ for each in type(error).__mro__), str(error), error.remedies
    return [Refused(case, kinds, frozenset([texts]), frozenset(), (), remedies)]


def controls_of_hook(case: Case) -> list[list[str]]:
    """The same; what a terminal must not get of the traceback of the error."""
    close_kept()
    try:
        with noting_loads():
            _from_pretrained(case)
    except elastic_ckpt.ElasticCkptError as error:
        lines = traceback.format_exception(error)
        return [controls_in("".join(lines), "\n") if any("SafetensorError" in line for line in lines) else lines]
    return [["loaded without an error"]]


def errors_of_transformers(case: Case) -> list[str]:
    """What ``from_pretrained`` raises with elastic_ckpt installed, of any kind."""
    close_kept()
    try:
        with noting_loads():
            _from_pretrained(case)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return ["loaded without an error"]


def follow_hook(case: Case) -> list[tuple[Refused, dict[str, str], frozenset[str]]]:
    """The same; then with the arguments that the error names: what differs from a model without ZeRO; what is new."""
    (tried,) = refused_by_hook(case)
    (remedy,) = (each for each in tried.remedies if each.arguments)
    assert remedy.function == "from_pretrained"
    model, info = class_of(case).from_pretrained(
        given(case), config=config_of(case), output_loading_info=True, **remedy.arguments
    )
    with noting_loads() as (loads, _):
        (_, found_info), found = _from_pretrained({**case, "arguments": remedy.arguments})
    assert loads
    new = {name for name, *_ in info["mismatched_keys"]}
    wrong = {} if found_info["mismatched_keys"] == info["mismatched_keys"] else {"": str(found_info)}
    wrong |= {name: "not finite" for name in new if not found[name].isfinite().all()}
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: each.detach().to(found[name].dtype) for name, each in expected.items() if name not in new}
    wrong |= weights_apart({name: found[name] for name in kept}, kept)
    return [(tried, wrong, frozenset(new))]


def refused(case: Case) -> list[Refused]:
    """Try a strict load into an engine of ZeRO-3; the error, and what is changed."""
    elastic_ckpt.install()
    kind = (case["model"], case["setup"], config_of(case).to_diff_dict())
    engine = engine_of(kind, lambda: build_engine(replace(case["setup"], groups="one"), build(case)), close)
    return [attempt(case, engine, partial(elastic_ckpt.load_pretrained, engine, given(case), strict=True))]


def refused_by_module(case: Case) -> list[Refused]:
    """The same of a module without an engine, whole on every rank."""
    elastic_ckpt.install()
    module = build(case)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    kinds, texts, remedies = (), "loaded without an error", ()
    try:
        elastic_ckpt.load_pretrained(module, given(case))
    except elastic_ckpt.ElasticCkptError as error:
        kinds, texts, remedies = tuple(each.__name__ for each in type(error).__mro__), str(error), error.remedies
    changed = frozenset(name for name, each in module.state_dict().items() if not torch.equal(each, before[name]))
    return [Refused(case, kinds, frozenset([texts]), changed, (), remedies)]


def follow(case: Case) -> list[dict[str, str]]:
    """The same; then :func:`load` with the arguments that the error names."""
    (tried,) = refused(case)
    (remedy,) = tried.remedies
    assert remedy.function == "load_pretrained"
    return load({**case, "into": ENGINE, "arguments": {"strict": True, **remedy.arguments}})


def lacking(case: Case) -> list[tuple[str, bool]]:
    """The error of a module on the meta device that has more parameters than the folder; is it all there still?"""
    close_kept()
    elastic_ckpt.install()
    config = {"train_batch_size": dist.get_world_size(), "zero_optimization": {"stage": 3}}
    with accelerate.init_empty_weights():
        live = build(case)
    said = "loaded without an error"
    try:
        elastic_ckpt.load_pretrained(live, case["folder"], ds_config=config)
    except elastic_ckpt.ElasticCkptError as error:
        said = f"{type(error).__name__}: {error}"
    return [(said, all(param.is_meta and not hasattr(param, "ds_id") for param in live.parameters()))]
