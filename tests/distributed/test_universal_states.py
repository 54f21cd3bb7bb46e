"""States that are no plain moments in universal checkpoints: converted, and loaded as from the native checkpoint.

What only commands read starts no ranks of its own: these tests take the saves of the cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.facts import Refused, Refuses
from tests.distributed.model import Setup
from tests.distributed.optimizer_expectations import LOOSE, Exact, Requantized, bnb, configured
from tests.distributed.parallel_models import Parallel

BY_NAME, BY_SIZE = {"my_map": "replicated"}, {"numel<=256": "replicated"}


def native(setup: Setup) -> Save:
    return Save(setup, 2, "optimizer_jobs.save")


def converted(setup: Setup, **options: Any) -> Save:
    """A universal checkpoint of what two ranks saved, by the command."""
    return Save(setup, 1, "optimizer_jobs.convert", {"options": options}, source=native(setup))


def made_by_hand(save: Save) -> Save:
    return Save(save.setup, 1, "universal_states_jobs.by_hand", source=save)


SAVED = [converted(bnb(name, stage)) for name in ("AdamW8bit", "Lion8bit") for stage in (1, 2, 3)]
#: Two averages in one state; beside the step, a count, a factor and a norm of each partition, and a table.
OTHERS_8BIT = [converted(bnb("AdEMAMix8bit", 3)), converted(bnb("LAMB8bit", 1))]
OTHERS = [
    converted(setup)
    for setup in (
        bnb("AdEMAMix", 2),
        Setup(1, optimizer="nadam"),
        Setup(1, optimizer="unknown"),
        Setup(3, optimizer="unknown"),
    )
]
#: With a map that no shape tells from a state.
MAPPED = [converted(Setup(stage, optimizer="mapped"), states=BY_NAME) for stage in (1, 2, 3)]
MAPPED_1, _, MAPPED_3 = (save.setup for save in MAPPED)
Expected = Exact | Requantized


def resumed(
    name: str, save: Save, target: Setup, ranks: int, expected: Expected, change: Callable[[Path], None] | None = None
) -> Cell:
    name = f"{name} of {save.setup.name} to {target.name}-dp{ranks}"
    return Cell(name, save, "optimizer_jobs.load", ranks, {"setup": target}, change, expected=expected)


@cells([resumed("states", save, configured(save.setup, on_change="error"), 2, Exact()) for save in SAVED])
def test_at_the_saved_topology_8_bit_states_come_back_bit_by_bit(cell: Cell, facts: list[Any]) -> None:
    """Also if nothing may change: blocks that neighbours share are known to be the same."""
    cell.expected.check(facts)


#: Into stages 3, 2 and 1.
OTHER_STAGES = [(SAVED[0], SAVED[2].setup), (SAVED[2], SAVED[1].setup), (SAVED[5], SAVED[3].setup)]


@cells(
    [
        resumed("states", save, target, ranks, Requantized(LOOSE))
        for ranks, others in ((1, [(SAVED[0], bnb("AdamW8bit", 0))]), (3, OTHER_STAGES), (4, OTHER_STAGES))
        for save, target in [*((save, save.setup) for save in SAVED), *others]
    ]
)
def test_at_another_degree_they_are_within_the_bound(cell: Cell, facts: list[Any]) -> None:
    """Into their own stage, and into others; one rank holds everything without ZeRO, too."""
    cell.expected.check(facts)


@cells(
    [resumed("states", save, save.setup, 3, Exact()) for save in OTHERS]
    + [resumed("states", save, save.setup, 3, Requantized(LOOSE)) for save in OTHERS_8BIT]
)
def test_states_of_other_optimizers_come_back(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


#: A map that is known by its name, and by its size.
KNOWN = [configured(MAPPED_1, states=BY_NAME), configured(MAPPED_3, states=BY_SIZE)]


@cells([resumed("a map", save, target, ranks, Exact()) for ranks in (1, 3) for target in KNOWN for save in MAPPED])
def test_a_map_that_the_config_names_is_whole_on_every_rank(cell: Cell, facts: list[Any]) -> None:
    """From one stage into the others."""
    cell.expected.check(facts)


QUANTIZED = made_by_hand(SAVED[0])


@cells(
    [
        resumed("states", QUANTIZED, QUANTIZED.setup, 3, Requantized(LOOSE)),
        resumed("states", QUANTIZED, bnb("AdamW8bit", 3), 3, Requantized(LOOSE)),
        resumed("a map", made_by_hand(MAPPED[2]), configured(MAPPED_3, states=BY_NAME), 3, Exact()),
    ]
)
def test_folders_made_by_hand_are_read(cell: Cell, facts: list[Any]) -> None:
    cell.expected.check(facts)


def without_latest(copy: Path) -> None:
    (copy / "latest_universal").unlink()


def tag_alone(copy: Path) -> None:
    """The folder becomes that of the tag."""
    without_latest(copy)
    for path in (copy / "step4_universal").iterdir():
        path.rename(copy / path.name)
    (copy / "step4_universal").rmdir()


@cells(
    [
        resumed(name, made_by_hand(save), configured(target, states=BY_SIZE, mode="require"), 3, Exact(), change)
        for target in (MAPPED_1, MAPPED_3)
        for save in MAPPED
        for name, change in {"the folder around a tag": without_latest, "the folder of a tag": tag_alone}.items()
    ]
)
def test_a_folder_in_a_folder_made_by_hand_loads_without_a_latest_file(cell: Cell, facts: list[Any]) -> None:
    """As BLOOM's are published; a map is known by its size."""
    cell.expected.check(facts)


