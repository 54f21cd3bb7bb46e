"""What test processes run: ``launch(world_size, "save", arguments)`` runs :func:`save` on every rank of a gloo job."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.facts import Loaded, log_lines, loss_gap
from tests.distributed.launch import pickles
from tests.distributed.model import build_engine, close, train

SAVE_AT = 4
CONTINUE_TO = 7


#: Whether tests are to be seen to fail: what ranks compare with is not what was saved.
SPOILS = os.environ.get("ELASTIC_CKPT_TEST_SPOIL") == "1"
#: The name under which :func:`run_cells` is launched.
CELLS = "cells"


def run(job: str, arguments: Any) -> Any:
    """Run a job of this module, or ``module.function`` of another one, in a process group; what it returns."""
    _begin()
    facts = _function(job)(arguments)
    dist.barrier()
    dist.destroy_process_group()
    return facts


def run_cells(cells: list[tuple[str, str, Any]], stream: BinaryIO) -> None:
    """Run many cells in one process group, and write down what each found as soon as it has found it.

    Args:
        cells: of each, its name, its job, which takes a case, or a list of them, ``cases``; and its case.
        stream: takes a pickle of the facts of each.
    """
    _begin()
    for name, job, case in cells:
        print(f"=== {name}", flush=True)
        with _left_as_found():
            work = _function(job)
            takes_many = next(iter(inspect.signature(work).parameters)) == "cases"
            facts = work([case] if takes_many else case)
        dist.barrier()
        stream.write(pickle.dumps(facts))
    dist.destroy_process_group()


def _begin() -> None:
    torch.set_num_threads(1)
    random.seed(0)
    deepspeed.init_distributed(dist_backend="gloo")


def _function(job: str) -> Callable[[Any], Any]:
    module, _, function = job.rpartition(".")
    return getattr(importlib.import_module(f"tests.distributed.{module or 'jobs'}"), function)


@contextlib.contextmanager
def _left_as_found() -> Iterator[None]:
    """One cell must not see what the one before it did to the process."""
    environ, folder = dict(os.environ), os.getcwd()
    linear = torch.nn.functional.linear  # ZeRO-3 puts one in its place that rounds otherwise, for good
    random.seed(0)
    yield
    torch.nn.functional.linear = linear
    elastic_ckpt.uninstall()
    elastic_ckpt.config.flags.clear()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    gc.collect()


def take_over(case: dict[str, Any]) -> None:
    """Begin a save's ``folder`` with all that is in its ``source``, if it has one. Collective."""
    if "source" in case and dist.get_rank() == 0:
        shutil.copytree(case["source"], case["folder"])
    dist.barrier()


def note(folder: str, found: Any) -> None:
    """Keep what a job that saves has found out beside what it has saved, for :func:`noted`."""
    if dist.get_rank() == 0:
        with open(os.path.join(folder, "found.pkl"), "ab") as stream:
            pickle.dump(found, stream)


def noted(case: dict[str, Any]) -> list[Any]:
    """All that was noted by the jobs that saved a folder one after the other."""
    return pickles(Path(case["folder"]) / "found.pkl")


Truth = dict[str, Any]


def truth_of(folder: str | os.PathLike[str], *changes: Callable[[Truth], Truth]) -> Truth:
    """What the run that saved this checkpoint had, whole and by name; not quite that where tests are to be seen to fail.

    ``changes`` leave out of it what is not compared.
    """
    truth = torch.load(os.path.join(folder, "truth.pt"), weights_only=False)
    for change in changes:
        truth = change(truth)
    return spoiled(truth) if SPOILS else truth


def without_states(truth: Truth) -> Truth:
    """A truth of weights alone."""
    return {**truth, "states": {}, "steps": []}


def spoiled(truth: Truth) -> Truth:
    """One master with another element, or one state: which of them is drawn by the number of masters."""
    name, master = sorted(truth["masters"].items())[-1]
    masters, states = dict(truth["masters"]), dict(truth["states"])
    if states and len(masters) % 2:
        key = max(states)
        states[key] = _other_at_the_end(states[key])
    else:
        masters[name] = _other_at_the_end(master)
    return {**truth, "masters": masters, "states": states}


