"""Changes: what one script saved is loaded by another, by DeepSpeed alone where it can, and with elastic_ckpt."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from elastic_ckpt.errors import ElasticCkptError, Remedy
from tests.changes.draw import LOADS, Change
from tests.changes.held import (
    Held,
    differences,
    held_by,
    in_names_of,
    keeps_schedule,
    of_all_stages,
    other_rates,
    rates_of,
    spoiled,
    unsaid_by,
    wrong_of,
)
from tests.changes.scripts import Live, live
from tests.distributed.convert import convert_by_command, convert_each
from tests.distributed.facts import on_all_ranks
from tests.distributed.remedy_jobs import merged

SAVE_AT = 4
TAG = "step4"
UNIVERSAL = "universal"
#: What became of a change: DeepSpeed cannot build or save it; ours is right; refused, where nobody had to be right; refused,
#: and a remedy that was followed is right.
VOID, RIGHT, REFUSED, REMEDIED = "void", "right", "refused", "remedied"


def save_each(arguments: dict[str, Any]) -> list[str]:
    """Train and save each change's script; beside each, what it held (``truth.pt``). An error's words, or none, of each."""
    return [_saved(change, folder, arguments["spoils"]) for change, folder in arguments["changes"]]


def _saved(change: Change, folder: str, spoils: bool) -> str:
    elastic_ckpt.uninstall()
    try:
        run = live(change.saves, 7)
        run.train(0, SAVE_AT)
        client = {} if run.held is None else {"schedule": run.held.state_dict()}
        run.engine.save_checkpoint(
            folder, tag=TAG, client_state=client, exclude_frozen_parameters=change.files == "without frozen"
        )
        truth = of_all_stages(held_by(run))
        run.train(SAVE_AT, SAVE_AT + 1)
        later = {name: rates for mine in on_all_ranks(rates_of(run)) for name, rates in mine.items()}
        run.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    words = ""
    if dist.get_rank() == 0:
        torch.save((spoiled(truth) if spoils else truth, later), os.path.join(folder, "truth.pt"))
        _lose_files(change, folder)
        words = _converted(change, Path(folder))
    return str(on_all_ranks(words)[0])


def _converted(change: Change, folder: Path) -> str:
    """Make a universal checkpoint, if that is what is loaded; an error's words, or none."""
    if change.format == "native":
        return ""
    convert = convert_each if change.format == "universal by DeepSpeed" else convert_by_command
    try:
        convert([{"native": str(folder), "folder": str(folder / UNIVERSAL)}])
    except (Exception, SystemExit) as error:
        return f"{change.format}: {type(error).__name__}: {error}"
    return ""


def _lose_files(change: Change, folder: str) -> None:
    if change.files == "without latest":
        os.unlink(os.path.join(folder, "latest"))
    if change.files == "without states":
        for name in os.listdir(os.path.join(folder, TAG)):
            if name.endswith("optim_states.pt"):
                os.unlink(os.path.join(folder, TAG, name))


def load_each(arguments: dict[str, Any]) -> list[tuple[str, str]]:
    """Load each change's folder as its script does; what became of it, or what is wrong, and more words."""
    return [_judged(change, folder, arguments["asks_deepspeed"]) for change, folder in arguments["changes"]]


@dataclass(frozen=True)
class _Tried:
    """A load that was tried: its error, or what is not right by names."""

    error: BaseException | None
    wrong: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


def _judged(change: Change, folder: str, asks_deepspeed: bool) -> tuple[str, str]:
    alone = None
    try:
        if asks_deepspeed and change.is_of_deepspeed:
            elastic_ckpt.uninstall()
            alone = _tried(change, folder, Remedy(), is_ours=False)
        elastic_ckpt.install()
        ours = _tried(change, folder, Remedy(), is_ours=True)
    except _CannotBuild as error:
        return VOID, str(error)
    texts = set(on_all_ranks(ours.text))
    if len(texts) > 1:
        return f"ranks disagree: {sorted(texts)}", ""
    if ours.error is None:
        return ("; ".join(ours.wrong[:4]) or RIGHT), ""
    is_refused = isinstance(ours.error, ElasticCkptError) and "error is unexpected" not in ours.text
    if not is_refused and (alone is None or type(alone.error) is not type(ours.error)):
        return f"raises {ours.text}", ""
    if ours.wrong:
        return f"refused, and the engine is another: {ours.wrong}; {ours.text}", ""
    must_load = alone is not None and alone.error is None and not alone.wrong
    return _followed(change, folder, ours.error, must_load)


