"""Loads that are refused, with remedies that a program can follow; and why some remedies have none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed import damage
from tests.distributed.conftest import SUB_GROUPS
from tests.distributed.model import Setup
from tests.distributed.remedy_changes import (
    DCP,
    as_dcp,
    as_universal,
    as_universal_saved_anew,
    keep_a_dictionary,
    lose_a_state,
    number_members,
    number_states,
    save_two_optimizers,
)
from tests.distributed.remedy_jobs import Cell

RANK0, RANK1 = map(damage.OPTIMIZER.format, range(2))
MODEL = "mp_rank_00_model_states.pt"
MODELS3 = tuple(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2))
DIARY = Setup(1, optimizer="diary")
WHOLE, PLAIN, ZERO3, SGD = Setup(0), Setup(1), Setup(3), Setup(1, optimizer="sgd")
NADAM = Setup(1, optimizer="nadam")
UNKNOWN, SPLIT = Setup(1, optimizer="unknown"), Setup(3, zero=SUB_GROUPS)
#: Of whose states DeepSpeed's getters give nothing, or codes.
UNKNOWN_WHOLE, EIGHT_BIT = Setup(0, optimizer="unknown"), Setup(2, optimizer="bnb.AdamW8bit")
SAVED = [WHOLE, PLAIN, ZERO3, SGD, NADAM, DIARY, SPLIT]
Change = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """A refusal on three ranks, of what two ranks saved, or as many as it says.

    Attributes:
        saved: by which setup.
        cell: the load.
        kind: of the error.
        count: how many of its remedies a program can follow, where the cell's conditions hold.
        change: of the files, before.
        ranks: that saved.
        overwrites: whether the engine is partly overwritten when it is refused.
        model: that was saved.
    """

    saved: Setup
    cell: Cell
    kind: str
    count: int = 1
    change: Change | None = None
    ranks: int = 2
    overwrites: bool = False
    model: str = "TinyLM"


def edits(change: Callable[[dict[str, Any]], Any], *files: str) -> Change:
    def apply(copy: Path) -> None:
        for file in files or (RANK0, RANK1):
            damage.edit(file, change)(copy)

    return apply


def of_base(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the base optimizer's state dict in both files."""
    return edits(lambda tree: change(tree["optimizer_state_dict"]["base_optimizer_state"]))


def differently(copy: Path) -> None:
    """Each rank has another value of one hyperparameter."""
    for number, file in enumerate((RANK0, RANK1)):
        damage.edit(file, lambda tree, number=number: _groups(tree)[0].update(mood=float(number)))(copy)


def _groups(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]


def rename_on_purpose(copy: Path) -> None:
    """The second file was saved under the first one's name, and given its own."""
    path = damage.tag(copy) / RANK1
    elsewhere = copy.parent / f"elsewhere{copy.name}"
    elsewhere.mkdir()
    torch.save(torch.load(path, weights_only=False), elsewhere / RANK0)
    shutil.move(elsewhere / RANK0, path)


def drop_weights_by_hand(tree: dict[str, Any]) -> None:
    for value in tree["module"].values():
        value.mul_(0.5) if value.is_floating_point() else None


def drop_states_of_one(copy: Path) -> None:
    """One flat tensor of several of its param group loses its states."""
    edits(lambda tree: tree["optimizer_state_dict"]["optimizer_state_dict"]["state"].pop(0))(copy)