def _other_at_the_end(values: torch.Tensor) -> torch.Tensor:
    changed = values.clone()
    changed.view(-1)[-1:] += 1
    return changed


def client_state_of(rank: int) -> dict[str, Any]:
    """What a rank's training script saves."""
    sampler = {"consumed": 48, "order": torch.arange(5), "nested": [{"seed": 3}]}
    tensor = torch.arange(6).view(2, 3).t()
    return {"note": "hello", "epoch": 3, "rng": [rank, 2, 3], "tensor": tensor, "sampler": sampler}


def save(arguments: dict[str, Any]) -> None:
    """:func:`save_each` of ``setups`` in folders ``<setup.name>-dp<ranks>``."""
    shared = {key: value for key, value in arguments.items() if key not in ("folder", "setups")}
    folder = arguments["folder"]
    save_each(
        [
            {**shared, "setup": setup, "folder": os.path.join(folder, f"{setup.name}-dp{dist.get_world_size()}")}
            for setup in arguments["setups"]
        ]
    )


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train each setup to step ``SAVE_AT``, save it, write down the truth, and train on for the reference losses.

    ``first`` (of the data) and ``steps`` make another run of the same shapes. ``steps`` of 0 saves without truth, as
    does ``truth``, for models whose parts DeepSpeed's getters cannot read. ``exclude_frozen`` leaves frozen parameters
    out, as HF Trainer does for PEFT.
    """
    for case in cases:
        first, count = case.get("first", 0), case.get("steps", SAVE_AT)
        engine = build_engine(case["setup"], models.BUILDERS[case.get("model", "TinyLM")]())
        train(engine, first, first + count)
        engine.save_checkpoint(
            case["folder"],
            tag="step4",
            client_state=client_state_of(dist.get_rank()),
            exclude_frozen_parameters=case.get("exclude_frozen", False),
        )
        if count and case.get("truth", True):
            oracle.relink(engine)
            truth = oracle.gather(engine, oracle.state_keys(engine))
            truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
            if dist.get_rank() == 0:
                torch.save(truth, os.path.join(case["folder"], "truth.pt"))
        close(engine)
        dist.barrier()


def load(arguments: dict[str, Any]) -> list[Loaded]:
    """Load many checkpoints into one engine after another, and compare each with its truth.

    Of each of ``targets``: ``setup``; ``model``; ``sources``, of which each has ``folder`` and ``format``;
    ``continue``: numbers of the sources after which training goes on as the saved run did.
    """
    elastic_ckpt.install()
    facts = []
    for target in arguments["targets"]:
        setup = target["setup"]
        engine = build_engine(setup, models.BUILDERS[target.get("model", "TinyLM")](seed=8))
        for number, source in enumerate(target["sources"]):
            truth = truth_of(source["folder"])
            engine._config.load_universal_checkpoint = source["format"] == "universal"
            path, client_state = engine.load_checkpoint(source["folder"])
            differences = oracle.differences(engine, truth)
            if not os.path.isfile(path):
                differences["path"] = path
            differences |= client_differences(client_state, engine.elastic_report, setup)
            if number in target.get("continue", [0]):
                gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth)
            else:
                gap = 0.0
                train(engine, 100 + number, 101 + number)  # leave other values for the next load to replace
            case = {"setup": setup, **source}
            facts.append(Loaded(case, where(case), engine.elastic_report, differences, gap, client_state))
        close(engine)
    return facts


def resume(case: dict[str, Any]) -> list[Loaded]:
    """Load a checkpoint into an engine of ``setup`` and ``model``, compare with its truth, and train on as the saved run did.

    ``format``: of the checkpoint; ``trained``: whether the engine has been trained otherwise, and has other values for
    the load to replace; ``continue``: whether training goes on.
    """
    elastic_ckpt.install()
    truth = truth_of(case["folder"])
    engine = build_engine(case["setup"], models.BUILDERS[case.get("model", "TinyLM")](seed=8))
    if case.get("trained", False):
        train(engine, 100, 101)
    engine._config.load_universal_checkpoint = case.get("format") == "universal"
    with log_lines() as lines:
        path, client_state = engine.load_checkpoint(case["folder"])
    differences = oracle.differences(engine, truth)
    if not os.path.isfile(path):
        differences["path"] = path
    differences |= client_differences(client_state, engine.elastic_report, case["setup"])
    gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth) if case.get("continue", True) else 0.0
    found = Loaded(case, where(case), engine.elastic_report, differences, gap, client_state, lines)
    close(engine)
    return [found]


def where(case: dict[str, Any]) -> str:
    """A case, for the test's messages."""
    setup = case["setup"]
    return f"rank {dist.get_rank()}: {case['folder']} -> {setup.name}-dp{dist.get_world_size()} {case}"


