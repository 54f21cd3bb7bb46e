"""How arguments of ``load_checkpoint`` that a remedy names are given where a framework makes the call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType

from elastic_ckpt.errors import Remedy

#: Packages whose functions stand between the caller of ``load_checkpoint`` and this module.
_BETWEEN = ("elastic_ckpt", "deepspeed", "contextlib", "functools")


@dataclass(frozen=True)
class Framework:
    """A framework that calls ``load_checkpoint`` with arguments of its own.

    Attributes:
        name: as its users know it.
        packages: whose modules make the call.
        otherwise: how a user calls ``load_checkpoint`` instead of it.
        ways: what a user writes instead of an argument.
    """

    name: str
    packages: tuple[str, ...]
    otherwise: str
    ways: Mapping[str, str] = field(default_factory=dict)


_FRAMEWORKS = (
    Framework(
        "Lightning Fabric",
        ("lightning.fabric", "lightning_fabric"),
        'call fabric.strategy.model.load_checkpoint(path, tag="checkpoint", ...) in place of fabric.load',
        {
            "load_module_strict=False": "fabric.load(path, state, strict=False)",
            "load_optimizer_states=False": "fabric.load(path, state) with a state that lacks the optimizer",
        },
    ),
    Framework(
        "Lightning's Trainer",
        ("lightning.pytorch", "pytorch_lightning"),
        "call trainer.strategy.deepspeed_engine.load_checkpoint(path, ...) in on_train_start in place of ckpt_path",
        {"load_module_strict=False": "strict_loading = False in the LightningModule"},
    ),
    Framework(
        "the Trainer of Transformers",
        ("transformers",),
        "call trainer.deepspeed.load_checkpoint(folder, ...) in a callback's on_train_begin in place of "
        "resume_from_checkpoint",
    ),
    Framework("Accelerate", ("accelerate",), "give them to accelerator.load_state(folder, ...)"),
)


def calling_framework() -> Framework | None:
    """The framework in which ``load_checkpoint`` was called; ``None`` if a user's own code called it."""
    frame = inspect.currentframe()
    while frame is not None and _is_of(_module_of(frame), _BETWEEN):
        frame = frame.f_back
    caller = "" if frame is None else _module_of(frame)
    return next((each for each in _FRAMEWORKS if _is_of(caller, each.packages)), None)


def in_words_of(framework: Framework, remedies: Iterable[Remedy]) -> str:
    """What a user of the framework writes for the arguments of remedies; empty if they have none."""
    given = (f"{key}={value!r}" for remedy in remedies for key, value in remedy.arguments.items())
    arguments = list(dict.fromkeys(given))
    known = [f"{each} is {framework.ways[each]}" for each in arguments if each in framework.ways]
    others = [each for each in arguments if each not in framework.ways]
    words = [*known, *([f"for {', '.join(others)} {framework.otherwise}"] if others else [])]
    return f"in {framework.name}, {'; '.join(words)}" if words else ""


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
