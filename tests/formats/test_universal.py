"""Universal checkpoints: their files and who reads them, and the parameters in them."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.played import PlayedJob
from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import SavedParameter
from elastic_ckpt.errors import DamagedError, LayoutError, UnsupportedError, listed
from elastic_ckpt.formats.base import Checkpoint, CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.universal import index_state
from elastic_ckpt.formats.universal_files import FILES, PresentFiles, list_files, read_file_list
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.planning.state_errors import missing_files
from elastic_ckpt.storage.listing import MOST_DEPTH
from elastic_ckpt.tools.latest import find_latest
from elastic_ckpt.tools.verification import verify
from tests.nested_folders import nested

# Covers elastic_ckpt/formats/universal_groups.py, which is called where the metadata is built.
OPTIONS = MetadataOptions(with_client_state=False)
STATES = ("exp_avg", "exp_avg_sq", "fp32")
NAMES = [f"layers.{number}.weight" for number in range(40)]


@pytest.fixture
def found(tmp_path: Path) -> CheckpointInfo:
    """A universal checkpoint in the form of ZeRO-1: four files for each of 40 parameters."""
    folder = tmp_path / "tag"
    folder.mkdir()
    weights = {name: torch.full((3, 2), float(number)) for number, name in enumerate(NAMES)}
    counters = {"global_steps": 7, "global_samples": 7, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    shapes = [{name: weight.shape for name, weight in weights.items()}]
    model = {"module": weights, "buffer_names": [], "param_shapes": shapes, "lr_scheduler": None, **counters}
    config = {"zero_optimization": {"stage": 1}}
    torch.save({**model, "ds_config": config, "ds_version": "0.19.8"}, folder / "mp_rank_00_model_states.pt")
    for name, weight in weights.items():
        (folder / "zero" / name).mkdir(parents=True)
        for key in STATES:
            tree = {"param": weight + STATES.index(key) * (key != "fp32"), "cat_dim": 0}
            torch.save(tree, folder / "zero" / name / f"{key}.pt")
        torch.save(torch.tensor(7.0), folder / "zero" / name / "step.pt")
    group = {"lr": 0.1, "params": [0]}
    torch.save({"zero_stage": 1, "param_groups": [group]}, folder / "zero" / "optimizer_state.pt")
    located = look_at(str(tmp_path), "tag")
    assert located is not None and located.format == "universal"
    return located


def played(found: CheckpointInfo, ranks: int) -> tuple[list[Checkpoint], PlayedJob, dict[int, list[str]]]:
    """What each rank has read, the job, and the folders that each rank listed."""
    job, listed = PlayedJob(ranks), dict[int, list[str]]()

    def noted(real: Callable[[str], Any]) -> Callable[[str], Any]:
        def note(path: str) -> Any:
            listed.setdefault(distributed.rank(), []).append(str(path))
            return real(path)

        return note

    with mock.patch("os.scandir", noted(os.scandir)), mock.patch("os.listdir", noted(os.listdir)):
        return job.run_all(lambda: read_checkpoint(found, OPTIONS)), job, listed


def test_each_rank_lists_and_opens_its_share_of_the_files_and_all_know_the_same(found: CheckpointInfo) -> None:
    alone = read_checkpoint(found, OPTIONS)
    assert alone.files_opened == 2 + 4 * len(NAMES)
    everybody, _, listed = played(found, 8)
    assert all(each.metadata == alone.metadata for each in everybody)
    assert sum(each.files_opened for each in everybody) == alone.files_opened
    assert max(each.files_opened for each in everybody) <= 4 * len(NAMES) // 8 + 4
    folders = sorted(path for paths in listed.values() for path in paths)
    assert folders == sorted([found.path("zero"), *(found.path(f"zero/{name}") for name in NAMES)])
    assert max(len(paths) for rank, paths in listed.items() if rank) <= len(NAMES) // 8 + 1


def test_a_parameter_costs_few_bytes_of_a_message(found: CheckpointInfo) -> None:
    _, job, _ = played(found, 4)
    shares = job.rounds[1]
    assert sum(map(len, shares)) < 240 * len(NAMES)


def test_what_is_sent_of_a_file_is_all_that_is_known_of_it(found: CheckpointInfo) -> None:
    name = NAMES[3]
    files = [index_state(open_pickled(found.path(f"zero/{name}/{key}.pt"))) for key in (*STATES, "step")]
    assert pickle.loads(pickle.dumps(files)) == files
    assert all(len(file.records.crc32s) == 1 for file in files[:3])


def test_a_folder_that_another_rank_cannot_see_is_named_on_all(found: CheckpointInfo) -> None:
    os.rename(found.path(f"zero/{NAMES[5]}"), found.path("zero/elsewhere"))
    listing = [NAMES[5] if name == "elsewhere" else name for name in sorted(os.listdir(found.path("zero")))]
    names = [name for name in listing if not name.endswith(".pt")]
    with mock.patch("elastic_ckpt.formats.universal.list_parameters", lambda _: (True, names)):
        job = PlayedJob(3)
        with pytest.raises(
            DamagedError, match=r"(?s)a folder of the checkpoint is missing.*layers\.5\.weight.*all nodes share"
        ):
            job.run_all(lambda: read_checkpoint(found, OPTIONS))


def test_without_an_optimizer_file_only_parameters_with_states_have_a_step(found: CheckpointInfo) -> None:
    """As in BLOOM's folders, of an older DeepSpeed."""
    path = found.path("mp_rank_00_model_states.pt")
    torch.save({**torch.load(path), "ds_version": "0.6.5"}, path)
    os.remove(found.path("zero/optimizer_state.pt"))
    trained, idle = (found.path(f"zero/{name}") for name in NAMES[:2])
    for path in (f"{trained}/step.pt", *(f"{idle}/{key}.pt" for key in ("exp_avg", "exp_avg_sq", "step"))):
        os.remove(path)
    metadata = read_checkpoint(found, OPTIONS).metadata
    assert [metadata.parameters[name].scalars for name in NAMES[:2]] == [(("step", 7.0),), ()]
    assert any("no zero/optimizer_state.pt" in note for note in metadata.notes)


