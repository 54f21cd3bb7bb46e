"""Inspection of metadata made by hand: what is counted, what is odd, what is missing."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from elastic_ckpt.cli.inspect import report
from elastic_ckpt.cli.output import plain
from elastic_ckpt.core.chunks import (
    BlockCode,
    ListedChunks,
    StorageChunk,
    chunks_of,
)
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    MASTER,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.core.shard_specs import ShardSpec, declared_by
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.core.values import BatchSizes, LossScale, TrainingState
from elastic_ckpt.errors import (
    AT_ITS_TOPOLOGY,
    DamagedError,
    ElasticCkptError,
    LayoutError,
    MismatchError,
    MissingFilesError,
    MixedSavesError,
    Remedy,
    UnknownLayoutError,
)
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.report import SafeConsole, literal
from elastic_ckpt.sharding.rules import ShardingRules
from elastic_ckpt.tools.expected_files import expected_files
from elastic_ckpt.tools.inspection import Finding, of_error
from elastic_ckpt.tools.inspection import inspected as inspect_metadata
from elastic_ckpt.tools.verification import OTHER, files_by_kind

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
    sources = (chunks_of(StorageChunk(FlatRange(0, numel), 1, 0, code)) if numel else chunks_of() for numel in numels)
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


def found_of(*names: str, folder: str = FOLDER, universal: bool = False) -> CheckpointInfo:
    return CheckpointInfo("universal" if universal else "native", folder, "step7", sort_names(names, universal))


def inspected(metadata: CheckpointMetadata, rules: ShardingRules | None = None, *refused: Finding) -> dict[str, Any]:
    scale = LossScale(True, {"cur_scale": 64})
    state = TrainingState(
        {"global_steps": 7, "global_samples": 9, "skipped_steps": 2}, BatchSizes(8, 2, 4), None, scale, False, {}
    )
    return inspect_metadata(metadata, state, rules or ShardingRules(), list(refused))


def kinds(inspection: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding.level, finding.kind) for finding in inspection["findings"]]


def test_frozen_weights_that_the_save_left_out_are_a_note() -> None:
    source = replace(SOURCE, zero_stage=2, frozen_recorded=False)
    (found,) = inspected(catalog_of(tensor("a", MASTER, (4, 8)), source=source))["findings"]
    assert (found.level, found.kind) == ("note", "frozen") and "exclude_frozen_parameters=True" in found.text


# --- what is counted --------------------------------------------------------------------------------------------------


def test_contents_are_counted_by_key_and_kind() -> None:
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
            tensor("a", "row_var", (4,), has_own_shape=True),
            tensor("mask", BUFFER, (3,), dtype="int64"),
            parameters=parameters,
        )
    )
    assert [tuple(each.values()) for each in inspection["contents"]] == [
        ("fp32", "weights", "float32", 2, 332, 1328, []),
        ("buffer", "weights", "int64", 1, 3, 24, []),
        ("max1", "replicated", "float32", 1, 3, 12, []),
        ("row_var", "whole", "float32", 1, 4, 16, []),
        ("state1", "2 values per element", "float32", 1, 64, 256, []),
        ("state1", "blocks of 256", "uint8", 1, 300, 300, []),
        ("step", "scalar", "int", 2, 0, 0, [7.0, 9.0]),
    ]
    assert inspection["groups"] == [{"members": 2, "numel": 332, "hyperparameters": {"lr": 0.5}}]


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
    keys = ("name", "role", "group", "tied", "states", "copies", "nbytes", "shape")
    assert [tuple(entry[key] for key in keys) for entry in inspection["parameters"]] == [
        ("tied", "trained", 0, ["head"], ["exp_avg", "step"], 2, 3 * 6 * 4, (6,)),
        ("base", "frozen", None, [], [], 1, 10, (5,)),
        ("mask", "buffer", None, [], [], 1, 24, (3,)),
    ]
    assert inspection["ok"]


def test_where_states_are_unnamed_weights_are_neither_frozen_nor_trained() -> None:
    metadata = catalog_of(tensor("w", FROZEN, (5,)), groups=())
    noted = inspected(metadata, None, Finding("note", "states", "cannot be told"))
    assert noted["parameters"][0]["role"] == "weight" and noted["ok"]
    assert not inspected(metadata, None, Finding("error", "states", "a pipeline"))["ok"]


def test_the_run() -> None:
    run = inspected(catalog_of(tensor("w", MASTER, (5,)), run={"swiglu": True}))["run"]
    assert (run["global_steps"], run["skipped_steps"], run["arguments"]) == (7, 2, {"swiglu": True})
    assert (run["global_batch"], run["micro_batch"], run["accumulation_steps"]) == (8, 2, 4)
    assert run["loss_scale"] == {"kind": "dynamic", "cur_scale": 64} and run["lr_scheduler"] is None


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
    holes = [finding for finding in inspected(catalog_of(torn))["findings"] if finding.kind == "incomplete"]
    assert [finding.found for finding in holes] == ([] if found is None else [found])


def test_what_does_not_add_up_is_an_error() -> None:
    """What ``verify`` finds in the metadata."""
    torn = replace(tensor("torn", MASTER, (9,)), sources=of_shards(1, (0, 8, 0)))
    long = tensor("long", MASTER, (1 << 18, 2))
    gone = {"gone": SavedParameter((4,), 0, (("step", 7.0),))}
    found = inspected(catalog_of(torn, long, parameters=gone, warnings=("beware",)))
    assert kinds(found) == [
        ("error", "incomplete"),
        ("error", "unreadable"),
        ("error", "incomplete"),
        ("note", "reader"),
    ]
    assert [finding.parameter for finding in found["findings"]] == ["torn", "long", "gone", None]
    assert found["findings"][1].expected == f"{1 << 21} bytes or more"


# --- which files are missing ------------------------------------------------------------------------------------------

SHARD = "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
ZERO3 = "zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt"
LAYER = "layer_{:02d}-model_{:02d}-model_states.pt"
EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("names", "claims", "missing"),
    [
        ([MODEL, SHARD.format(0, 0), SHARD.format(2, 0)], {"dp_world_size": 3}, [SHARD.format(1, 0)]),
        ([MODEL, SHARD.format(0, 0), SHARD.format(2, 0)], {}, []),  # rank 2's is of another save
        ([MODEL, SHARD.format(0, 0)], {"dp_world_size": 3}, [SHARD.format(1, 0), SHARD.format(2, 0)]),
        ([MODEL], {}, []),
        ([MODEL, "bf16_" + SHARD.format(1, 0)], {}, ["bf16_" + SHARD.format(0, 0)]),
        ([ZERO3.format(0, 0), SHARD.format(0, 0), SHARD.format(1, 0)], {"dp_world_size": 2}, [ZERO3.format(1, 0)]),
        (
            [MODEL, SHARD.format(0, 0)],
            {"checkpoint_parallel_dimensions": {"tp_degree": 2, "pp_degree": 1}, "mp_world_size": 2},
            ["mp_rank_01_model_states.pt", SHARD.format(0, 1)],
        ),
        ([MODEL, SHARD.format(0, 0)], {"dp_world_size": 10**15}, []),
        ([MODEL, EXPERT.format(0, 1)], {"num_experts": [2, -(10**9), "x", 10**9]}, []),
        ([MODEL, EXPERT.format(0, 1)], {"num_experts": [2, -3, "x"]}, []),  # an entry that none wrote
        ([MODEL, LAYER.format(0, 0), LAYER.format(2, 1)], {}, [LAYER.format(0, 1), LAYER.format(2, 0)]),
        ([MODEL, OPTIMIZER, "bf16_" + OPTIMIZER], {"dp_world_size": 2}, []),  # two saves
    ],
)
def test_missing_files(names: list[str], claims: dict[str, Any], missing: list[str], tmp_path: Path) -> None:
    counters = dict.fromkeys(("global_steps", "global_samples", "skipped_steps"), 0)
    tree = {
        **counters,
        "ds_version": "0.19.8",
        "module": {},
        "buffer_names": [],
        "param_shapes": [],
        "dp_world_size": 1,
        "mp_world_size": 1,
    }
    for name in names:
        torch.save({**tree, **claims}, tmp_path / name)
    found = found_of(*names, folder=str(tmp_path))
    assert [name for name in expected_files(found) if name not in names] == missing


def test_files_behind_links_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere" / "a" / "fp32.pt").write_bytes(b"123")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step7").mkdir()
    (tmp_path / "step7" / "zero").symlink_to(tmp_path / "elsewhere")
    files = files_by_kind(replace(found_of(), folder=str(tmp_path / "step7")))
    assert files[OTHER] == {str(tmp_path / "step7" / "zero" / "a" / "fp32.pt"): 3}, "of no universal checkpoint"


# --- tensor-parallel shards -------------------------------------------------------------------------------------------

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


def test_logical_shapes_follow_from_rules_and_unknown_layouts_are_a_note() -> None:
    info = {"parameter_with_row_parallelism_patterns": ["^narrow$"], "tp_replicated_parameter_patterns": ["^norm$"]}
    inspection = inspected(sharded(declared=declared_by(info)))
    assert {entry["name"]: entry["shape"] for entry in inspection["parameters"]} == {
        "wide": (8, 6),  # the converter's default, which no buffer is given to
        "narrow": (8, 6),
        "norm": (8,),
        "mask": (4, 6),
    }
    users = ShardingRules((ShardSpec(pattern="wide", kind="row"),))
    mine = inspected(sharded(), users)
    assert [entry["shape"] for entry in mine["parameters"]] == [(4, 12), None, (8,), (4, 6)]
    assert kinds(mine) == [("note", "layout")] and mine["findings"][0].parameter == "narrow" and mine["ok"]
    contradicted = ShardingRules((ShardSpec(pattern="narrow|wide", kind="column", sub_parameters=[1, 6]),))
    (found,) = inspected(sharded(), contradicted)["findings"]
    assert found.kind == "layout" and found.parameter == "narrow, wide"


# --- what is printed --------------------------------------------------------------------------------------------------


def test_json_knows_every_value() -> None:
    odd = {"a": float("inf"), 3: {2, 1}, "b": (1, None, True), "c": b"raw", "d": object}
    assert plain(odd) == {"a": "inf", "3": ["1", "2"], "b": [1, None, True], "c": "b'raw'", "d": "<class 'object'>"}
    inspection = inspected(sharded(groups=({"lr": float("nan"), "betas": (0.9, 0.99)},)))
    written = json.loads(json.dumps(plain(inspection), allow_nan=False))
    assert written["groups"][0]["hyperparameters"] == {"lr": "nan", "betas": [0.9, 0.99]}
    assert written["ok"] is True and [item["name"] for item in written["parameters"]][:1] == ["wide"]


def test_text_of_a_checkpoint_does_nothing_to_a_terminal() -> None:
    assert literal("a[bold]b\nc") == r"a\[bold]b\nc"
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
    metadata = catalog_of(tensor(long, MASTER, (4, 6)), tensor("[red]odd[/]", BUFFER, (2,)), aliases={"head": long})
    broken = Finding("error", "states", "broken [bold]badly[/]", remedy="restore " * 40)
    out = io.StringIO()
    console = Console(file=out, width=100)
    for params in (False, True):  # the list of parameters comes alone, but for the findings
        for part in report(inspected(metadata, None, broken), params):
            console.print(part)
    shown = out.getvalue()
    assert shown.startswith("Findings") and shown.count("Findings") == 2 and shown.count("Param groups") <= 1
    assert shown.index("elastic_ckpt: checkpoint") < shown.rindex("Findings") < shown.index("[red]odd[/]")
    assert max(map(len, out.getvalue().splitlines())) <= 100
    text = "".join(out.getvalue().split())
    for piece in ("[red]odd[/]", "broken[bold]badly[/]", "head=", "step7(", "2files"):
        assert piece in text or (piece == "2files" and "files│2," in text)


LOADS = [Remedy("loads it", config={"mode": "off"}), Remedy(arguments={"load_module_only": True}), AT_ITS_TOPOLOGY]


@pytest.mark.parametrize(
    ("error", "is_suspected"),
    [
        (DamagedError("x"), False),
        (MissingFilesError("x", remedy=LOADS[1]), False),
        (LayoutError("x"), True),
        (LayoutError("x", remedy="restore it"), True),
        *((LayoutError("x", remedy=[Remedy("restore it"), each]), True) for each in LOADS),
        (UnknownLayoutError("x"), True),
        (MixedSavesError("x"), True),
        (MismatchError("x"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_proven_is_suspected_alone(error: ElasticCkptError, is_suspected: bool) -> None:
    """By the judgment of "on_damage", whatever the remedies are."""
    assert of_error(error).suspected == is_suspected == (not error.proves_damage)