def client_differences(found: dict[str, Any], report: Any, setup: models.Setup) -> dict[str, str]:
    """ZeRO-3 saves a file for each rank, which finds its own where there are as many; else it takes the first rank's."""
    source = report.source if report else None
    saved = ("native", setup.stage, dist.get_world_size())  # as DeepSpeed's own loader finds it
    if source is not None:
        saved = (source.format, source.zero_stage, source.partition_degree)
    has_own = saved == ("native", 3, dist.get_world_size())
    expected = client_state_of(dist.get_rank() if has_own else 0)
    return {key: repr(found.get(key)) for key, value in expected.items() if repr(found.get(key)) != repr(value)}


def same_as_deepspeed(cases: list[dict[str, Any]]) -> list[Loaded]:
    """At the saved topology: what differs between DeepSpeed's own loader and ours, with these ``arguments``."""
    facts = []
    for case in cases:
        results = []
        for ours in (False, True):
            (elastic_ckpt.install if ours else elastic_ckpt.uninstall)()
            engine = build_engine(case["setup"])
            if case.get("trained", True):
                train(engine, 60, 62)
            theirs = case.get("deepspeed_arguments", case["arguments"])
            path, client_state = engine.load_checkpoint(case["folder"], **(case["arguments"] if ours else theirs))
            report = engine.elastic_report if ours else None
            keys = oracle.state_keys(engine) if oracle.base_of(engine).state else []
            if keys:
                oracle.relink(engine)
            found = oracle.gather(engine, keys)
            # the whole optimizer state, without ZeRO, and frozen weights are no client state of ours
            handed_out = sorted(set(client_state) - {"optimizer", "frozen_param_fragments"})
            results.append({**found, "path": path, "client state": handed_out, "losses": train(engine, 4, 6)})
            close(engine)
        without, with_ours = results
        expected = spoiled(without) if SPOILS else without
        facts.append(Loaded(case, where(case), report, oracle.compare(with_ours, expected)))
    elastic_ckpt.uninstall()
    return facts


def never_stepped(cases: list[dict[str, Any]]) -> list[Loaded]:
    """Load a checkpoint that was saved before the first step into an engine that has states by now."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        kind = models.BUILDERS[case.get("model", "TinyLM")]
        reference = build_engine(case["setup"], kind())
        expected = [loss + SPOILS for loss in train(reference, 0, 3)]
        close(reference)
        engine = build_engine(case["setup"], kind())
        train(engine, 20, 22)
        engine.load_checkpoint(case["folder"])
        left = {str(key): "is left over" for key, state in oracle.base_of(engine).state.items() if state}
        gap = loss_gap(train(engine, 0, 3), {"losses": expected})
        facts.append(Loaded(case, where(case), engine.elastic_report, left, gap))
        close(engine)
    return facts


def weights_only(cases: list[dict[str, Any]]) -> list[Loaded]:
    """Loads that leave optimizer states alone: masters, weights and counters are the truth's, the rest is as before."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        engine = build_engine(case["setup"], models.BUILDERS[case.get("model", "TinyLM")](seed=8))
        truth = truth_of(case["folder"])
        train(engine, 60, 62)
        oracle.relink(engine)
        keys = oracle.state_keys(engine)
        before = oracle.gather(engine, keys)
        engine.load_checkpoint(case["folder"], load_optimizer_states=False)
        restored = {kind: truth[kind] for kind in ("masters", "weights", "counters")}
        kept = {kind: before[kind] for kind in ("states", "steps")}
        found = oracle.compare(oracle.gather(engine, keys), restored | kept)
        facts.append(Loaded(case, where(case), engine.elastic_report, found))
        train(engine, 62, 63)
        close(engine)
    return facts


