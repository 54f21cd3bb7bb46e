"""What test processes run: ``python -m tests.distributed.jobs NAME JSON`` on every rank of a gloo job."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import model as models
from tests.distributed import truth as oracle
from tests.distributed.model import build_engine, close, setup_from_json, train

SAVE_AT = 4
CONTINUE_TO = 7


def save(arguments: dict[str, Any]) -> None:
    """Train each setup to step ``SAVE_AT``, save it, write down the truth, and train on for the reference losses.

    ``first`` (of the data) and ``steps`` make another run of the same shapes. ``steps`` of 0 saves without truth.
    ``exclude_frozen`` leaves frozen parameters out, as HF Trainer does for PEFT.
    """
    first, count = arguments.get("first", 0), arguments.get("steps", SAVE_AT)
    for setup in map(setup_from_json, arguments["setups"]):
        folder = os.path.join(arguments["folder"], f"{setup.name}-dp{dist.get_world_size()}")
        engine = build_engine(setup, models.BUILDERS[arguments.get("model", "TinyLM")]())
        train(engine, first, first + count)
        rng = [dist.get_rank(), 2, 3]
        client_state = {"note": "hello", "epoch": 3, "rng": rng, "tensor": torch.arange(6).view(2, 3).t()}
        client_state["sampler"] = {"consumed": 48, "order": torch.arange(5), "nested": [{"seed": 3}]}
        engine.save_checkpoint(
            folder,
            tag="step4",
            client_state=client_state,
            exclude_frozen_parameters=arguments.get("exclude_frozen", False),
        )
        if count == 0:
            close(engine)
            continue
        oracle.relink(engine)
        truth = oracle.gather(engine, oracle.state_keys(engine))
        truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(folder, "truth.pt"))
        close(engine)
        dist.barrier()


def save_untruthful(arguments: dict[str, Any]) -> None:
    """Train and save, without a truth: for models whose frozen parts DeepSpeed's getters cannot read."""
    for setup in map(setup_from_json, arguments["setups"]):
        engine = build_engine(setup, models.BUILDERS[arguments["model"]]())
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(
            os.path.join(arguments["folder"], f"{setup.name}-dp{dist.get_world_size()}"), tag="step4"
        )
        close(engine)


def load(arguments: dict[str, Any]) -> None:
    """Load many checkpoints into one engine after another, and compare each with its truth."""
    elastic_ckpt.install()
    for target in arguments["targets"]:
        setup = setup_from_json(target["setup"])
        engine = build_engine(setup, models.BUILDERS[target.get("model", "TinyLM")](seed=8))
        for number, source in enumerate(target["sources"]):
            where = f"{source['folder']} ({source['format']}) -> {setup.name}-dp{dist.get_world_size()}"
            truth = torch.load(os.path.join(source["folder"], "truth.pt"), weights_only=False)
            engine._config.load_universal_checkpoint = source["format"] == "universal"
            path, client_state = engine.load_checkpoint(source["folder"])
            assert engine.elastic_report is not None, f"{where}: DeepSpeed's own path ran"
            assert engine.elastic_report.source.format == source["format"], where
            assert os.path.isfile(path), where
            assert client_state["note"] == "hello" and client_state["epoch"] == 3, where
            assert torch.equal(client_state["tensor"], torch.arange(6).view(2, 3).t()), where
            sampler = client_state["sampler"]
            assert sampler["consumed"] == 48 and sampler["nested"] == [{"seed": 3}], where
            assert torch.equal(sampler["order"], torch.arange(5)), where
            saved = (
                engine.elastic_report.source
            )  # ZeRO-3 saves a file for each rank, which finds its own if it is there
            has_own = (saved.format, saved.zero_stage, saved.dp) == ("native", 3, dist.get_world_size())
            assert client_state["rng"] == [dist.get_rank() if has_own else 0, 2, 3], (where, client_state["rng"])
            oracle.assert_equal(engine, truth, where)
            if number in target.get("continue", [0]):
                losses = train(engine, SAVE_AT, CONTINUE_TO)
                bound = 1e-5 if setup.precision == "fp32" and source.get("alike", True) else 5e-3
                if setup.stage == 0 and setup.precision.startswith("fp16") and not source.get("alike", True):
                    bound = 0.05  # DeepSpeed's gradients are of another unit there; 0.025 was measured
                differences = [abs(a - b) for a, b in zip(losses, truth["losses"], strict=True)]
                assert max(differences) <= bound, f"{where}: losses {losses}, uninterrupted {truth['losses']}"
            else:
                train(engine, 100 + number, 101 + number)  # leave other values for the next load to replace
        close(engine)