def say_second_optimizer(tree: dict[str, Any]) -> None:
    """As DeepSpeed saves what a second optimizer updates on the accelerator: the config, and no states."""
    zero = {**tree["ds_config"]["zero_optimization"], "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    tree["ds_config"] = {**tree["ds_config"], "zero_optimization": zero}
    states = tree.get("optimizer_state_dict", {}).get("optimizer_state_dict", {}).get("state", {})
    states.pop(0, None)


def another_step(tree: dict[str, Any]) -> None:
    tree["global_steps"] += 1


def say_within_step(tree: dict[str, Any]) -> None:
    tree["ds_config"] = {**tree["ds_config"], "elastic_checkpoint": {"ahead": {"within_step": True}}}


def of_deepspeed_017(tree: dict[str, Any]) -> None:
    tree.update(ds_version="0.17.5", optimizer=None)


def break_scaler(tree: dict[str, Any]) -> None:
    tree["optimizer_state_dict"]["loss_scaler"].cur_scale = "none"


def lose_scale(tree: dict[str, Any]) -> None:
    del tree["optimizer_state_dict"]["loss_scaler"].cur_scale


def remove(*names: str) -> Change:
    return lambda copy: [damage.remove(name)(copy) for name in names]


BATCH = (("train_batch_size", 24), ("train_micro_batch_size_per_gpu", 8))
ON_CHANGE = {"on_change": "error"}
TRUST = "if you trust whoever wrote the file"
MADE_ANEW = "if the optimizer's next step computes it again"
NEW_NAMES = {
    **{f"hidden.{kind}": f"inner.{kind}" for kind in ("weight", "bias")},
    **{f"norm.{kind}": f"scale.{kind}" for kind in ("weight", "bias")},
}
NAMES = ("embedding.weight", "hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "back.weight", "gain")
WRAPPED = {name: f"wrapped.{name}" for name in (*NAMES, "never_used")}
WEIGHTS = ("masters", "weights")


CELLS: dict[str, Case] = {
    "another optimizer": Case(SGD, Cell("", PLAIN), "MismatchError"),
    "a state of unknown layout": Case(DIARY, Cell("", DIARY), "UnsupportedError"),
    "a parameter more": Case(PLAIN, Cell("", ZERO3, "RicherLM"), "MismatchError"),
    "a parameter fewer": Case(ZERO3, Cell("", Setup(2), "PoorerLM"), "MismatchError"),
    "parameters that were renamed": Case(
        PLAIN, Cell("", ZERO3, "RenamedLM", names=NEW_NAMES, holds=("if they were renamed",)), "MismatchError", 2
    ),
    "names that are not tied any more": Case(PLAIN, Cell("", ZERO3, "UntiedLM"), "MismatchError", 2),
    "a rename to a name that was tied": Case(
        PLAIN, Cell("", PLAIN, config={"rename": [["^embedding", "head"]]}), "MismatchError"
    ),
    "a rename to a name that is taken": Case(
        ZERO3, Cell("", PLAIN, config={"rename": [[r"^hidden\.bias$", "norm.bias"]]}), "MismatchError"
    ),
    "groups that were merged": Case(PLAIN, Cell("", Setup(2, groups="one")), "MismatchError"),
    "unnamed states in other groups": Case(WHOLE, Cell("", Setup(1, groups="mixed")), "MismatchError"),
    "another batch": Case(PLAIN, Cell("", Setup(1, config=BATCH), config=ON_CHANGE), "MismatchError"),
    "a tag that is not there": Case(ZERO3, Cell("", PLAIN, arguments={"tag": "step5"}), "NotFoundError"),
    "the folder of a tag": Case(ZERO3, Cell("", PLAIN, inside="step4"), "NotFoundError"),
    "masters that would be rounded": Case(
        PLAIN, Cell("", Setup(1, "bf16_masters"), config=ON_CHANGE, exact=()), "MismatchError"
    ),
    # schedules
    "another schedule": Case(PLAIN, Cell("", PLAIN, scheduler=("CosineAnnealingLR", 9)), "MismatchError"),
    "a schedule that fails": Case(PLAIN, Cell("", PLAIN, scheduler=("Picky", 3)), "MismatchError"),
    "a schedule that keeps something by group": Case(
        PLAIN,
        Cell("", Setup(1, groups="reversed")),
        "MismatchError",
        change=edits(lambda tree: tree["lr_scheduler"].update(own=[1, 2]), MODEL),
    ),
    "a schedule that would lose a method": Case(
        PLAIN, Cell("", PLAIN), "MismatchError", change=edits(lambda tree: tree["lr_scheduler"].update(step=3), MODEL)
    ),
    "a data position that no data has": Case(
        PLAIN,
        Cell("", PLAIN, exact=WEIGHTS),
        "MismatchError",
        change=edits(lambda tree: tree.update(elastic_ckpt_data={"samples_consumed": -1}), MODEL),
    ),
    "a schedule with an entry too few": Case(
        PLAIN,
        Cell("", PLAIN),
        "MismatchError",
        change=edits(lambda tree: tree["lr_scheduler"]["base_lrs"].pop(), MODEL),
    ),
    # other optimizers
    "Adam for AdamW": Case(PLAIN, Cell("", Setup(1, optimizer="adam")), "MismatchError"),
    "an optimizer that lacks a hyperparameter": Case(PLAIN, Cell("", Setup(1, optimizer="radam")), "MismatchError"),
    "another kind, by the hyperparameters": Case(
        PLAIN, Cell("", Setup(1, optimizer="unknown", groups="split")), "MismatchError"
    ),
    "states that can be converted": Case(
        PLAIN, Cell("", Setup(1, optimizer="bnb.AdamW8bit"), exact=WEIGHTS), "MismatchError", 2
    ),
    "a parameter more, of an unknown optimizer": Case(
        UNKNOWN, Cell("", UNKNOWN, "RicherLM", arguments={"load_module_strict": False}), "MismatchError"
    ),
    "blocks that may not be requantized": Case(
        EIGHT_BIT, Cell("", EIGHT_BIT, "WideLM", config=ON_CHANGE, exact=WEIGHTS), "MismatchError"
    ),
    # states and hyperparameters
    "a table of each parameter": Case(
        UNKNOWN_WHOLE,
        Cell("", UNKNOWN, exact=WEIGHTS, holds=("if it is one table for all",)),
        "UnsupportedError",
        2,
    ),
    "a strange state": Case(
        PLAIN,
        Cell("", PLAIN, holds=(MADE_ANEW,)),
        "UnsupportedError",
        2,
        edits(damage.add_strange_state),
    ),
    "a factor that is no number": Case(
        NADAM,
        Cell("", NADAM),
        "DamagedError",
        change=of_base(lambda base: base["state"][0].update(mu_product=torch.tensor(float("nan")))),
    ),
    "groups of other steps": Case(
        PLAIN,
        Cell("", Setup(1, groups="one"), config={"param_groups": "keep_live"}),
        "MismatchError",
        change=of_base(lambda base: base["state"][0].update(step=torch.tensor(3.0))),
    ),
    "a hyperparameter that is an array": Case(
        PLAIN,
        Cell("", PLAIN),
        "UnsupportedError",
        change=of_base(lambda base: base["param_groups"][0].update(thing=torch.ones(1000))),
    ),
    "betas of another optimizer": Case(
        PLAIN,
        Cell("", PLAIN),
        "MismatchError",
        change=of_base(lambda base: base["param_groups"][0].update(betas=(0.9,))),
    ),
    "a hyperparameter of each rank": Case(
        UNKNOWN, Cell("", UNKNOWN, holds=(MADE_ANEW,)), "UnsupportedError", change=differently
    ),
    "states that a second optimizer kept": Case(
        ZERO3, Cell("", ZERO3), "LayoutError", change=edits(say_second_optimizer, *MODELS3, RANK0, RANK1)
    ),
    "states of one of several": Case(SPLIT, Cell("", ZERO3), "DamagedError", change=drop_states_of_one),
    "a loss scaler with a text for a scale": Case(PLAIN, Cell("", PLAIN), "DamagedError", change=edits(break_scaler)),
    "a loss scaler without a scale": Case(PLAIN, Cell("", PLAIN), "LayoutError", change=edits(lose_scale)),
    "an optimizer entry of another kind": Case(
        WHOLE,
        Cell("", PLAIN),
        "UnknownLayoutError",
        change=edits(lambda tree: tree.update(optimizer={"state": {}}), MODEL),
    ),
    "a state dict of its own kind": Case(
        WHOLE,
        Cell("", PLAIN),
        "UnsupportedError",
        change=edits(lambda tree: tree.update(optimizer={"mine": 1, "yours": 2}), MODEL),
    ),
    # files
    "saved without states": Case(WHOLE, Cell("", PLAIN), "LayoutError", 2, edits(of_deepspeed_017, MODEL)),
    "one missing file": Case(PLAIN, Cell("", PLAIN), "MissingFilesError", 1, remove(RANK1)),
    "the first file missing": Case(PLAIN, Cell("", PLAIN), "MissingFilesError", 1, remove(RANK0)),
    "several missing files": Case(
        PLAIN, Cell("", Setup(2), exact=WEIGHTS), "MissingFilesError", 1, remove(RANK0, RANK1), ranks=3
    ),
    "no optimizer files": Case(PLAIN, Cell("", PLAIN), "MissingFilesError", 1, remove(RANK0, RANK1)),
    "a file that was renamed": Case(
        PLAIN,
        Cell("", PLAIN, holds=("if it was renamed on purpose",)),
        "DamagedError",
        change=rename_on_purpose,
    ),
    "weights that were changed by hand": Case(
        PLAIN,
        Cell("", PLAIN, holds=("if weights were changed by hand before the save",)),
        "MixedSavesError",
        change=edits(drop_weights_by_hand, MODEL),
    ),
    "counters of another step": Case(
        ZERO3,
        Cell(
            "",
            ZERO3,
            holds=(
                "if the optimizer was reset during the run, or the run began without ZeRO in fp16 or bf16, or with "
                "DeepSpeed before 0.13, which explains it",
            ),
        ),
        "MixedSavesError",
        change=edits(another_step, *MODELS3),
    ),
    "a save within a step": Case(
        ZERO3,
        Cell("", ZERO3, holds=("if a step that is half done is good enough",)),
        "MixedSavesError",
        change=edits(say_within_step, *MODELS3),
    ),
    "a class in the client state": Case(
        PLAIN, Cell("", PLAIN, holds=(TRUST,)), "UnsafePickleError", 2, edits(damage.plant_bomb, MODEL)
    ),
    # names and sizes
    "nothing has its name": Case(
        PLAIN,
        Cell("", PLAIN, "WrappedLM", arguments={"load_module_strict": False}, names=WRAPPED),
        "MismatchError",
    ),
    "what is loaded is frozen": Case(
        PLAIN,
        Cell("", PLAIN, "LoraLM", arguments={"load_module_strict": False}, exact=("weights",)),
        "MismatchError",
    ),
    "what is loaded is frozen, and has another name": Case(
        PLAIN,
        Cell("", PLAIN, "WrappedLoraLM", arguments={"load_module_strict": False}, exact=("weights",), names=WRAPPED),
        "MismatchError",
    ),
    # the same, of loads that are strict: the first refusal names what works
    "strict, and nothing has its name": Case(
        PLAIN, Cell("", ZERO3, "WrappedLM", names=WRAPPED, holds=("if they were renamed",)), "MismatchError"
    ),
    "strict, and what is loaded is frozen": Case(PLAIN, Cell("", PLAIN, "LoraLM", exact=("weights",)), "MismatchError"),
    "strict, and what is loaded is frozen, and has another name": Case(
        ZERO3, Cell("", ZERO3, "WrappedLoraLM", exact=("weights",), names=WRAPPED), "MismatchError"
    ),
    "rows that were added": Case(PLAIN, Cell("", ZERO3, "LongerLM"), "MismatchError"),
    "rows that were added to nothing": Case(
        PLAIN, Cell("", ZERO3, "LongerLM", config={"added_rows": ["embeding.weight"]}), "ConfigError"
    ),
    "rows that an unknown optimizer has states of": Case(
        UNKNOWN, Cell("", UNKNOWN, "LongerLM", config={"added_rows": ["embedding.weight"]}), "MismatchError"
    ),
    "entries of a hook": Case(
        PLAIN,
        Cell("", PLAIN, "HookedMoreLM", holds=("if they hold nothing that training needs",)),
        "UnsupportedError",
        change=edits(lambda tree: tree["module"].update({"back.extra": torch.ones(2)}), MODEL),
    ),
    # other formats
    "a universal checkpoint without the file of a state": Case(
        PLAIN, Cell("", ZERO3), "DamagedError", change=as_universal("hidden.weight/exp_avg.pt")
    ),
    "a file of a universal checkpoint that was saved anew": Case(
        PLAIN,
        Cell("", ZERO3, holds=("if it was changed on purpose",)),
        "DamagedError",
        change=as_universal_saved_anew("hidden.weight/exp_avg.pt"),
    ),
    "members that are numbered": Case(
        PLAIN, Cell("", ZERO3, inside=DCP), "UnsupportedError", change=as_dcp(number_members)
    ),
    "states that are numbered": Case(
        PLAIN, Cell("", PLAIN, inside=DCP), "UnsupportedError", change=as_dcp(number_states)
    ),
    "a hyperparameter that is a dictionary": Case(
        PLAIN, Cell("", ZERO3, inside=DCP), "UnsupportedError", change=as_dcp(keep_a_dictionary)
    ),
    "a state that one parameter lacks": Case(
        PLAIN, Cell("", ZERO3, inside=DCP), "DamagedError", change=as_dcp(lose_a_state)
    ),
    "two optimizers of one model": Case(
        PLAIN, Cell("", PLAIN, inside=DCP), "MismatchError", change=as_dcp(save_two_optimizers)
    ),
    "a preset that is not there": Case(PLAIN, Cell("", PLAIN, config={"tp_preset": "megatron-coer"}), "ConfigError"),
}

_ELSEWHERE = "of a command in a process of its own: test_remedies.py has a test of it"
#: Remedies that no cell follows, and why, or which test does: by the site's name.
REASONS: dict[str, str] = {
    "cli/plan.py plan: command": _ELSEWHERE,
    "cli/plan.py plan: load_optimizer_states": "of a command: test_cli_plan.py follows it",
    "core/fqn.py cannot_slice: load_optimizer_states": "needs expert parallelism: test_experts.py follows it",
    "engines/data_efficiency.py refuse_strange_state: load_module_only": "needs DeepSpeed's data sampler: "
    "test_data_efficiency_loads.py follows it",
    "engines/data_efficiency.py load_own_state: load_module_only": "needs DeepSpeed's data sampler: "
    "test_data_efficiency_loads.py follows it",
    "formats/saved_config.py refuse_features: mode": "needs ZenFlow, which needs CUDA",
    "formats/saved_files.py refuse_other_files: verify": "needs a save without ZeRO: test_saved_files.py follows it",
    "formats/zero0.py _refuse_other_states: verify": "needs expert parallelism: test_saved_files.py follows it",
    "load/hook.py no_other_loader: arguments, command": "needs an object store: test_buckets.py follows it",
    "load/pretrained.py PretrainedLoad._weights: strict": "is of load_pretrained: test_pretrained.py follows it",
    "load/pretrained.py PretrainedLoad._of_live_shapes: ignore_mismatched_sizes": "is of from_pretrained: "
    "test_pretrained.py follows it",
    "load/pretrained_hook.py _with_ways: arguments, pretrained": "has Transformers run code that a file names",
    "planning/param_groups.py _refuse_many: param_groups": "needs thousands of hyperparameters: test_groups.py follows it",
    "formats/packed_states.py refuse_packed: trust_pickle": "needs a module that keeps extra state: "
    "test_extra_states.py follows it",
    "planning/extra_states.py one_value_each: replicated_params": "needs a module that keeps extra state: "
    "test_extra_states.py follows it",
    "planning/stage_names.py _of_either_class: load_module_only": "of pipelines: test_dualpipev.py follows it",
    "storage/remote.py RemoteFolder.__init__: command": _ELSEWHERE,
    "tools/export.py selected.matching: command": _ELSEWHERE,
}