def not_strict(cases: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """``load_module_strict=False`` into a model that has more than the checkpoint, and into one that has less."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        setup, truth = case["setup"], truth_of(case["folder"])
        richer = build_engine(setup, models.RicherLM())
        train(richer, 20, 22)
        before = oracle.gather(richer, [])
        richer.load_checkpoint(case["folder"], load_module_strict=False)
        oracle.relink(richer)
        fresh = {("newcomer", key): torch.zeros(11) for key in ("exp_avg", "exp_avg_sq")}
        expected = {
            "masters": truth["masters"] | {"newcomer": before["masters"]["newcomer"]},
            "states": truth["states"] | fresh,
        }
        differences = oracle.compare(oracle.gather(richer, ["exp_avg", "exp_avg_sq"]), expected)
        train(richer, 22, 23)
        close(richer)
        poorer = build_engine(setup, models.PoorerLM())
        poorer.load_checkpoint(case["folder"], load_module_strict=False)
        oracle.relink(poorer)
        found = oracle.gather(poorer, ["exp_avg", "exp_avg_sq"])
        expected = {kind: {key: truth[kind][key] for key in found[kind]} for kind in ("masters", "states")}
        facts.append(
            SimpleNamespace(
                fresh=richer.elastic_report.names("fresh"),
                ignored=poorer.elastic_report.names("ignored"),
                differences=differences | oracle.compare(found, expected),
                where=where(case),
            )
        )
        close(poorer)
    return facts


def changed(cases: list[dict[str, Any]]) -> list[Loaded]:
    """Loads into a model or param groups that are not quite those of the save.

    Of each case: ``names``: saved name -> live name; ``fresh``: parameters whose weights stay as the live model has
    them; ``stateless``: whose states are zero or missing; ``groups``: hyperparameters by live group, of those that are
    compared; ``continue``: whether training goes on as the saved run did.
    """
    elastic_ckpt.install()
    facts = []
    for case in cases:
        truth = truth_of(case["folder"])
        engine = build_engine(case["setup"], models.BUILDERS[case.get("model", "TinyLM")](seed=8))
        if case.get("trained", False):
            train(engine, 60, 62)
        before = oracle.gather(engine, [])
        engine.load_checkpoint(case["folder"], **case.get("arguments", {}))
        keys = ["exp_avg", "exp_avg_sq"] if oracle.base_of(engine).state else []
        if keys:
            oracle.relink(engine)
        now = oracle.gather(engine, keys)
        differences = oracle.compare(now, expected_of(case, truth, before, now))
        losses = train(engine, SAVE_AT, CONTINUE_TO)
        gap = loss_gap(losses, truth) if case.get("continue", False) else 0.0
        facts.append(Loaded(case, where(case), engine.elastic_report, differences, gap))
        close(engine)
    return facts


def expected_of(
    case: dict[str, Any], truth: dict[str, Any], before: dict[str, Any], now: dict[str, Any]
) -> dict[str, Any]:
    """What a changed model should hold: the checkpoint's where it has that, else what it had, or zeros."""
    fresh, stateless = set(case.get("fresh", [])), set(case.get("stateless", []))
    saved_names = {live: saved for saved, live in case.get("names", {}).items()}
    masters = truth["weights"] | truth["masters"]
    expected: dict[str, Any] = {"masters": {}, "states": {}, "weights": {}, "buffers": {}}
    for name in now["weights"]:
        saved = saved_names.get(name, name)
        expected["weights"][name] = before["weights"][name] if name in fresh else masters[saved]
        if name in now["masters"]:
            kept = before["masters"].get(name, before["weights"][name])
            expected["masters"][name] = (kept if name in fresh else masters[saved]).float()
    for (name, key), state in now["states"].items():
        saved = saved_names.get(name, name)
        is_zero = name in stateless | fresh
        expected["states"][name, key] = torch.zeros_like(state) if is_zero else truth["states"][saved, key]
    for name in now["buffers"]:
        source = before["buffers"] if name in fresh else truth["buffers"]
        expected["buffers"][name] = source[name if name in fresh else saved_names.get(name, name)]
    expected["counters"] = truth["counters"]
    if "groups" in case:
        expected["groups"] = [{**group, **more} for group, more in zip(now["groups"], case["groups"], strict=True)]
    return expected


def loss_scales(cases: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """The loss scale of an engine before and after a load, the saved one, and what the report says of it."""
    elastic_ckpt.install()
    facts = []
    for case in cases:
        engine = build_engine(case["setup"])
        before = oracle.loss_scale(engine)
        engine.load_checkpoint(case["folder"])
        after = oracle.loss_scale(engine)
        outcomes = {o.what: o.reason for o in engine.elastic_report.outcomes if o.role == "loss scale"}
        train(engine, SAVE_AT, SAVE_AT + 1)
        close(engine)
        saved = truth_of(case["folder"])["scale"]
        if SPOILS:
            before, saved = ({**(scale or {}), "cur_scale": -1.0} for scale in (before, saved))
        facts.append(SimpleNamespace(case=case, before=before, after=after, saved=saved, outcomes=outcomes))
    return facts


def save_again(case: dict[str, Any]) -> list[Loaded]:
    """Load twice with elastic_ckpt, save, and load that with DeepSpeed alone; each compared with the first truth."""
    truth = truth_of(case["folder"])
    elastic_ckpt.install()
    engine = build_engine(case["setup"])
    engine.load_checkpoint(case["folder"])
    engine.load_checkpoint(case["folder"])
    ours = Loaded(case, where(case), engine.elastic_report, oracle.differences(engine, truth))
    engine.save_checkpoint(case["scratch"])
    close(engine)
    elastic_ckpt.uninstall()
    engine = build_engine(case["setup"])
    engine.load_checkpoint(case["scratch"])
    theirs = Loaded(case, f"{where(case)}, saved again", None, oracle.differences(engine, truth))
    close(engine)
    return [ours, theirs]


def frugal(case: dict[str, Any]) -> list[SimpleNamespace]:
    """What all ranks together opened and read: by the report, and as the kernel counts it; and what there was to read."""
    elastic_ckpt.install()
    written = f"{case['scratch']}.json"
    engine = build_engine(replace(case["setup"], config=(("elastic_checkpoint", {"report": written}),)), models.BigLM())
    before = read_so_far()
    engine.load_checkpoint(case["folder"])
    report = engine.elastic_report
    work = report.mine
    total = torch.tensor([work.files_opened, work.read.nbytes, read_so_far() - before])
    dist.all_reduce(total)
    saved_buffers = [engine.module.ticks, engine.module.trace]
    owned = 12 * sum(getattr(param, "ds_numel", param.numel()) for param in engine.module.parameters())
    owned += sum(b.numel() * b.element_size() for b in saved_buffers)  # read once, sent to the other ranks
    files = sum(len(names) for _, _, names in os.walk(os.path.join(case["folder"], report.source.tag)))
    found = SimpleNamespace(
        ranks=len(report.ranks),
        is_own=work.rank == dist.get_rank(),
        files=files + SPOILS,
        opened=int(total[0]),
        owned=owned,
        read=int(total[1]),
        asked=int(total[2]),
        as_json=json.loads(report.as_json()),
        written=json.loads(Path(written).read_text(encoding="utf-8")),
        text=str(report),
        where=where(case),
    )
    close(engine)
    return [found]


def read_so_far() -> int:
    """Bytes that this process asked the kernel for, page cache included."""
    with open("/proc/self/io", encoding="ascii") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("rchar"))