def weights_alone(arguments: dict[str, Any]) -> None:
    """Any optimizer will do where its states are left alone."""
    elastic_ckpt.install()
    engine = build_engine(setup_from_json(arguments["setup"]))
    truth = torch.load(os.path.join(arguments["folder"], "truth.pt"), weights_only=False)
    engine.load_checkpoint(arguments["folder"], load_optimizer_states=False)
    held = oracle.gather(engine, [])
    for name, expected in truth["weights"].items():
        assert torch.equal(held["weights"][name], expected), name


def same_as_deepspeed(arguments: dict[str, Any]) -> None:
    """At the saved topology, every combination of arguments does what DeepSpeed's own loader does."""
    for case in arguments["cases"]:
        setup = setup_from_json(case["setup"])
        results = []
        for ours in (False, True):
            (elastic_ckpt.install if ours else elastic_ckpt.uninstall)()
            engine = build_engine(setup)
            if case.get("trained", True):
                train(engine, 60, 62)
            theirs = case.get("deepspeed_arguments", case["arguments"])
            path, client_state = engine.load_checkpoint(case["folder"], **(case["arguments"] if ours else theirs))
            assert not ours or engine.elastic_report is not None, f"{case}: DeepSpeed's own path ran"
            keys = oracle.state_keys(engine) if oracle.base_of(engine).state else []
            if keys:
                oracle.relink(engine)
            held = oracle.gather(engine, keys)
            # the whole optimizer state, without ZeRO, and frozen weights are no client state of ours
            handed_out = sorted(set(client_state) - {"optimizer", "frozen_param_fragments"})
            results.append((path, handed_out, held, train(engine, 4, 6)))
            close(engine)
        (path, keys, held, losses), (our_path, our_keys, our_held, our_losses) = results
        assert path == our_path, (case, path, our_path)
        assert keys == our_keys, (case, keys, our_keys)
        for kind in ("masters", "states", "weights", "buffers"):
            assert held[kind].keys() == our_held[kind].keys(), (case, kind)
            for key, expected in held[kind].items():
                assert torch.equal(expected, our_held[kind][key]), f"{case}: {kind} {key}"
        for kind in ("steps", "groups", "counters", "scheduler"):
            assert held[kind] == our_held[kind], (case, kind, held[kind], our_held[kind])
        assert losses == our_losses, (case, losses, our_losses)
    elastic_ckpt.uninstall()


def never_stepped(arguments: dict[str, Any]) -> None:
    """A checkpoint saved before the first step clears the states that the engine has by now."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        setup = setup_from_json(case["setup"])
        kind = models.BUILDERS[case.get("model", "TinyLM")]
        reference = build_engine(setup, kind())
        expected = train(reference, 0, 3)
        close(reference)
        engine = build_engine(setup, kind())
        train(engine, 20, 22)
        engine.load_checkpoint(case["folder"])
        assert not any(oracle.base_of(engine).state.values()), "states are left over"
        assert any("before the first step" in outcome.reason for outcome in engine.elastic_report.outcomes)
        losses = train(engine, 0, 3)
        assert losses == expected, (case, losses, expected)
        close(engine)


def weights_only(arguments: dict[str, Any]) -> None:
    """``load_optimizer_states=False``: masters are the saved ones, states and groups are left as they were."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        engine = build_engine(setup_from_json(case["setup"]), models.BUILDERS[case["model"]](seed=8))
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        train(engine, 60, 62)
        oracle.relink(engine)
        before = oracle.gather(engine, ["exp_avg", "exp_avg_sq"])
        engine.load_checkpoint(case["folder"], **case["arguments"])
        now = oracle.gather(engine, ["exp_avg", "exp_avg_sq"])
        for name, expected in truth["masters"].items():
            assert torch.equal(now["masters"][name], expected), (case, name)
        for key, expected in before["states"].items():
            assert torch.equal(now["states"][key], expected), (case, key)
        assert now["steps"] == before["steps"] and now["counters"] == truth["counters"], case
        train(engine, 62, 63)
        close(engine)


