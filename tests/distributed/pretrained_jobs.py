"""Jobs that load pretrained weights into live engines and modules, and compare them with what ``from_pretrained`` makes."""

from __future__ import annotations

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
from tests.distributed.facts import Refused, attempt, log_lines
from tests.distributed.model import PRECISIONS, Setup, build_engine, close

#: Where weights are loaded into: an engine, or a module that gets its engine afterwards: under ``deepspeed.zero.Init``,
#: or on the meta device.
ENGINE, MODULE, META = "engine", "module", "meta"


@dataclass(frozen=True)
class Case:
    """One load.

    Attributes:
        folder: of the weights.
        model: class of Transformers.
        setup: of the engine.
        into: :data:`ENGINE`, :data:`MODULE` or :data:`META`.
        config: folder of the model's configuration, if not of the weights.
        strict: as of ``load_pretrained``.
        elsewhere: the folder that ranks but the first are given, if another one.
        url: of the same folder, if it is loaded from there.
    """

    folder: str
    model: str
    setup: Setup
    into: str = ENGINE
    config: str = ""
    strict: bool = False
    elsewhere: str = ""
    url: str = ""

    @property
    def given(self) -> str:
        """The folder that this rank is given."""
        return self.elsewhere if self.elsewhere and dist.get_rank() else self.url or self.folder


@dataclass(frozen=True)
class Pretrained:
    """What one load found: its case, the report, and what differs from the model that ``from_pretrained`` makes."""

    case: Case
    report: Any
    differences: dict[str, str]


@dataclass(frozen=True)
class Hooked:
    """A ``from_pretrained`` with elastic_ckpt installed, and what differs from one without.

    Attributes:
        case: what was loaded.
        loads: folders that elastic_ckpt loaded.
        differences: by kind and name.
        said: what it logged, from warnings up.
        expected_keys: what Transformers' own way was given under that name, each time that it was taken.
    """

    case: Case
    loads: list[str]
    differences: dict[str, str]
    said: list[str]
    expected_keys: list[Any]


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
    """The class of a case's model: of this module or of Transformers."""
    return globals().get(case.model) or getattr(transformers, case.model)


def build(case: Case, seed: int = 11) -> torch.nn.Module:
    """The model with other weights."""
    torch.manual_seed(seed)
    kind = class_of(case)
    return kind(kind.config_class.from_pretrained(case.config or case.folder))


@contextmanager
def zero3(case: Case) -> Iterator[None]:
    """What Transformers builds models under while this config is alive."""
    config = {"train_batch_size": dist.get_world_size(), "zero_optimization": {"stage": 3}, **dict(case.setup.config)}
    ds_config = transformers.integrations.HfDeepSpeedConfig(config | PRECISIONS[case.setup.precision])
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
    return class_of(case).from_pretrained(case.folder, output_loading_info=True)


def load(cases: list[Case]) -> list[Pretrained]:
    """Load each case, and compare weights, buffers and masters; and the keys that are reported."""
    return [_load(case) for case in cases]