def _followed(change: Change, folder: str, error: BaseException, must_load: bool) -> tuple[str, str]:
    """Follow what of a refusal's remedies a program can."""
    remedies = error.remedies if isinstance(error, ElasticCkptError) else ()
    helped = []
    for remedy in remedies:
        if _can_follow(remedy, change):
            tried = _tried(change, folder, remedy, is_ours=True)
            if tried.error is None and tried.wrong:
                return f"its remedy {remedy} leaves {'; '.join(tried.wrong[:4])}", str(error)
            if tried.error is None:
                helped.append(str(remedy))
    if helped:
        return REMEDIED, f"{type(error).__name__}: {error}"
    if must_load:
        return f"DeepSpeed alone is right, and ours refuses: {type(error).__name__}: {error}", ""
    return REFUSED, f"{type(error).__name__}: {error}"


def _can_follow(remedy: Remedy, change: Change) -> bool:
    """Whether a program can, and what the remedy says must be true is."""
    is_renamed = change.saves.names != change.loads.names
    is_true = remedy.when == "" or (is_renamed and remedy.when == "if they were renamed")
    return bool(remedy.config or remedy.arguments) and is_true and "trust_pickle" not in remedy.config


class _CannotBuild(Exception):
    """The live script fails before it loads."""


def _tried(change: Change, folder: str, remedy: Remedy, is_ours: bool) -> _Tried:
    """Build the script, train a step, load, and look. Collective."""
    run, before = _built(change, remedy)
    truth, later = torch.load(os.path.join(folder, "truth.pt"), weights_only=False)
    if "rename" in remedy.config:
        truth = in_names_of(truth, change)
    arguments = _arguments(change, folder, remedy, is_ours)
    try:
        _load(change, run, arguments)
    except Exception as error:
        # an engine that is taken apart differs by what DeepSpeed did to it
        changed = differences(held_by(run), before) if is_ours and isinstance(error, ElasticCkptError) else ()
        run.close()
        return _Tried(error, changed)
    keeps_rates = "param_groups" not in remedy.config and keeps_schedule(change, arguments)
    wrong = wrong_of(change, run, truth, before, arguments, bool(remedy.config))
    wrong += other_rates(rates_of(run), truth.rates) if keeps_rates else []
    if is_ours and run.engine.elastic_report is not None:
        wrong += unsaid_by(change, run, truth, run.engine.elastic_report)
    wrong += _wrong_a_step_later(run, later if keeps_rates else {})
    run.close()
    return _Tried(None, tuple(next(filter(None, on_all_ranks(wrong)), wrong)))


def _built(change: Change, remedy: Remedy) -> tuple[Live, Held]:
    """The live script after a step of other data, and what it holds."""
    try:
        run = live(change.loads, 8, dict(remedy.config))
        if change.loads.optimizer != "none":
            run.train(60, 61)
        return run, held_by(run)
    except Exception as error:
        raise _CannotBuild(f"{type(error).__name__}: {error}") from error


def _arguments(change: Change, folder: str, remedy: Remedy, is_ours: bool) -> dict[str, Any]:
    """Of the load, as the script calls it, with what a remedy adds."""
    arguments = {"load_dir": folder, **LOADS[change.arguments]}
    is_native = change.format == "native"
    if not is_native:
        arguments["load_dir"] = os.path.join(folder, UNIVERSAL)
    if change.given == "tag" or not (is_native or is_ours):  # only ours finds the only tag
        arguments["tag"] = TAG if is_native else f"{TAG}_universal"
    return merged(arguments, remedy.arguments)


def _load(change: Change, run: Live, arguments: dict[str, Any]) -> None:
    if change.format != "native":
        run.engine._config.load_universal_checkpoint = True
    path, client = run.engine.load_checkpoint(**arguments)
    if path is None:
        raise FileNotFoundError("found no checkpoint")
    if run.held is not None and "schedule" in (client or {}):
        run.held.load_state_dict(client["schedule"])


def _wrong_a_step_later(run: Live, later: dict[str, tuple[float, float]]) -> list[str]:
    """Whether the script trains on, and at the rates of the run that was not interrupted."""
    if run.script.optimizer == "none":
        return []
    try:
        run.train(SAVE_AT, SAVE_AT + 1)
    except Exception as error:
        return [f"the next step raises {type(error).__name__}: {error}"]
    return other_rates(rates_of(run), later, "a step later")
