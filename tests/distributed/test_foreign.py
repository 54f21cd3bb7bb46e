"""Checkpoints as BLOOM's, gpt-neox's and Megatron-DeepSpeed's code left them, at other topologies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import eq
from typing import Any

import pytest
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor

from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.facts import Loaded, Refused, Refuses
from tests.distributed.foreign_changes import drifted, is_averaged_by_bloom, is_norm, recut_neox, with_universal_01
from tests.distributed.foreign_folders import (
    TAG,
    as_bloom,
    as_deeperspeed_03,
    as_deepspeed_05,
    as_megatron,
    as_neox,
    read,
)
from tests.distributed.parallel_models import Parallel

BLOOM = Parallel("bloom", "real", 2, 2, 1, "bf16_fp32acc")
NEOX = Parallel("neox", "real", 2, 1, 1, "fp16")
NEOX_J = Parallel("neoxj", "real", 2, 1, 1, "fp32")
NEOX_J_TP1 = replace(NEOX_J, tp=1)
THIRDS = Parallel("thirds", "real", 2, 1, 1, "fp32")
PRESETS = {
    "bloom": "bloom",
    "neox": "gpt-neox",
    "neoxj": "gpt-neox-gptj-residual",
    "thirds": "megatron-deepspeed-contiguous",
}
#: Of losses: rounding, which other sums of low precision have more of.
TOLERANCES = {"bloom": 5e-3, "neox": 1e-3, "neoxj": 2e-6, "thirds": 2e-6}
DRIFTED = "3.input_layernorm.weight"


def written(setup: Parallel, writes: Callable[..., object]) -> Save:
    """Trained and saved by today's DeepSpeed, and written again as older code did."""
    run = Save(setup, setup.tp * setup.pp, "foreign_jobs.save_each")
    return Save(setup, 1, "foreign_jobs.rewrite", {"writes": writes}, source=run)


bloom, thirds, neoxj = partial(as_bloom, tp=2, pp=2), partial(as_megatron, tp=2), partial(as_neox, gpt_j=True)
drifted_thirds = partial(drifted, is_drifted=partial(eq, DRIFTED), writes=thirds)
OLD = {
    "bloom": written(BLOOM, bloom),
    "bloom_early": written(BLOOM, partial(bloom, early=True)),
    "bloom_drifted": written(BLOOM, partial(drifted, is_drifted=is_averaged_by_bloom, writes=bloom)),
    "neox": written(NEOX, as_neox),
    "neox_242": written(NEOX, recut_neox),
    "neox_drifted": written(NEOX, partial(drifted, is_drifted=is_norm, writes=as_neox)),
    "neox_2021": written(NEOX, as_deeperspeed_03),
    "neox_2022": written(NEOX, as_deepspeed_05),
    "neoxj": written(NEOX_J, neoxj),
    "neoxj_beside": written(NEOX_J, partial(neoxj, configs="configs")),
    "neoxj_unsaid": written(NEOX_J, partial(as_neox, configs="")),
    "neoxj_tp1": written(NEOX_J_TP1, neoxj),
    "thirds": written(THIRDS, thirds),
    "thirds_unsaid": written(THIRDS, partial(thirds, fpdt=False)),
    "thirds_first": written(THIRDS, partial(drifted_thirds, means=False)),
    "thirds_mean": written(THIRDS, drifted_thirds),
}
#: Beside its native folder, whose truth it has.
UNIVERSAL = Save(BLOOM, 1, "foreign_jobs.rewrite", {"writes": with_universal_01}, source=OLD["bloom"])


def options_of(setup: Parallel, preset: str | None = "", **options: Any) -> dict[str, Any]:
    """With the preset of the code base, another one, or none."""
    name = PRESETS[setup.kind] if preset == "" else preset
    return {"report": False, **({"tp_preset": name} if name else {}), **options}


def to(
    setup: Parallel, ranks: int, tp: int, pp: int, *names: str, preset: str | None = "", **options: Any
) -> list[Cell]:
    """Old folders into an engine of other degrees, to be compared bit by bit, and to go on training."""
    target, options = replace(setup, tp=tp, pp=pp), options_of(setup, preset, **options)
    case = {"setup": target, "options": options}
    title = f"to {target.name}-n{ranks}, {options.get('tp_preset', 'no preset')}"
    return [Cell(f"{name} {title}", OLD[name], "foreign_jobs.resume", ranks, case) for name in names]


def check(cell: Cell, loads: list[Loaded], loss_gap: float = float("inf")) -> None:
    """What was saved came back; of copies that drifted, there is no run to compare the losses with."""
    assert cell.save is not None
    setup = cell.save.setup
    topology = (2, 4, 2) if cell.save == OLD["neox_242"] else (setup.tp, setup.pp, 1)
    for load in loads:
        source = load.report.source
        assert (source.tp, source.pp, source.partition_degree) == topology, load.where
        assert load.differences == {}, (load.where, load.differences)
        assert load.loss_gap <= loss_gap, (load.where, load.loss_gap)