def test_states_that_no_model_states_file_lists_are_refused_and_buffers_are_not(found: CheckpointInfo) -> None:
    folder = found.path("zero/a buffer")
    os.mkdir(folder)
    torch.save({"param": torch.ones(2)}, f"{folder}/fp32.pt")
    assert "a buffer" not in read_checkpoint(found, OPTIONS).metadata.parameters
    torch.save({"param": torch.ones(2)}, f"{folder}/exp_avg.pt")
    with pytest.raises(DamagedError, match=r"(?s)do not list all parameters.*a buffer"):
        read_checkpoint(found, OPTIONS)


def missing(found: CheckpointInfo) -> str:
    error = missing_files(read_checkpoint(found, OPTIONS).metadata)
    return "" if error is None else str(error)


@pytest.mark.parametrize("key", [*STATES, "step"])
@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("names", [NAMES[3:4], NAMES[3:5], NAMES], ids=len)
def test_a_missing_file_is_named_with_its_parameters(
    key: str, is_listed: bool, names: list[str], found: CheckpointInfo
) -> None:
    """By the list that the converter wrote; else by other parameters, or by what DeepSpeed's writes of Adam."""
    path = found.path("zero/optimizer_state.pt")
    hyperparameters = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "params": [0]}
    entry = {FILES: list_files({name: [*STATES, "step"] for name in NAMES})} if is_listed else {}
    torch.save({"zero_stage": 1, "param_groups": [hyperparameters], **entry}, path)
    assert missing(found) == ""
    for name in names:
        os.remove(found.path(f"zero/{name}/{key}.pt"))
    text = missing(found)
    assert found.path(f"zero/{names[0]}/{key}.pt") in text and f"zero/*/{key}.pt of {listed(names)}" in text
    assert ("load_optimizer_states=False" in text) == (key != "fp32")
    other = next(each for each in (*STATES, "step") if each != key)
    assert f"{other}.pt" not in text