def _load(case: Case) -> Pretrained:
    model, info = expected(case)
    setup = replace(case.setup, groups="one")
    if case.into != ENGINE:
        config = {"train_batch_size": dist.get_world_size(), "zero_optimization": {"stage": 3}}
        config |= PRECISIONS[setup.precision] | dict(setup.config)
        live, before = _built(case, config)
        with Largest() as made:
            report = elastic_ckpt.load_pretrained(live, case.given, ds_config=config if case.into == META else None)
        most = max(param.ds_tensor.nbytes for param in live.parameters())
        whole_made = {"largest tensor": str(made.nbytes)} if made.nbytes > most else {}
        after = whole(live)
        engine = build_engine(setup, live)
    else:
        engine = build_engine(setup, build(case))
        before = whole(engine.module)
        report = elastic_ckpt.load_pretrained(engine, case.given)
        after = whole(engine.module)
    found = oracle.gather(engine, [])
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # what the folder lacks keeps the values that it had
    weights |= {name: before[name] for name in info["missing_keys"] if name in weights}
    weights = {name: weight.detach() for name, weight in weights.items()}
    lower = {name: weights[name].to(live.dtype) for name, live in found["weights"].items()}
    masters = {name: lower[name].float() for name in found["masters"]}
    buffers = {name: weights[name].to(live.dtype) for name, live in found["buffers"].items()}
    truth = {"weights": lower, "masters": masters, "buffers": buffers}
    wrong = oracle.compare(found, truth)
    wrong |= oracle.compare({"weights": after}, {"weights": lower | buffers})
    if case.into == META:
        marks = {param.own_name for param in live.parameters()}
        wrong |= whole_made | ({} if marks == {name for name, _ in live.named_parameters()} else {"marks": str(marks)})
    for kind, keys in (("missing", report.missing_keys), ("unexpected", report.unexpected_keys)):
        if set(keys) != set(info[f"{kind}_keys"]):
            wrong[kind] = f"{keys} instead of {info[f'{kind}_keys']}"
    close(engine)
    return Pretrained(case, report, wrong)


def _built(case: Case, config: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A module without engine, and its whole weights, if any."""
    if case.into == META:
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


def hooked(cases: list[Case]) -> list[Hooked]:
    """``from_pretrained`` under ZeRO-3 for each case: with elastic_ckpt installed, and as Transformers does it."""
    found = []
    for case in cases:
        (_, other_info), others = _from_pretrained(case)
        loads: list[str] = []
        keys: list[Any] = []
        with pytest.MonkeyPatch.context() as patch, log_lines() as said:
            patch.setattr(pretrained_hook, "PretrainedLoad", noted(loads))
            own = transformers.PreTrainedModel._load_pretrained_model
            patch.setattr(transformers.PreTrainedModel, own.__name__, staticmethod(_noting(own, keys)))
            elastic_ckpt.install()
            (_, info), weights = _from_pretrained(case)
            elastic_ckpt.uninstall()
        wrong = oracle.compare({"weights": weights}, {"weights": others})
        wrong |= {} if info["missing_keys"] == other_info["missing_keys"] else {"missing": str(info["missing_keys"])}
        found.append(Hooked(case, loads, wrong, list(said), keys))
    return found


def _noting(own: Any, keys: list[Any]) -> Any:
    @wraps(own)
    def load(*given: Any, **named: Any) -> Any:
        keys.append(named.get("expected_keys"))
        return own(*given, **named)

    return load


def noted(loads: list[str]) -> type:
    class Noted(PretrainedLoad):
        def run(self) -> Any:
            done = super().run()
            loads.append(self.folder)
            return done

    return Noted


def _from_pretrained(case: Case) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model, what is said of it, and its whole weights and buffers, each of the dtype that it has."""
    torch.manual_seed(3)
    with zero3(case):
        made = class_of(case).from_pretrained(case.given, output_loading_info=True)
    return made, whole(made[0])


def refused(cases: list[Case]) -> list[Refused]:
    """Try each load into an engine of ZeRO-3; the errors, and what is changed."""
    found = []
    elastic_ckpt.install()
    for case in cases:
        engine = build_engine(replace(case.setup, groups="one"), build(case))
        found.append(
            attempt(case, engine, partial(elastic_ckpt.load_pretrained, engine, case.given, strict=case.strict))
        )
        close(engine)
    return found


def lacking(case: Case) -> list[tuple[str, bool]]:
    """The error of a module on the meta device that has more parameters than the folder; is it all there still?"""
    elastic_ckpt.install()
    config = {"train_batch_size": dist.get_world_size(), "zero_optimization": {"stage": 3}}
    with accelerate.init_empty_weights():
        live = build(case)
    said = "loaded without an error"
    try:
        elastic_ckpt.load_pretrained(live, case.folder, ds_config=config)
    except elastic_ckpt.ElasticCkptError as error:
        said = f"{type(error).__name__}: {error}"
    return [(said, all(param.is_meta and not hasattr(param, "ds_id") for param in live.parameters()))]