@pytest.mark.nightly
@cells(
    [
        *to(BLOOM, 1, 1, 1, "bloom", "bloom_early"),
        *to(BLOOM, 2, 1, 1, "bloom"),
        *to(BLOOM, 2, 1, 2, "bloom"),
        *to(BLOOM, 2, 2, 1, "bloom"),
        *to(BLOOM, 4, 4, 1, "bloom"),
        *to(NEOX, 1, 1, 1, "neox", "neox_242"),
        *to(NEOX, 1, 1, 1, "neox", "neox_242", preset=None),
        # the saved configuration says otherwise
        *to(NEOX, 1, 1, 1, "neox", preset=PRESETS["neoxj"]),
        *to(NEOX, 2, 1, 2, "neox", "neox_242"),
        *to(NEOX, 4, 2, 2, "neox_242"),
        *to(NEOX_J, 1, 1, 1, "neoxj_unsaid", "neoxj_tp1"),
        *to(NEOX_J, 1, 1, 1, "neoxj", "neoxj_beside", preset="gpt-neox"),
        *to(NEOX_J, 1, 1, 1, "neoxj_unsaid", preset=None),
        *to(NEOX_J, 2, 2, 1, "neoxj", "neoxj_tp1"),
        *to(NEOX_J, 4, 4, 1, "neoxj"),
        *to(NEOX_J, 4, 4, 1, "neoxj_unsaid", preset=None),
        *to(THIRDS, 1, 1, 1, "thirds"),
    ]
)
def test_an_old_folder_loads_at_another_topology(cell: Cell, facts: list[Loaded]) -> None:
    assert cell.save is not None
    check(cell, facts, TOLERANCES[cell.save.setup.kind])


def test_deepspeed_misreads_the_topology_of_gpt_neox(saves: Saves) -> None:
    read_as = get_model_3d_descriptor(str(saves.folder(OLD["neox_242"]) / TAG))
    assert (read_as.tp_degree, read_as.pp_degree, read_as.dp_degree) == (8, 1, 2), "then it is not as gpt-neox's are"


@cells([*to(BLOOM, 1, 1, 1, "bloom_drifted"), *to(NEOX, 1, 1, 1, "neox_drifted")])
def test_copies_that_drifted_are_averaged_where_the_code_base_says_so(cell: Cell, facts: list[Loaded]) -> None:
    check(cell, facts)
    for load in facts:
        assert re.search("replicated, but different when saved: .*; the mean was taken", " | ".join(load.report.notes))


def refused(name: str, setup: Parallel, preset: str | None, *words: str) -> Cell:
    """A folder that one rank must not load; that of this kind does, with its preset."""
    target = replace(setup, tp=1, pp=1)
    case = {"setup": target, "options": options_of(setup, preset)}
    fits = (OLD[setup.kind], {"setup": target, "options": options_of(setup)})
    expected = Refuses("ElasticCkptError", words)
    return Cell(name, OLD[name], "foreign_jobs.refuse", 1, case, expected=expected, fits=fits)


CHOICES = [f'"replicated_params": "{word}"' for word in ("first", "mean")]


@cells([refused("thirds_first", THIRDS, "", DRIFTED, *CHOICES)])
def test_of_copies_that_drifted_somebody_has_to_choose_where_the_code_base_does_not_say(
    cell: Cell, facts: list[Refused], saves: Saves
) -> None:
    cell.expected.check(facts)
    truth = read(saves.folder(OLD["thirds_first"]) / "truth.pt")
    apart = (truth["masters"][DRIFTED].double() - truth["seconds"][DRIFTED, "fp32"].double()).abs()
    (text,) = facts[0].texts
    assert f"2 copies, at most {apart.max():.3g} apart" in text


@cells([cell for word in ("first", "mean") for cell in to(THIRDS, 1, 1, 1, f"thirds_{word}", replicated_params=word)])
def test_the_choice_is_taken(cell: Cell, facts: list[Loaded]) -> None:
    check(cell, facts)
    for load in facts:
        assert f"{load.case['options']['replicated_params']} was taken" in " | ".join(load.report.notes)


UNDECIDED = ("query_key_value", '"kind": "column"', '"sub_parameters": [1, 1, 1]', '"tp_preset"')
INTERLEAVED = "megatron-deepspeed-interleaved"


@cells(
    [
        refused("bloom", BLOOM, None, *UNDECIDED),
        refused("neoxj", NEOX, None, "gpt_j_residual: True", "gpt_j_residual: False", '"configs"'),
        refused("neox_2021", NEOX, "", "DeeperSpeed 0.3.15", "mp_rank_00_model_states.pt", "0.6.2"),
        refused("neox_2022", NEOX, "", "before 0.6.2", "mp_rank_00_optim_states.pt", "param_shapes"),
        refused("thirds", THIRDS, INTERLEAVED, "ds_sequence_parallel_fpdt", PRESETS["thirds"]),
    ]
)
def test_what_cannot_be_known_or_read_is_refused(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


@cells(to(THIRDS, 1, 1, 1, "thirds_unsaid", preset=INTERLEAVED))
def test_with_the_preset_of_older_code_fused_attention_comes_out_wrong(
    cell: Cell, facts: list[Loaded], saves: Saves
) -> None:
    """Where the save does not say that it is of newer code."""
    (found,) = facts
    masters = read(saves.folder(OLD["thirds_unsaid"]) / "truth.pt")["masters"]
    attention = {f"masters {name}" for name in masters if re.fullmatch(r".*query_key_value\.(weight|bias)", name)}
    assert {key for key in found.differences if key.startswith("masters")} == attention
    assert [key for key in found.differences if "query_key_value" not in key] == []


@cells(
    [
        Cell(
            f"to {target.name}",
            UNIVERSAL,
            "foreign_jobs.resume",
            2,
            {"setup": target, "options": options_of(BLOOM), "tag": f"{TAG}_universal"},
        )
        for target in (replace(BLOOM, pp=1), replace(BLOOM, tp=1, pp=1))
    ]
)
def test_blooms_universal_folder_loads(cell: Cell, facts: list[Loaded]) -> None:
    """Which has no param groups."""
    for found in facts:
        assert found.differences.keys() <= {"groups"}, found.where
        notes = " | ".join(found.report.notes)
        assert re.search("step.*counters|counters.*step", notes) and "param group" in notes
