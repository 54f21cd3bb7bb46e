"""Inspection of metadata made by hand: what is counted, what is odd, what is missing."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from elastic_ckpt.cli.inspect import clean, file_tree, parameter_table, report
from elastic_ckpt.cli.output import SafeConsole, plain
from elastic_ckpt.core.chunks import (
    BlockCode,
    FlatTensors,
    ListedChunks,
    PartitionedChunks,
    PartitionRule,
    StorageChunk,
    by_rank,
    listed,
)
from elastic_ckpt.core.declared import declared_by
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import SequenceParallel
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    MASTER,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StateFacts,
    TensorMetadata,
)
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.core.tp_rules import Rule
from elastic_ckpt.core.training_state import BatchSizes, LossScale, TrainingState
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError
from elastic_ckpt.formats.base import Checkpoint, Found
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.peek import Peeked
from elastic_ckpt.formats.saved_config import Degrees
from elastic_ckpt.sharding.rules import Preset, ShardingRules
from elastic_ckpt.tools.files import entries_of, file_sizes
from elastic_ckpt.tools.inspection import Inspection, inspect_checkpoint, missing_files
from elastic_ckpt.tools.inspection.facts import Evidence

FOLDER = "/ckpt/step7"
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
FILES = (SourceFile(f"{FOLDER}/{MODEL}", 1 << 20), SourceFile(f"{FOLDER}/{OPTIMIZER}", 1 << 20))
CODE = BlockCode(BlockFormat(256, "absmax1", Codebook(())), 0, 0)
SOURCE = SourceFacts("native", FOLDER, "step7", 1, 1, "0.19.8")


def tensor(name: str, key: str, *shards: tuple[int, ...], dtype: str = "float32", **more: Any) -> TensorMetadata:
    """A tensor with one chunk a shard."""
    numels = [1] * len(shards)
    for number, shape in enumerate(shards):
        for size in shape:
            numels[number] *= size
    code = more.pop("code", None)
    sources = (listed(StorageChunk(FlatRange(0, numel), 1, 0, code)) if numel else listed() for numel in numels)
    chunks = tuple(chain.from_iterable(sources))
    return TensorMetadata(name, key, shards[0], dtype, chunks, shards=shards if len(shards) > 1 else (), **more)


def catalog_of(
    *tensors: TensorMetadata, parameters: dict[str, SavedParameter] | None = None, **more: Any
) -> CheckpointMetadata:
    """A metadata in which every tensor with a master is a parameter of group 0."""
    made = {t.name: SavedParameter(t.shape, 0, (("step", 7.0),), shards=t.shards) for t in tensors if t.key == MASTER}
    fields = {"source": SOURCE, "files": FILES, "groups": ({"lr": 0.5},), **more}
    return CheckpointMetadata(
        parameters=made | (parameters or {}), tensors={(t.name, t.key): t for t in tensors}, **fields
    )


def found_of(*names: str, universal: bool = False) -> Found:
    return Found("universal" if universal else "native", FOLDER, "step7", sort_names(names, universal))


def peeked_of(**more: Any) -> Peeked:
    counters = {"global_steps": 7, "skipped_steps": 2, "dp_world_size": more.pop("dp", 1)}
    state = TrainingState(counters, BatchSizes(8, 2, 4), None, more.pop("scale", None), False, {})
    fields: dict[str, Any] = {
        "config": {},
        "degrees": Degrees(1, 1, SequenceParallel()),
        "weight_dtypes": ("float32",),
        "parameters": (),
    }
    rest = {"client_state": (), "unnamed": {}, "holds_optimizer": False, **more}
    return Peeked(training_state=state, ds_version="0.19.8", **{**fields, **rest})


def inspected(
    metadata: CheckpointMetadata | None,
    names: tuple[str, ...] = (MODEL, OPTIMIZER),
    peeked: Peeked | None = None,
    **more: Any,
) -> Inspection:
    peeked = peeked or peeked_of()
    checkpoint = None if metadata is None else Checkpoint(metadata, peeked.training_state, FILES[0].path, 2)
    book, presets = more.pop("book", ShardingRules()), more.pop("presets", ())
    fields = {"sizes": dict.fromkeys(names, 10), "tags": ("step7",), **more}
    evidence = Evidence(found_of(*names), peeked=peeked, checkpoint=checkpoint, **fields)
    return inspect_checkpoint(evidence, book, presets)


def kinds(inspection: Inspection) -> list[tuple[str, str]]:
    return [(finding.level, finding.kind) for finding in inspection.findings]


# --- what is counted --------------------------------------------------------------------------------------------------


def test_states_are_counted_by_key_and_kind() -> None:
    qmap = ReplicatedState("max1", "float32", (3,), 1, 0, 5)
    parameters = {
        "a": SavedParameter((4, 8), 0, (("step", 7),), (qmap,)),
        "b": SavedParameter((300,), 0, (("step", 9),), (qmap,)),
    }
    inspection = inspected(
        catalog_of(
            tensor("a", MASTER, (4, 8)),
            tensor("b", MASTER, (300,)),
            tensor("a", "state1", (2, 4, 8)),
            tensor("b", "state1", (300,), dtype="uint8", code=CODE),
            tensor("a", "row_var", (4,), is_whole=True),
            parameters=parameters,
            states=StateFacts(opaque={"odd": "a list"}),
        )
    )
    found = [
        (s.key, s.kind, s.dtype, s.parameters, s.rows, s.block_numel, s.numel, s.nbytes, s.values)
        for s in inspection.states
    ]
    assert found == [
        ("max1", "replicated", "float32", 2, 1, 0, 3, 12, ()),
        ("row_var", "whole", "float32", 1, 1, 0, 4, 16, ()),
        ("state1", "blocks", "uint8", 1, 1, 256, 300, 300, ()),
        ("state1", "elementwise", "float32", 1, 2, 0, 64, 256, ()),
        ("step", "scalar", "int", 2, 1, 0, 0, 0, (7.0, 9.0)),
        ("odd", "opaque", "", 0, 1, 0, 0, 0, ()),
    ]
    assert inspection.masters.numel == 332 and inspection.masters.nbytes == 1328
    assert kinds(inspection) == [("error", "opaque_state")] and not inspection.ok


def test_parameters_have_roles_ties_groups_and_all_their_bytes() -> None:
    replica = tensor("tied", MASTER, (6,))
    inspection = inspected(
        catalog_of(
            tensor("tied", MASTER, (6,)),
            tensor("tied", "exp_avg", (6,)),
            tensor("base", FROZEN, (5,), dtype="bfloat16"),
            tensor("mask", BUFFER, (3,), dtype="int64"),
            aliases={"head": "tied"},
            replicas={("tied", MASTER): (replica,)},
        )
    )
    trained, frozen, buffer = inspection.parameters
    assert (trained.name, trained.role, trained.group, trained.tied) == ("tied", "trained", 0, ("head",))
    assert (trained.states, trained.copies, trained.nbytes) == (("exp_avg", "step"), 2, 3 * 6 * 4)
    assert (frozen.name, frozen.role, frozen.dtype, frozen.nbytes) == ("base", "frozen", "bfloat16", 10)
    assert (buffer.name, buffer.role, buffer.shape, buffer.nbytes) == ("mask", "buffer", (3,), 24)
    assert inspection.groups[0].members == 1 and inspection.groups[0].numel == 6
    assert ("note", "twins") in kinds(inspection) and inspection.ok
    assert "24 bytes" in next(f.text for f in inspection.findings if f.kind == "twins")


def test_where_states_are_unnamed_weights_are_neither_frozen_nor_trained() -> None:
    problem = MismatchError("cannot be told", file="x")
    inspection = inspected(catalog_of(tensor("w", FROZEN, (5,)), groups=()), unnamed=problem)
    assert inspection.weights.numel == 5 and inspection.frozen.tensors == 0
    assert inspection.parameters[0].role == "weight"
    assert kinds(inspection) == [("warning", "unnamed_states")] and inspection.ok
    refused = inspected(catalog_of(tensor("w", FROZEN, (5,)), groups=()), unnamed=UnsupportedError("a pipeline"))
    assert kinds(refused) == [("error", "unnamed_states")] and not refused.ok


# --- who saved it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dtype", "names", "precision", "told_by", "is_odd"),
    [
        ({"bf16": {"enabled": True}}, "bfloat16", ("bf16_" + OPTIMIZER,), "bf16", 3, False),
        ({"bfloat16": {"enabled": True}}, "bfloat16", (OPTIMIZER,), "bf16", 2, False),
        ({"fp16": {"enabled": True}}, "float16", (OPTIMIZER,), "fp16", 2, False),
        ({"fp16": {"enabled": False}}, "float32", (OPTIMIZER,), "fp32", 2, False),
        (None, "float16", (OPTIMIZER,), "fp16", 1, False),
        (None, "bfloat16", ("bf16_" + OPTIMIZER,), "bf16", 2, False),
        ({}, "bfloat16", (OPTIMIZER,), "fp32", 2, True),
    ],
)
def test_precision(
    config: dict | None, dtype: str, names: tuple[str, ...], precision: str, told_by: int, is_odd: bool
) -> None:
    peeked = peeked_of(config=config, weight_dtypes=(dtype,))
    inspection = inspected(catalog_of(tensor("w", MASTER, (5,))), (MODEL, *names), peeked)
    assert inspection.run.precision == precision
    assert len(inspection.run.precision_from) == told_by
    assert (("warning", "precision") in kinds(inspection)) == is_odd


def test_the_run() -> None:
    peeked = peeked_of(config={"optimizer": {"type": "AdamW"}}, scale=LossScale(True, {"cur_scale": 64}))
    run = inspected(catalog_of(tensor("w", MASTER, (5,))), peeked=peeked).run
    assert (run.step, run.samples, run.skipped_steps) == (7, None, 2)
    assert (run.zero_stage, run.dp, run.tp, run.pp) == (1, 1, 1, 1)
    assert (run.global_batch, run.micro_batch, run.accumulation_steps) == (8, 2, 4)
    assert run.optimizer == "AdamW" and run.optimizer_from.startswith("saved config")
    assert run.loss_scale == {"kind": "dynamic", "cur_scale": 64} and run.lr_scheduler is None


def test_oddities_of_the_saved_config() -> None:
    zero = {"stage": 2, "round_robin_gradients": True, "elastic_checkpoint": True}
    peeked = peeked_of(config={"zero_optimization": zero, "elastic_checkpoint": {"align_partitions": 4096}})
    found = kinds(inspected(catalog_of(tensor("w", MASTER, (5,))), peeked=peeked))
    assert found == [("warning", "legacy_elastic"), ("note", "round_robin_gradients"), ("note", "align_partitions")]
    calm = peeked_of(config={"zero_optimization": {**zero, "stage": 3, "elastic_checkpoint": False}})
    assert kinds(inspected(catalog_of(tensor("w", MASTER, (5,))), peeked=calm)) == []


# --- what is odd ------------------------------------------------------------------------------------------------------


def of_shards(count: int, *ranges: tuple[int, int, int]) -> tuple[ListedChunks, ...]:
    """Chunks that are given as (start, stop, shard), by shard."""
    found = [[StorageChunk(FlatRange(a, b), 0, 0) for a, b, of in ranges if of == shard] for shard in range(count)]
    return tuple(ListedChunks(tuple(chunks)) for chunks in found)


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        (((0, 4, 0), (4, 6, 0), (0, 6, 1)), None),
        (((0, 4, 0), (0, 6, 1)), "elements 4 to 6 of tensor-parallel rank 0 in no file"),
        (((0, 6, 0), (1, 6, 1)), "elements 0 to 1 of tensor-parallel rank 1 in no file"),
        (((0, 4, 0), (3, 6, 0), (0, 6, 1)), "elements 3 to 4 of tensor-parallel rank 0 in two files"),
        (((0, 6, 0),), "elements 0 to 6 of tensor-parallel rank 1 in no file"),
    ],
)
def test_holes(ranges: tuple[tuple[int, int, int], ...], found: str | None) -> None:
    torn = TensorMetadata("w", MASTER, (2, 3), "float32", of_shards(2, *ranges), shards=((2, 3), (2, 3)))
    holes = [finding for finding in inspected(catalog_of(torn)).findings if finding.kind == "incomplete_tensor"]
    assert [finding.found for finding in holes] == ([] if found is None else [found])


def test_tensors_are_counted_in_each_file_whether_chunks_are_listed_or_computed() -> None:
    flat = FlatTensors(files=range(1, 4), byte_offsets=by_rank([0] * 3), numel=4, itemsize=4)
    found = [
        TensorMetadata("a", MASTER, (6,), "float32", (PartitionedChunks(PartitionRule(6, 4), flat),)),
        TensorMetadata("b", MASTER, (5,), "float32", (PartitionedChunks(PartitionRule(5, 4, shift=6), flat),)),
        TensorMetadata("c", FROZEN, (4,), "float32", of_shards(1, (0, 1, 0), (1, 4, 0))),
    ]
    metadata = replace(catalog_of(*found), files=tuple(SourceFile(f"/ckpt/step4/{at}.pt", 999) for at in range(4)))
    metadata = replace(metadata, source=replace(metadata.source, folder="/ckpt/step4"))
    entries = {
        entry.name: dict(entry.tensors) for entry in entries_of({f"{at}.pt": 999 for at in range(4)}, 1, metadata)
    }
    assert entries == {"0.pt": {FROZEN: 1}, "1.pt": {MASTER: 1}, "2.pt": {MASTER: 2}, "3.pt": {MASTER: 1}}


def test_what_does_not_add_up_is_an_error() -> None:
    torn = replace(tensor("torn", MASTER, (9,)), sources=of_shards(1, (0, 8, 0)))
    long = tensor("long", MASTER, (1 << 18, 2))
    gone = {"gone": SavedParameter((4,), 0, (("step", 7.0),))}
    differing = ReplicatedState("max1", "float32", (3,), 1, 0, 5, differs=True)
    stateful = {"stateful": SavedParameter((4,), 1, (("step", 7.0),), (differing,))}
    stateless = {"stateless": SavedParameter((4,), 1, ())}
    whole = [tensor("stateful", MASTER, (4,)), tensor("stateless", MASTER, (4,))]
    metadata = catalog_of(torn, long, *whole, parameters=gone | stateful | stateless, warnings=("beware",))
    inspection = inspected(metadata)
    by_kind = {finding.kind: finding for finding in inspection.findings}
    assert by_kind["incomplete_tensor"].parameter == "torn" and "8 to 9" in str(by_kind["incomplete_tensor"].found)
    assert by_kind["short_file"].parameter == "long" and by_kind["short_file"].expected == f"{1 << 21} bytes or more"
    assert by_kind["no_master"].parameter == "gone"
    assert by_kind["partial_states"].parameter == "stateless"
    assert by_kind["replicated_state"].level == by_kind["reader"].level == "warning"
    assert [finding.level for finding in inspection.findings] == ["error"] * 4 + ["warning"] * 2


def test_latest_and_other_tags() -> None:
    metadata = catalog_of(tensor("w", MASTER, (5,)))
    two = ("step9", "step7")
    assert kinds(inspected(metadata, tags=two, latest={"latest": "step7"})) == [("note", "tags")]
    assert kinds(inspected(metadata, tags=two, latest={"latest": "step9"})) == [("note", "latest"), ("note", "tags")]
    assert kinds(inspected(metadata, latest={"latest": "gone"})) == [("warning", "latest")]
    misled = inspected(metadata, latest={"latest": "gone"}, misled=DamagedError("no such tag"))
    assert kinds(misled) == [("error", "latest")] and not misled.ok


# --- which files are missing ------------------------------------------------------------------------------------------

SHARD = "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
ZERO3 = "zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt"


@pytest.mark.parametrize(
    ("names", "peeked", "missing"),
    [
        ([MODEL, SHARD.format(0, 0), SHARD.format(2, 0)], None, [SHARD.format(1, 0)]),
        ([MODEL, SHARD.format(0, 0)], peeked_of(dp=3), [SHARD.format(1, 0), SHARD.format(2, 0)]),
        ([MODEL], peeked_of(), [SHARD.format(0, 0)]),
        ([MODEL], peeked_of(config={"bf16": {}}, weight_dtypes=("bfloat16",)), ["bf16_" + SHARD.format(0, 0)]),
        ([MODEL], peeked_of(holds_optimizer=True), []),
        ([MODEL], peeked_of(without_states=True), []),
        ([MODEL, "bf16_" + SHARD.format(1, 0)], None, ["bf16_" + SHARD.format(0, 0)]),
        ([ZERO3.format(0, 0), SHARD.format(0, 0), SHARD.format(1, 0)], None, [ZERO3.format(1, 0)]),
        (
            [MODEL, SHARD.format(0, 0)],
            peeked_of(degrees=Degrees(2, 1, SequenceParallel())),
            ["mp_rank_01_model_states.pt", SHARD.format(0, 1)],
        ),
        ([MODEL, SHARD.format(0, 0)], peeked_of(dp=10**15), []),
        (
            [MODEL, SHARD.format(0, 0), "layer_00-model_00-model_states.pt", "layer_02-model_01-model_states.pt"],
            peeked_of(parameters=("0.weight", "1.bias", "tied_modules.a.weight")),
            [
                f"layer_{place}-model_states.pt"
                for place in ("00-model_01", "01-model_00", "01-model_01", "02-model_00")
            ],
        ),
    ],
)
def test_missing_files(names: list[str], peeked: Peeked | None, missing: list[str]) -> None:
    evidence = Evidence(found_of(*names), dict.fromkeys(names, 10), peeked=peeked)
    assert list(missing_files(evidence)) == missing


def test_files_behind_links_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere" / "a" / "fp32.pt").write_bytes(b"123")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step7").mkdir()
    (tmp_path / "step7" / "zero").symlink_to(tmp_path / "elsewhere")
    assert file_sizes(replace(found_of(), folder=str(tmp_path / "step7"))) == {"zero/a/fp32.pt": 3}


def test_missing_parameters_of_a_universal_checkpoint() -> None:
    sizes = {MODEL: 1, "zero/a/fp32.pt": 1, "zero/optimizer_state.pt": 1}
    peeked = peeked_of(parameters=("a", "../b"))
    missing = missing_files(Evidence(found_of(MODEL, universal=True), sizes, peeked=peeked))
    assert missing == ("zero/../b/fp32.pt",)


def test_a_missing_file_is_told_once() -> None:
    refusal = DamagedError("a file is missing", file=f"{FOLDER}/{SHARD.format(1, 0)}")
    one = inspected(None, (MODEL, OPTIMIZER), peeked_of(dp=2), refusal=refusal)
    assert one.missing == (SHARD.format(1, 0),) and kinds(one) == [("error", "missing_file")]
    two = inspected(None, (MODEL, OPTIMIZER), peeked_of(dp=3), refusal=refusal)
    assert len(two.missing) == 2 and kinds(two) == [("error", "missing_file")] * 2
    assert not one.readable and one.run.step == 7 and one.run.dp == 2 and one.run.zero_stage is None
    assert [(entry.name, entry.kind, entry.dp) for entry in one.files] == [
        (MODEL, "model states", None),
        (OPTIMIZER, "optimizer states", 0),
    ]


def test_of_two_saves_in_one_folder_no_file_is_called_missing() -> None:
    names = (MODEL, OPTIMIZER, "bf16_" + OPTIMIZER)
    inspection = inspected(None, names, peeked_of(dp=2), refusal=DamagedError("two saves", file=FOLDER))
    assert inspection.missing == () and ("error", "clash") in kinds(inspection)


# --- tensor-parallel rules --------------------------------------------------------------------------------------------

SHARDED = replace(SOURCE, tp=2)


def sharded(**more: Any) -> CheckpointMetadata:
    return catalog_of(
        tensor("wide", MASTER, (4, 6), (4, 6)),
        tensor("narrow", MASTER, (8, 3), (8, 3)),
        tensor("norm", MASTER, (8,), (8,)),
        tensor("mask", BUFFER, (4, 6), (4, 6)),
        source=SHARDED,
        **more,
    )


def test_rules_of_the_checkpoint_the_user_and_nobody() -> None:
    info = {
        "parameter_with_row_parallelism_patterns": ["^narrow$"],
        "tp_replicated_parameter_patterns": ["^norm$"],
        "original_vocab_size": 61,
    }
    inspection = inspected(sharded(declared=declared_by(info)))
    told = {entry.name: (entry.shape, entry.rule) for entry in inspection.parameters}
    assert told == {
        "wide": ((8, 6), "column, dimension 0"),  # the converter's default, which no buffer is given to
        "narrow": ((8, 6), "row, dimension 1"),
        "norm": ((8,), "replicated"),
        "mask": ((4, 6), "replicated"),
    }
    assert inspection.rules.patterns == {"replicated": 1, "row": 1} and inspection.rules.vocabulary_rows == 61
    replicas = next(finding.text for finding in inspection.findings if finding.kind == "replicas")
    assert "rank: 1, 32 bytes" in replicas
    users = ShardingRules((Rule(pattern="wide", kind="row"),))
    mine = inspected(sharded(), book=users, presets=[Preset(name="x", description="", rules=[])])
    assert {entry.name: entry.shape for entry in mine.parameters if entry.role == "trained"} == {
        "wide": (4, 12),
        "narrow": None,
        "norm": (8,),
    }
    assert mine.rules.undecided == ("narrow",) and ("note", "undecided_shards") in kinds(mine) and mine.ok


def test_presets_that_know_the_undecided() -> None:
    knows_one = Preset(name="one", description="", rules=[Rule(pattern="wide", kind="column")])
    knows_both = Preset(name="both", description="", rules=[Rule(pattern="wide|narrow", kind="column")])
    leaves_open = Preset(name="open", description="", rules=[Rule(pattern=".*", kind="whole_only")])
    inspection = inspected(sharded(), presets=[knows_one, knows_both, leaves_open])
    assert inspection.rules.fitting_presets == {"both": 2}
    with_preset = inspected(sharded(), book=ShardingRules(preset=knows_both))
    assert with_preset.rules.preset == "both" and with_preset.rules.undecided == ()


def test_a_rule_that_the_shards_contradict() -> None:
    users = ShardingRules((Rule(pattern="narrow", kind="column", sub_parameters=[1, 6]),))
    inspection = inspected(sharded(), book=users)
    assert set(inspection.rules.contradictions) == {"narrow"}
    assert ("error", "contradiction") in kinds(inspection) and not inspection.ok


# --- what is printed --------------------------------------------------------------------------------------------------


def test_json_knows_every_value() -> None:
    odd = {"a": float("inf"), 3: {2, 1}, "b": (1, None, True), "c": b"raw", "d": object}
    assert plain(odd) == {"a": "inf", "3": ["1", "2"], "b": [1, None, True], "c": "b'raw'", "d": "<class 'object'>"}
    inspection = inspected(sharded(groups=({"lr": float("nan"), "betas": (0.9, 0.99)},)))
    written = json.loads(json.dumps({"ok": inspection.ok, **plain(inspection)}, allow_nan=False))
    assert written["groups"][0]["hyperparameters"] == {"lr": "nan", "betas": [0.9, 0.99]}
    assert written["ok"] is True and [item["name"] for item in written["parameters"]][:1] == ["wide"]


def test_text_of_a_checkpoint_does_nothing_to_a_terminal() -> None:
    assert clean("a[bold]b\nc") == r"a\[bold]b\nc"
    out, odd = io.StringIO(), "a\x1b[31m\x9b2J\u202eb\ud800"
    shown = Table(odd, title=odd, caption=odd)
    shown.add_row(odd)
    tree = Tree(odd)
    tree.add(odd)
    for part in (odd, escape(odd), shown, tree):
        SafeConsole(file=out, width=100).print(part)
    assert out.getvalue().replace("\n", "").isprintable() and r"\x1b[31m\x9b2J\u202eb\ud800" in out.getvalue()


def test_the_report_fits_and_names_everything() -> None:
    long = "model.layers." + "x" * 150 + ".weight"
    inspection = inspected(
        catalog_of(tensor(long, MASTER, (4, 6)), tensor("[red]odd[/]", BUFFER, (2,)), aliases={"head": long}),
        (MODEL, OPTIMIZER, "layer_00-model_states.pt"),
        refusal=DamagedError("broken [bold]badly[/]", remedy="restore " * 40),
        tags=tuple(f"step{number}" for number in range(60)),
    )
    out = io.StringIO()
    console = Console(file=out, width=100)
    for part in (*report(inspection), parameter_table(inspection), file_tree(inspection)):
        console.print(part)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    text = "".join(out.getvalue().split())
    for piece in (
        "[red]odd[/]",
        "broken[bold]badly[/]",
        "head=",
        "layer_00-model_states.pt",
        "60checkpoints",
    ):
        assert piece in text