def test_the_file_of_the_optimizer_is_named_and_all_that_is_gone_in_one_error(found: CheckpointInfo) -> None:
    os.remove(found.path("zero/optimizer_state.pt"))
    os.remove(found.path(f"zero/{NAMES[2]}/exp_avg.pt"))
    text = missing(found)
    assert "zero/optimizer_state.pt; zero/*/exp_avg.pt of layers.2.weight" in text


def test_the_missing_files_of_ten_million_ranks_are_not_listed(found: CheckpointInfo) -> None:
    """The number of ranks is an entry of the file."""
    path = found.path("mp_rank_00_model_states.pt")
    tree = torch.load(path, weights_only=False)
    part = {"frozen": torch.ones(2)}
    frozen = {"frozen_param_shapes": {"frozen": torch.Size([4])}, "frozen_param_fragments": part}
    os.remove(path)
    torch.save({**tree, **frozen, "dp_world_size": 10**7}, found.path("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    located = look_at(os.path.dirname(found.folder), "tag")
    assert located is not None
    with pytest.raises(DamagedError, match=r"none of rank 1, 2, 3, 4, 5, \.\.\."):
        read_checkpoint(located, OPTIONS)


def test_masters_alone_are_whole_before_the_first_step(found: CheckpointInfo) -> None:
    for name in NAMES:
        for key in ("exp_avg", "exp_avg_sq", "step"):
            os.remove(found.path(f"zero/{name}/{key}.pt"))
    assert "exp_avg_sq.pt" in missing(found)
    path = found.path("mp_rank_00_model_states.pt")
    torch.save({**torch.load(path, weights_only=False), "global_steps": 0}, path)
    assert missing(found) == ""


def test_parameters_have_few_kinds_of_files() -> None:
    """Each may lack each that another one has."""
    parameters = {name: SavedParameter((1,), 0, ()) for name in NAMES}
    for count in (64, 65):
        keys = {NAMES[0]: frozenset(f"state{number}" for number in range(count))}
        present = PresentFiles(keys, {}, frozenset(), True, "0.19.8", 1, 1, None, (), parameters)
        with nullcontext() if count == 64 else pytest.raises(UnsupportedError, match="up to a limit"):
            assert len(present.missing()) == 64 + 1


words = st.lists(st.text("abc.", min_size=1, max_size=4), unique=True, max_size=3)


@given(st.dictionaries(st.text("xyz.", min_size=1), words, max_size=9))
def test_the_list_of_files_is_what_was_listed(present: dict[str, list[str]]) -> None:
    entry = list_files(present)
    parameters = {name: SavedParameter((1,), 0, ()) for name in present}
    empty: dict[str, frozenset[str]] = {name: frozenset() for name in present}
    files = read_file_list(entry, "")
    lacking = PresentFiles(empty, {}, frozenset(), True, "0.19.8", 1, 1, files, (), parameters).missing()
    expected = {(f"zero/*/{key}.pt", name) for name, keys in present.items() for key in keys}
    assert {(path, name) for path, names in lacking.items() for name in names} == expected


@pytest.mark.parametrize("entry", [{}, "fp32", [1], [["fp32", None]], [[["fp32"]]], [[["fp32"], "x"]], [[[1], None]]])
def test_another_list_of_files_is_damage(entry: object) -> None:
    with pytest.raises(DamagedError, match="is no list of files"):
        read_file_list(entry, "")


def test_a_list_has_few_files_of_a_parameter() -> None:
    """Each of them may be missing for each parameter."""
    keys = [f"state{number}" for number in range(65)]
    assert read_file_list([[keys[:64], None]], "") is not None
    with pytest.raises(UnsupportedError, match="up to a limit") as raised:
        read_file_list([[keys, None]], "path")
    assert raised.value.file == "path"


def with_groups(found: CheckpointInfo, zero_stage: int, counts: list[int], members: list[list[int]]) -> None:
    """Lists so many parameters for each flat tensor, and the flat tensors of each param group."""
    path = found.path("mp_rank_00_model_states.pt")
    tree = torch.load(path, weights_only=False)
    names = iter(NAMES)
    shapes = [{next(names): torch.Size((3, 2)) for _ in range(count)} for count in counts]
    torch.save({**tree, "param_shapes": shapes}, path)
    groups = [{"lr": 0.1, "params": flats} for flats in members]
    torch.save({"zero_stage": zero_stage, "param_groups": groups}, found.path("zero/optimizer_state.pt"))


@pytest.mark.parametrize(
    ("zero_stage", "counts", "members", "expected"),
    [
        (1, [10, 30], [[0], [1]], {0: 10, 1: 30}),
        (2, [10, 0, 30], [[0], [1], [2]], {0: 10, 2: 30}),
        (3, [10, 10, 20], [[0, 1], [2]], {0: 20, 1: 20}),
        (3, [10, 30], [[1], [], [0]], {0: 30, 2: 10}),
        (2, [10, 30, 0], [[0], [1]], {0: 10, 1: 30}),
    ],
)
def test_each_flat_tensor_is_in_the_group_that_names_it(
    found: CheckpointInfo, zero_stage: int, counts: list[int], members: list[list[int]], expected: dict[int, int]
) -> None:
    with_groups(found, zero_stage, counts, members)
    parameters = read_checkpoint(found, OPTIONS).metadata.parameters.values()
    groups = [saved.group for saved in parameters]
    assert {group: groups.count(group) for group in groups} == expected


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize(
    "members",
    [[[0]], [[0], []], [[], [1]], [[0], [1], [2]], [[0, 1], [1]], [[0], [5]], [[0, 0], [1]], [[], []]],
    ids=["fewer", "an empty one", "another empty one", "more", "twice", "another number", "twice in one", "none"],
)
def test_groups_that_are_not_those_of_the_model_states_are_damage(
    found: CheckpointInfo, zero_stage: int, members: list[list[int]]
) -> None:
    """Of a load, and of each command, which read the same metadata."""
    with_groups(found, zero_stage, [10, 30], members)
    with pytest.raises(DamagedError, match="param groups of the universal checkpoint") as caught:
        read_checkpoint(found, OPTIONS)
    assert caught.value.file == found.path("zero/optimizer_state.pt")
    outcome = verify(found.folder, None, ElasticConfig())
    assert [finding.kind for finding in outcome.findings] == ["damaged"]
    with pytest.raises(DamagedError, match="no checkpoint in this folder is complete"):
        find_latest(os.path.dirname(found.folder))


ODD_FILES = {
    "no tensor for a parameter": ("exp_avg", {"param": None}),
    "no tensor for a squared moment": ("exp_avg_sq", {"param": None}),
    **{
        f"a moment of {dtype}": ("exp_avg", {"param": torch.zeros(3, 2).to(dtype), "cat_dim": 0})
        for dtype in (torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)
    },
    "a flat moment of int8": ("exp_avg_sq", torch.zeros(6, dtype=torch.int8)),
    "a complex step": ("step", torch.tensor(7 + 0j)),
    "a complex step of a parameter": ("step", {"param": torch.tensor(7 + 0j)}),
    "a complex number of steps": ("step", 7 + 0j),
    "a flag for a step": ("step", torch.tensor(True)),
}


@pytest.mark.parametrize("what", ODD_FILES)
def test_a_state_that_no_optimizer_writes_is_damage_of_its_file_for_verify_too(
    found: CheckpointInfo, what: str
) -> None:
    key, tree = ODD_FILES[what]
    path = found.path(f"zero/{NAMES[3]}/{key}.pt")
    torch.save(tree, path)
    with pytest.raises(DamagedError) as caught:
        read_checkpoint(found, OPTIONS)
    assert caught.value.file == path
    (finding,) = verify(found.folder, None, ElasticConfig()).findings
    assert finding.file == path and not finding.suspected


class Unknown:
    """Of no package that a reader knows."""


def test_an_object_that_is_not_made_is_no_whole_checkpoint_for_verify(found: CheckpointInfo) -> None:
    path = found.path("mp_rank_00_model_states.pt")
    torch.save({**torch.load(path, weights_only=False), "note": Unknown()}, path)
    (finding,) = verify(found.folder, None, ElasticConfig()).problems
    assert finding.file == path and "Unknown" in str(finding)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_random_states_have_a_rank_only_where_one_rank_saved_them(found: CheckpointInfo, tp: int, pp: int) -> None:
    """Of several model-parallel ranks, one wrote the folder."""
    path = Path(found.path("mp_rank_00_model_states.pt"))
    tree = torch.load(path, weights_only=False)
    tree |= {"mp_world_size": tp, "checkpoint_parallel_dimensions": {"tp_degree": tp, "pp_degree": pp}}
    for rank in range(tp * pp):
        own = NAMES[rank // tp :: pp]
        shapes = [{name: tree["module"][name].shape for name in own}]
        weights = {name: tree["module"][name] for name in own}
        file = path.with_name(f"mp_rank_{rank:02}_model_states.pt")
        torch.save(tree | {"module": weights, "param_shapes": shapes}, file)
    for name in NAMES if tp > 1 else ():
        for state in Path(found.path(f"zero/{name}")).glob("[ef]*.pt"):
            torch.save({"param": torch.load(state)["param"]}, state)
    located = look_at(str(path.parent.parent), "tag")
    assert located is not None
    state = read_checkpoint(located, OPTIONS).training_state
    assert state.degrees == ((1, 1) if tp * pp == 1 else (0, 0))


@pytest.mark.parametrize("where", ["", "zero", "zero/layers.3.weight", "notes"])
def test_folders_nested_without_end_are_a_note_and_take_no_time(found: CheckpointInfo, where: str) -> None:
    """A load reads none of them."""
    os.makedirs(found.path(where), exist_ok=True)
    with nested(Path(found.path(where)), 1200), mock.patch("os.scandir", wraps=os.scandir) as scanned:
        outcome = verify(found.folder, None, ElasticConfig())
        assert find_latest(os.path.dirname(found.folder)) == found.folder
        read_checkpoint(found, OPTIONS)
    assert outcome.ok and scanned.call_count < 12 * (len(NAMES) + MOST_DEPTH)
    (note,) = (note for note in outcome.notes if note.kind == "not-checked")
    assert f"more than {MOST_DEPTH} folders" in note.text and str(note.file).startswith(found.path(where))


def test_a_layout_that_no_load_can_read_is_not_passed_over(
    found: CheckpointInfo, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does "on_damage" go back for it: that files contradict each other does not say which of them is wrong."""
    path = found.path("mp_rank_00_model_states.pt")
    older = f"{found.folder}_before"
    shutil.copytree(found.folder, older)
    before = torch.load(path, weights_only=False)
    torch.save(before | {"global_steps": 1}, os.path.join(older, "mp_rank_00_model_states.pt"))
    stated = {"checkpoint_parallel_dimensions": {"tp_degree": 1, "pp_degree": 1}}
    for each in (path, found.path("mp_rank_01_model_states.pt")):
        torch.save(before | stated, each)
    located = look_at(os.path.dirname(found.folder), "tag")
    assert located is not None
    with pytest.raises(LayoutError, match="more ranks than were saved") as caught:
        read_checkpoint(located, OPTIONS)
    assert not caught.value.proves_damage
    (finding,) = verify(found.folder, None, ElasticConfig()).findings
    assert finding.suspected
    assert find_latest(os.path.dirname(found.folder)) == found.folder
    assert "more ranks than were saved" in caplog.text
    caplog.clear()
    os.remove(path)
    os.remove(found.path("mp_rank_01_model_states.pt"))
    os.remove(found.path("zero/optimizer_state.pt"))
    assert find_latest(os.path.dirname(found.folder)) == older
    assert f"{found.folder} is newer than {older}" in caplog.text


@pytest.mark.parametrize(("where", "is_checked"), [("notes", True), ("notes/zero", True), ("offloaded_tensors", False)])
def test_a_folder_that_cannot_be_listed_is_named(
    found: CheckpointInfo, where: str, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where DeepSpeed has files, the checkpoint was not checked."""
    os.makedirs(found.path(where))
    scan = os.scandir

    def refuse(path: str) -> Any:
        if path == found.path(where):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    outcome = verify(found.folder, None, ElasticConfig())
    assert outcome.ok == is_checked
    (finding,) = (each for each in (*outcome.notes, *outcome.unchecked) if each.kind == "not-checked")
    assert finding.file == found.path(where) and "Permission denied" in finding.text