def not_strict(arguments: dict[str, Any]) -> None:
    """``load_module_strict=False`` restores what matches, leaves the rest fresh, and says so."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        setup = setup_from_json(case["setup"])
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        richer = build_engine(setup, models.RicherLM())
        train(richer, 20, 22)
        before = oracle.gather(richer, [])
        richer.load_checkpoint(case["folder"], load_module_strict=False)
        assert richer.elastic_report.fresh == ("new_buffer", "newcomer"), richer.elastic_report
        oracle.relink(richer)
        held = oracle.gather(richer, ["exp_avg", "exp_avg_sq"])
        assert torch.equal(held["masters"].pop("newcomer"), before["masters"]["newcomer"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert not held["states"].pop(("newcomer", key)).any()
        assert held["masters"].keys() == truth["masters"].keys()
        for kind in ("masters", "states"):
            for key, expected in truth[kind].items():
                assert torch.equal(held[kind][key], expected), (case, kind, key)
        train(richer, 22, 23)
        close(richer)
        poorer = build_engine(setup, models.PoorerLM())
        poorer.load_checkpoint(case["folder"], load_module_strict=False)
        assert poorer.elastic_report.ignored == ("never_used",), poorer.elastic_report
        oracle.relink(poorer)
        held = oracle.gather(poorer, ["exp_avg", "exp_avg_sq"])
        for kind in ("masters", "states"):
            for key, found in held[kind].items():
                assert torch.equal(truth[kind][key], found), (case, kind, key)
        close(poorer)


def changed(arguments: dict[str, Any]) -> None:
    """Loads into a model or param groups that are not quite those of the save.

    Of each case: ``names``: saved name -> live name; ``fresh``: parameters whose weights stay as the live model has
    them; ``stateless``: whose states are zero or missing; ``says``: what the report says; ``groups``: hyperparameters
    by live group; ``continue``: whether training goes on as the saved run did.
    """
    elastic_ckpt.install()
    for case in arguments["cases"]:
        setup = setup_from_json(case["setup"])
        where = f"{case['folder']} -> {case['setup']} {case.get('model')}"
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        engine = build_engine(setup, models.BUILDERS[case.get("model", "TinyLM")](seed=8))
        if case.get("trained", False):
            train(engine, 60, 62)
        before = oracle.gather(engine, [])
        engine.load_checkpoint(case["folder"], **case.get("arguments", {}))
        report = str(engine.elastic_report)
        for words in case.get("says", []):
            assert words in " ".join(report.replace("│", " ").split()), f"{where}: {words!r} is not in\n{report}"
        assert_changed(engine, case, truth, before, where)
        losses = train(engine, SAVE_AT, CONTINUE_TO)
        if case.get("continue", False):
            assert max(abs(a - b) for a, b in zip(losses, truth["losses"], strict=True)) <= 1e-5, (
                where,
                losses,
                truth["losses"],
            )
        close(engine)


def assert_changed(
    engine: Any, case: dict[str, Any], truth: dict[str, Any], before: dict[str, Any], where: str
) -> None:
    """What matches is exactly the checkpoint's; the rest is what it was, or zero."""
    keys = ["exp_avg", "exp_avg_sq"] if oracle.base_of(engine).state else []
    if keys:
        oracle.relink(engine)
    now = oracle.gather(engine, keys)
    names, fresh, stateless = case.get("names", {}), set(case.get("fresh", [])), set(case.get("stateless", []))
    live = {names.get(name, name): name for name in truth["weights"]}
    for name, weight in now["weights"].items():
        if name in fresh:
            expected = before["weights"][name]
        else:
            saved = live[name]
            expected = truth["masters"].get(saved, truth["weights"][saved]).to(weight.dtype)
            if name in now["masters"]:
                master = truth["masters"].get(saved, truth["weights"][saved]).float()
                assert torch.equal(now["masters"][name], master), f"{where}: master {name}"
        assert torch.equal(weight, expected), f"{where}: weight {name}"
    for (name, key), state in now["states"].items():
        if name in stateless | fresh:
            assert not state.any(), f"{where}: {key} of {name} is not zero"
        else:
            assert torch.equal(state, truth["states"][live[name], key]), f"{where}: {key} of {name}"
    for name, buffer in now["buffers"].items():
        saved = {new: old for old, new in names.items()}.get(name, name)
        expected = before["buffers"][name] if name in fresh else truth["buffers"][saved]
        assert torch.equal(buffer, expected), f"{where}: buffer {name}"
    assert now["counters"] == truth["counters"], where
    for number, expected in enumerate(case.get("groups", [])):
        found = {key: value for key, value in now["groups"][number].items() if key in expected}
        assert json.loads(json.dumps(found)) == expected, f"{where}: group {number}: {found} instead of {expected}"