LLAMA = Parallel("megatron", "llama", tp=2, stage=1)
MEGATRON = {"options": {"tp_preset": "megatron-core"}}
#: Rows, columns, gated halves and a vocabulary in 8 bits, and their conversion.
BOTH = Save(
    LLAMA,
    1,
    "universal_states_jobs.keep_both",
    MEGATRON,
    source=Save(LLAMA, 2, "universal_states_jobs.save_each"),
)


@cells(
    [
        Cell(
            f"TP {tp} on {ranks}",
            BOTH,
            "universal_states_jobs.load",
            ranks,
            {"setup": replace(LLAMA, tp=tp), **MEGATRON},
        )
        for ranks, tp in ((1, 1), (2, 2), (4, 2))
    ]
)
def test_at_any_tensor_parallel_degree_they_are_what_the_native_checkpoint_gives(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert found.formats == ["native", "universal"] and found.differences == [], found.where
        assert found.coded > 0 and found.requantized[0] == found.requantized[1], found.where
        assert (found.requantized[0] > 0) == (cell.ranks != 2), found.where


def refused(name: str, save: Save, target: Setup, expected: Refuses, **more: Any) -> Cell:
    case = {"setup": target, "model": "WideLM"}
    return Cell(name, save, "refusal_jobs.refuse", 2, case, expected=expected, **more)


UNTOLD = Refuses("ElasticCkptError", ("my_map", '"states": {"my_map": "replicated"}'))


@cells(
    [
        refused(
            save.setup.name,
            made_by_hand(save),
            save.setup,
            UNTOLD,
            fits=(made_by_hand(save), {"setup": configured(save.setup, states=BY_NAME), "model": "WideLM"}),
        )
        for save in (MAPPED[0], MAPPED[2])
    ]
)
def test_what_no_shape_tells_is_refused_with_the_line_that_settles_it(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)
    (text,) = facts[0].texts
    assert "two conversions" not in text


def lost(pattern: str) -> Callable[[Path], None]:
    def apply(copy: Path) -> None:
        for path in sorted((copy / "step4_universal").glob(pattern)):
            path.unlink()

    return apply


#: Files that are removed, by what they are removed from; a folder that is made by hand has no list of its files.
LOST = [
    ("zero/optimizer_state.pt", SAVED[0]),
    ("zero/bulk/absmax1.pt", SAVED[0]),
    ("zero/*/absmax2.pt", SAVED[0]),
    ("zero/*/state1.pt", SAVED[0]),
    ("zero/*/step.pt", SAVED[0]),
    ("zero/bulk/qmap1.pt", made_by_hand(SAVED[0])),
    ("zero/*/absmax1.pt", made_by_hand(SAVED[0])),
    ("zero/bulk/fp32.pt", made_by_hand(SAVED[0])),
    ("zero/optimizer_state.pt", MAPPED[0]),
    ("zero/*/trail.pt", MAPPED[0]),
    ("zero/bulk/my_map.pt", made_by_hand(MAPPED[0])),
    ("zero/gain/count.pt", made_by_hand(MAPPED[0])),
]


def without(pattern: str, save: Save) -> Cell:
    target = KNOWN[0] if save.setup == MAPPED_1 else save.setup
    name = f"{pattern} of {save.setup.name}{', by hand' * save.job.endswith('by_hand')}"
    words = (f"/{pattern.rpartition('/')[2]}", "" if "*" in pattern else f"/{pattern}", "missing")
    return refused(name, save, target, Refuses("DamagedError", words), change=lost(pattern))


@cells([without(pattern, save) for pattern, save in LOST])
def test_a_missing_file_is_named_by_loads_and_commands(cell: Cell, facts: list[Refused], tmp_path: Path) -> None:
    cell.expected.check(facts)
    config, folder = tmp_path / "config.json", facts[0].case["folder"]
    config.write_text(json.dumps({"elastic_checkpoint": {"states": BY_NAME}}))
    for words, code in (
        (["verify", folder], 1),
        (["inspect", folder], 1),
        (["convert", folder, str(tmp_path / "dcp"), "--to", "dcp"], 3),
    ):
        result = CliRunner().invoke(app, [*words, "--config", str(config), "--json"], catch_exceptions=False)
        assert result.exit_code == code and cell.expected.words[0] in result.stdout, result.stdout


def test_the_commands_know_these_states(saves: Saves, tmp_path: Path) -> None:
    """What they read is what the native checkpoint has, dequantized; checksums are right."""
    config = tmp_path / "config.json"  # of the native one, whose shapes tell nothing of the map
    config.write_text(json.dumps({"elastic_checkpoint": {"states": BY_NAME}}))
    for save in (SAVED[0], MAPPED[0]):
        universal, source = str(saves.folder(save)), str(saves.folder(native(save.setup)))
        for words in (
            ["diff", source, universal, "--config", str(config)],
            ["verify", "--full", universal],
            ["inspect", universal],
        ):
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            assert result.exit_code == 0, result.output
    assert "replicated" in result.output and "my_map" in result.output


@cells([Cell("ZeRO-1", MAPPED[0], "universal_states_jobs.deepspeed_loads", 3, {"setup": MAPPED_1})])
def test_deepspeed_loads_what_is_shared_by_all_beside_the_states_that_it_knows(cell: Cell, facts: list[Any]) -> None:
    """A map and a count are where DeepSpeed's loader does not look: it restores masters and momentum."""
    assert facts == [{}] * 3


DCP = Save(
    MAPPED_3, 1, "optimizer_jobs.convert", {"to": "dcp", "options": {"states": BY_NAME}}, source=native(MAPPED_3)
)


@cells(
    [
        Cell(str(states), DCP, "optimizer_jobs.load", 2, {"setup": configured(MAPPED_1, states=states)})
        for states in (BY_NAME, BY_SIZE)
    ]
)
def test_a_map_goes_to_a_folder_of_dcp_and_back(cell: Cell, facts: list[Any]) -> None:
    """Beside the states of each parameter, as ``get_state_dict`` has it."""
    for found in facts:
        # these folders have no state of a schedule: the live one begins anew, from the live lr
        assert found.differences.keys() <= {"groups"} and found.states == {}, found.where


def test_8_bit_states_do_not_go_to_a_folder_of_dcp(saves: Saves, tmp_path: Path) -> None:
    source = saves.folder(native(SAVED[0].setup))
    words = ["convert", str(source), str(tmp_path / "8bit"), "--to", "dcp"]
    refusal = CliRunner().invoke(app, words, catch_exceptions=False)
    assert refusal.exit_code == 3 and "8-bit states (state1, state2)" in refusal.output.replace("\n", " ")