def head_first(arguments: dict[str, Any]) -> None:
    """A tied pair that is registered in another order is still the same parameter."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        engine = build_engine(setup_from_json(case["setup"]), models.HeadFirstLM())
        engine.load_checkpoint(case["folder"])
        oracle.relink(engine)
        held = oracle.gather(engine, ["exp_avg", "exp_avg_sq"])
        assert "head.weight" in held["masters"] and "embedding.weight" not in held["masters"]
        for kind in ("masters", "states"):
            for key, expected in truth[kind].items():
                live = {"embedding.weight": "head.weight"}
                key = live.get(key, key) if kind == "masters" else (live.get(key[0], key[0]), key[1])  # noqa: PLW2901
                assert torch.equal(held[kind][key], expected), (case, key)
        assert any("head.weight" in note for note in engine.elastic_report.notes)
        close(engine)


def loss_scales(arguments: dict[str, Any]) -> None:
    """The loss scale of an fp16 run is kept where checkpoint and config have the same kind; else the report says."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        where = repr(case)
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        engine = build_engine(setup_from_json(case["setup"]))
        before = oracle.loss_scale(engine)
        engine.load_checkpoint(case["folder"])
        after = oracle.loss_scale(engine)
        outcomes = {o.what: o.reason for o in engine.elastic_report.outcomes if o.role == "loss scale"}
        if case["saved"] == case["live"]:
            assert after == truth["scale"] and after is not None, (where, after, truth["scale"])
            assert list(outcomes) == ["restored"], (where, outcomes)
        else:
            assert after == before, (where, after, before)
            assert list(outcomes) == ["ignored" if case["live"] is None else "fresh"], (where, outcomes)
            assert all(kind is None or kind in str(outcomes) for kind in (case["saved"], case["live"])), (
                where,
                outcomes,
            )
        train(engine, SAVE_AT, SAVE_AT + 1)
        close(engine)


def save_again(arguments: dict[str, Any]) -> None:
    """Elastic load, save, load that with DeepSpeed alone: the same state. And loading twice is the same as once."""
    for number, case in enumerate(arguments["cases"]):
        setup = setup_from_json(case["setup"])
        truth = torch.load(os.path.join(case["folder"], "truth.pt"), weights_only=False)
        folder = os.path.join(arguments["folder"], str(number))
        elastic_ckpt.install()
        engine = build_engine(setup)
        engine.load_checkpoint(case["folder"])
        engine.load_checkpoint(case["folder"])
        oracle.assert_equal(engine, truth, "loaded twice")
        engine.save_checkpoint(folder)
        close(engine)
        elastic_ckpt.uninstall()
        engine = build_engine(setup)
        engine.load_checkpoint(folder)
        oracle.assert_equal(engine, truth, f"{case}: saved again, loaded by DeepSpeed")
        close(engine)


def frugal(arguments: dict[str, Any]) -> None:
    """Each metadata file is opened once in the job, and a rank reads what it owns, not more."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        engine = build_engine(setup_from_json(case["setup"]), models.BigLM())
        before = read_so_far()
        engine.load_checkpoint(case["folder"])
        report = engine.elastic_report
        work = report.mine
        assert len(report.ranks) == dist.get_world_size() and work.rank == dist.get_rank()
        total = torch.tensor([work.files_opened, work.nbytes_read, read_so_far() - before])
        dist.all_reduce(total)
        files = sum(len(names) for _, _, names in os.walk(os.path.join(case["folder"], report.source.tag)))
        assert total[0] == files, (case, total, files)
        owned = 12 * sum(numel_of(param) for param in engine.module.parameters())
        saved_buffers = [engine.module.ticks, engine.module.trace]
        owned += sum(b.numel() * b.element_size() for b in saved_buffers)  # read once, sent to the other ranks
        assert 0.999 * owned <= total[1] <= 1.001 * owned, (case, total, owned)
        metadata = 400_000 + 300_000 * files
        assert total[2] <= 1.02 * owned + metadata, (case, total, owned)
        assert json.loads(json.dumps(report.as_dict()))["global_steps"] == report.global_steps
        assert "restored" in str(report)
        close(engine)


def read_so_far() -> int:
    """Bytes that this process asked the kernel for, page cache included."""
    with open("/proc/self/io", encoding="ascii") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("rchar"))


def numel_of(param: Any) -> int:
    return param.ds_numel if hasattr(param, "ds_numel") else param.numel()


def main() -> None:
    torch.set_num_threads(1)
    random.seed(0)
    deepspeed.init_distributed(dist_backend="gloo")
    module, _, job = sys.argv[1].rpartition(".")
    jobs = importlib.import_module(f"tests.distributed.{module}") if module else sys.modules[__name__]
    getattr(jobs, job)(json.loads(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # All went well. Threads of gloo now and then abort the interpreter's teardown ("terminate called without an
    # active exception"), in jobs without elastic_ckpt too: leave before it.
    os._exit(0)


if __name__ == "__main__":
    main()
