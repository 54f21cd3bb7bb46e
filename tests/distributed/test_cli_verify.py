"""``elastic-ckpt verify`` on real checkpoints, whole and damaged: what is wrong is found, and named."""

from __future__ import annotations

import json
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed import damage
from tests.distributed.conftest import SUB_GROUPS, Launch
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

Z1, Z3, BF16 = "z1-fp32-adamw-dp2", "z3-fp32-adamw-dp2", "z2-bf16-adamw-dp2"
RANK0, RANK1 = damage.OPTIMIZER.format(0), damage.OPTIMIZER.format(1)
MODEL = "mp_rank_00_model_states.pt"
MODEL3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
Change = Callable[[Path], None]


def verify(*arguments: Any) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def found_by(*arguments: Any) -> list[dict[str, Any]]:
    """Its findings; the exit code must agree."""
    result = verify(*arguments, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == (1 if answer["findings"] else 0), result.output
    assert answer["ok"] == (not answer["findings"])
    return answer["findings"]


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """``copy(folder)``: one that may be damaged."""

    def run(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / folder.name))

    return run


@pytest.fixture(scope="module")
def others(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the shapes of Z1 and Z3, a step shorter and with other data: their shards are foreign."""
    folder = tmp_path_factory.mktemp("others")
    setups = [Setup(1), Setup(3)]
    launch(2, "save", {"folder": str(folder), "setups": setups, "steps": 3, "first": 30})
    return folder


@pytest.fixture(scope="module")
def parallel(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensor-parallel runs, one of which records how it shards its parameters, and a pipeline with tied layers."""
    folder = tmp_path_factory.mktemp("parallel")
    setups = [
        Parallel("autotp", "llama", tp=2, stage=1),
        Parallel("3d", "uniform", tp=2, stage=1),
        Parallel("pipeline", "uniform", pp=2, stage=1),
    ]
    launch(2, "parallel_jobs.save", {"folder": str(folder), "setups": setups}, timeout=400)
    return folder


def test_nothing_is_wrong_with_checkpoints_as_deepspeed_saves_them(
    native: Path, universal: Path, unpartitioned: Path
) -> None:
    sub_groups = Setup(3, zero=SUB_GROUPS).name
    folders = [native / name for name in (Z1, BF16, Z3, f"{sub_groups}-dp3", "z1-fp32-adam_amsgrad-dp2")]
    folders += [unpartitioned / "z0-fp32-adamw-dp2", universal / Z1, universal / Z3]
    for folder in folders:
        tag = damage.tag(folder)
        files = list(tag.rglob("*.pt"))
        result = verify(folder, "--full")
        ok = re.fullmatch(r"ok: (\d+) files?, (\d+) tensors, ([\d,]+) bytes checked in [\d.]+ s\n", result.stdout)
        assert result.exit_code == 0 and ok is not None, (folder, result.output)
        assert int(ok[1]) == len(files)
        assert int(ok[3].replace(",", "")) == sum(file.stat().st_size for file in files)
        metadata = verify(tag)
        assert metadata.exit_code == 0 and "tensors, metadata of" in metadata.stdout, (folder, metadata.output)


def test_masters_states_and_buffers_are_counted(native: Path) -> None:
    truth = torch.load(native / Z1 / "truth.pt", weights_only=False)
    answer = json.loads(verify(native / Z1, "--json").stdout)
    assert answer["tensors"] == len(truth["masters"]) + len(truth["states"]) + 2  # of its buffers, two are saved
    assert (answer["files"], answer["tag"], answer["full"]) == (3, "step4", False)


def truncate_universal(copy: Path) -> None:
    path = damage.tag(copy) / "zero" / "hidden.weight" / "fp32.pt"
    path.write_bytes(path.read_bytes()[:700])


def drop_state(copy: Path) -> None:
    (damage.tag(copy) / "zero" / "hidden.weight" / "exp_avg.pt").unlink()


def drop_step(copy: Path) -> None:
    (damage.tag(copy) / "zero" / "hidden.weight" / "step.pt").unlink()


def drop_parameter(copy: Path) -> None:
    shutil.rmtree(damage.tag(copy) / "zero" / "back.weight")


def write_latest(content: bytes) -> Change:
    return lambda copy: (copy / "latest").write_bytes(content) and None


#: What is done to which checkpoint; the code of the finding, the end of its file, what its message says.
DAMAGES: list[tuple[str, Change, str, str, str]] = [
    (Z1, damage.truncate(MODEL, 0.7), "unreadable", MODEL, "truncated"),
    (Z1, damage.truncate(RANK1, 0.999), "unreadable", RANK1, "truncated"),
    (Z3, damage.truncate(MODEL3, 0), "unreadable", MODEL3, "truncated"),
    ("universal", truncate_universal, "unreadable", "zero/hidden.weight/fp32.pt", "truncated"),
    (Z1, damage.rewrite_pickle(RANK0), "unreadable", RANK0, "a complete torch.save archive"),
    (Z1, damage.edit(MODEL, damage.plant_bomb), "unsafe-pickle", MODEL, "print"),
    (Z1, damage.edit(MODEL, damage.no_counters), "damaged", MODEL, "global_steps"),
    (Z1, damage.remove(RANK1), "missing", RANK1, "no such file"),
    (Z3, damage.remove(MODEL3), "missing", MODEL3, "no such file"),
    (Z1, damage.remove(MODEL), "damaged", f"mp_rank_00_model_states.pt (or zero_pp_rank_*_{MODEL})", "missing"),
    (Z1, damage.edit(RANK1, damage.drop_master), "damaged", RANK1, "group_paddings"),
    ("universal", drop_state, "missing", "exp_avg.pt", "is missing"),
    ("universal", drop_step, "missing", "step.pt", "is missing"),
    ("universal", drop_parameter, "missing", "zero/back.weight/fp32.pt", "are missing"),
    (Z1, write_latest(b"step9"), "latest", "step9", "step4"),
    (Z1, write_latest(b"step\xb4"), "latest", "latest", "cannot be read"),
    (Z1, damage.remove_latest, "latest", "latest", "names the tag to load"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damage_is_named_without_reading_data(
    number: int, native: Path, universal: Path, copy: Callable[[Path], Path]
) -> None:
    source, change, code, file, says = DAMAGES[number]
    folder = copy(universal / Z1 if source == "universal" else native / source)
    change(folder)
    findings = found_by(folder)
    assert [finding["code"] for finding in findings] == [code], findings
    assert findings[0]["file"].endswith(file) and says in findings[0]["message"]
    assert found_by(folder, "--full")  # where the reader gives up, the bytes are checked all the same


def test_where_both_formats_lie_side_by_side_the_readable_pointer_counts(
    native: Path, universal: Path, copy: Callable[[Path], Path]
) -> None:
    folder = copy(native / Z1)
    shutil.copytree(universal / Z1 / "step4_universal", folder / "step4_universal")
    shutil.copy(universal / Z1 / "latest_universal", folder)
    assert found_by(folder, "--full") == []
    (folder / "latest").write_bytes(b"\xff")
    result = verify(folder)
    assert (result.exit_code, result.stdout.count("\n")) == (1, 1) and result.stdout.startswith(
        "latest: latest: the file that names the newest tag cannot be read"
    )
    assert "verified step4_universal instead" in result.stderr
    (folder / "latest").write_text("step4")
    damage.truncate(MODEL, 0.5)(folder)  # asked for its step, to choose
    found = [(finding["code"], Path(finding["file"])) for finding in found_by(folder)]
    assert found == [("unreadable", folder / "step4" / MODEL)]


def test_shards_of_other_runs_are_named(native: Path, others: Path, copy: Callable[[Path], Path]) -> None:
    def named(source: str, *foreign: str) -> tuple[str, str]:
        folder = copy(native / source)
        for name in foreign:
            shutil.copy(others / source / "step4" / name, folder / "step4" / name)
        (finding,) = found_by(folder)
        shutil.rmtree(folder)
        assert finding["code"] == "damaged"
        return Path(finding["file"]).name, finding["message"]

    for source, foreign in ((Z1, RANK1), (Z1, RANK0), (Z3, RANK1), (Z3, MODEL3)):
        file, message = named(source, foreign)
        assert foreign == file or foreign in message, (source, foreign)
    # all optimizer-states files of another tag: found by their values and steps
    assert named(Z1, RANK0, RANK1)[0] in (RANK0, RANK1, MODEL)
    assert named(Z3, RANK0, RANK1)[0] == "zero_pp_rank_0_" + MODEL


def test_a_shard_that_a_bigger_job_has_left_is_told_and_no_damage(native: Path, copy: Callable[[Path], Path]) -> None:
    folder, name = copy(native / Z1), damage.OPTIMIZER.format(2)
    shutil.copy(native / "z1-fp32-adamw-dp3" / "step4" / name, folder / "step4" / name)
    assert found_by(folder) == []
    assert " ".join(verify(folder).stderr.split()).count(f"on other ranks, which may be removed: {name}") == 1


def test_all_that_is_wrong_is_found_at_once(native: Path, others: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(native / "z3-fp32-adamw-dp3")
    damage.truncate(RANK0, 0.5)(folder)
    damage.remove(damage.OPTIMIZER.format(2))(folder)
    damage.truncate(MODEL3, 0.5)(folder)
    (folder / "latest").write_bytes(b"\xff\xfe")
    findings = found_by(folder, "--full")
    named = {(finding["code"], Path(finding["file"]).name) for finding in findings}
    assert named == {
        ("latest", "latest"),
        ("unreadable", RANK0),
        ("missing", damage.OPTIMIZER.format(2)),
        ("unreadable", MODEL3),
    }
    lines = verify(folder).stdout.splitlines()
    assert f"missing: step4/{damage.OPTIMIZER.format(2)}: no such file; restore it, or use another tag" in lines


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def record_offset(path: Path, name: str) -> int:
    """Where the data of a record is, found by its header."""
    with zipfile.ZipFile(path) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(name))
        start = info.header_offset
    raw = path.read_bytes()
    return start + 30 + int.from_bytes(raw[start + 26 : start + 28], "little") + int.from_bytes(raw[start + 28 : start + 30], "little")  # fmt: skip


def test_a_bit_that_turned_is_found_in_data_pickle_and_directory(native: Path, copy: Callable[[Path], Path]) -> None:
    for name in (RANK1, MODEL):
        for where, code, says in (
            ("data.pkl", "unreadable", "CRC"),
            ("/data/1", "checksum", "have changed since the save"),
            ("directory", "checksum", "CRC32"),
        ):
            folder = copy(native / Z1)
            path = folder / "step4" / name
            if where == "directory":
                raw = path.read_bytes()
                entry = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"/data/1"))
                flip(path, (entry + 16) * 8 + 3)  # of its CRC32
            else:
                flip(path, record_offset(path, where) * 8 + 70)
            findings = [finding for finding in found_by(folder, "--full") if finding["code"] == code]
            assert findings and findings[0]["file"] == str(path) and says in findings[0]["message"], (name, where)
            shutil.rmtree(folder)


def test_a_bit_that_turned_in_any_record_that_a_load_reads_is_found(
    native: Path, universal: Path, copy: Callable[[Path], Path]
) -> None:
    draw = random.Random(20)
    for source, count in ((native / Z1, 30), (native / BF16, 20), (universal / Z1, 10)):
        folder = copy(source)
        records = [
            (path, record_offset(path, info.filename), info.file_size)
            for path in sorted(folder.glob("step*/**/*.pt"))
            for info in zipfile.ZipFile(path).infolist()
            if info.file_size and ("/data/" in info.filename or info.filename.endswith("data.pkl"))
        ]
        for _ in range(count):
            path, offset, nbytes = draw.choices(records, [nbytes for _, _, nbytes in records])[0]
            bit = 8 * offset + draw.randrange(8 * nbytes)
            flip(path, bit)
            assert str(path) in {finding["file"] for finding in found_by(folder, "--full")}, (path.name, bit)
            flip(path, bit)
        shutil.rmtree(folder)


def masters_of(tree: dict) -> list[torch.Tensor]:
    return [master.data for master in tree["optimizer_state_dict"]["single_partition_of_fp32_groups"]]


def owner(folder: Path, group: int, flat: int) -> tuple[str, int]:
    """Which parameter an element of a flat group is of, and which of its elements it is."""
    shapes = torch.load(folder / "step4" / MODEL, weights_only=False)["param_shapes"][group]
    for name, shape in shapes.items():
        if flat < shape.numel():
            return name, flat
        flat -= shape.numel()
    raise IndexError(flat)


def test_values_that_are_no_numbers_are_named_by_parameter_and_place(
    native: Path, copy: Callable[[Path], Path]
) -> None:
    folder = copy(native / Z1)

    def spoil(tree: dict) -> None:
        states = tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        states["exp_avg"][[100, 101, 300]] = float("nan")
        states["exp_avg_sq"][-1] = float("nan")  # padding: 1270 elements in two partitions of 636
        masters_of(tree)[1][7] = float("-inf")

    step = len(torch.load(folder / "step4" / RANK0, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"])  # fmt: skip
    second = torch.load(folder / "step4" / RANK0, weights_only=False)["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].numel()  # fmt: skip
    damage.edit(RANK1, spoil)(folder)
    expected: dict[tuple[str, str, str], list[int]] = {}
    for code, key, group, flats in (
        ("nan", "exp_avg", 0, [step + at for at in (100, 101, 300)]),
        ("inf", "fp32", 1, [second + 7]),
    ):
        for flat in flats:
            name, at = owner(folder, group, flat)
            expected.setdefault((code, name, key), []).append(at)
    words = {"nan": "NaN", "inf": "infinite values"}
    messages = {
        (code, name, f"{len(at)} {words[code]} in {key}, the first at element {min(at)}")
        for (code, name, key), at in expected.items()
    }
    findings = found_by(folder, "--full")
    spoiled = {
        (finding["code"], finding["parameter"], finding["message"]) for finding in findings if finding["code"] in words
    }
    assert spoiled == messages
    assert {finding["file"] for finding in findings} <= {str(folder / "step4" / RANK1)}
    # the reader compares masters with weights, and may have seen the infinite one too
    assert {finding["code"] for finding in findings} <= {"nan", "inf", "damaged"}


def test_infinity_in_a_buffer_is_a_note(native: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(native / Z1)
    damage.edit(MODEL, lambda tree: tree["module"]["trace"].fill_(float("-inf")))(folder)
    result = verify(folder, "--full")
    assert result.exit_code == 0 and result.stdout.startswith("ok: ")
    assert "note: inf: step4/mp_rank_00_model_states.pt: trace: 15 infinite values" in result.stderr


def drift_one(folder: Path, mp_rank: int, name: str, by: float) -> None:
    """Change the last element of a parameter's master on one model-parallel rank."""
    file = f"zero_pp_rank_0_mp_rank_{mp_rank:02d}_optim_states.pt"
    shapes = torch.load(folder / "step4" / f"mp_rank_{mp_rank:02d}_model_states.pt", weights_only=False)["param_shapes"]
    for group, members in enumerate(shapes):
        start = 0
        for member, shape in members.items():
            if member == name:
                last = start + shape.numel() - 1

                def change(tree: dict, group: int = group, last: int = last) -> None:
                    masters_of(tree)[group][last] += by

                return damage.edit(file, change)(folder)
            start += shape.numel()
    raise KeyError(name)


def test_copies_that_drifted_apart_are_named_where_rules_say_that_they_are_copies(
    parallel: Path, copy: Callable[[Path], Path]
) -> None:
    autotp = copy(parallel / "autotp-llama-tp2-pp1-z1-fp32-dp1")
    assert found_by(autotp, "--full") == []
    shapes = torch.load(autotp / "step4" / MODEL, weights_only=False)["param_shapes"]
    norm = next(name for members in shapes for name in members if "norm" in name)
    drift_one(autotp, 1, norm, 0.25)
    finding = next(finding for finding in found_by(autotp, "--full") if finding["code"] == "drift")
    assert finding["parameter"] == norm and "2 copies, which should be equal, are at most 0.25 " in finding["message"]
    assert not [finding for finding in found_by(autotp) if finding["code"] == "drift"]  # only --full reads them


def test_without_a_rule_drift_is_a_note_and_a_rule_is_the_remedy(
    parallel: Path, copy: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = copy(parallel / "3d-uniform-tp2-pp1-z1-fp32-dp1")
    drift_one(folder, 1, "2.down.bias", 0.5)
    silent = verify(folder, "--full")
    assert silent.exit_code == 0 and "no rule says which are copies" in silent.stderr
    assert " 2.down.bias," in silent.stderr and "--tp-preset" in silent.stderr
    rules = [{"pattern": r".*down\.bias", "kind": "replicated"}]
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"elastic_checkpoint": {"tp_rules": rules}}))
    findings = found_by(folder, "--full", "--config", config)
    assert [(finding["code"], finding["parameter"]) for finding in findings] == [("drift", "2.down.bias")]
    config.write_text(json.dumps({"elastic_checkpoint": {"rename": [[".*bias$", "bias"]]}}))  # one name for several
    assert [finding["code"] for finding in found_by(folder, "--full", "--config", config)] == ["mismatch"]


def test_tied_layers_of_pipeline_stages_are_compared(parallel: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(parallel / "pipeline-uniform-tp1-pp2-z1-fp32-dp1")
    assert found_by(folder, "--full") == []
    shapes = torch.load(folder / "step4" / "mp_rank_01_model_states.pt", weights_only=False)["param_shapes"]
    tied = next(name for members in shapes for name in members if name.startswith("tied_modules."))
    drift_one(folder, 1, tied, 0.125)
    finding = next(finding for finding in found_by(folder, "--full") if finding["code"] == "drift")
    assert finding["parameter"] == tied and "at most 0.125 " in finding["message"]


@pytest.mark.parametrize("run", ["pipeline-uniform-tp1-pp2-z1-fp32-dp1", "3d-uniform-tp2-pp1-z1-fp32-dp1"])
def test_a_weight_that_the_file_of_its_layer_lacks_is_named(
    run: str, parallel: Path, copy: Callable[[Path], Path]
) -> None:
    folder = copy(parallel / run)
    assert found_by(folder) == []
    path = max((folder / "step4").glob("layer_*-model_states.pt"))
    weights = torch.load(path)
    name = max(weights)
    del weights[name]
    torch.save(weights, path)
    (finding,) = found_by(folder)
    assert (finding["code"], finding["parameter"].partition(".")[2]) == ("incomplete", name)
    assert Path(finding["file"]).name == path.name


def test_a_folder_that_is_no_checkpoint_is_unreadable(tmp_path: Path, native: Path) -> None:
    assert verify(tmp_path).exit_code == 3
    assert verify(native / Z1, "--tag", "step7").exit_code == 3
    answer = json.loads(verify(tmp_path, "--json").stdout)
    assert answer["error"] == "NotFoundError"
    assert verify(native / Z1, "--tp-preset", "no-such").exit_code == 2


def test_what_was_saved_without_checksums_is_noted(native: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(native / Z1)
    torch.serialization.set_crc32_options(False)
    try:
        damage.edit(RANK1, lambda tree: None)(folder)
    finally:
        torch.serialization.set_crc32_options(True)
    result = verify(folder, "--full")
    assert result.exit_code == 0, result.output
    assert f"note: no-checksum: step4/{RANK1}: saved without checksums" in result.stderr


def test_what_cannot_be_checked_is_noted(native: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(native / Z1)
    swapped = folder / "step4" / "offloaded_tensors" / "rank00"
    swapped.mkdir(parents=True)
    (swapped / "1_2.tensor.swp").write_bytes(bytes(1024))
    (folder / "step4" / "rng_state_0.pth").write_bytes(b"of another program")
    result = verify(folder, "--full")
    assert result.exit_code == 0 and result.stdout.startswith("ok: 4 files, "), result.output
    assert "note: no-checksum: step4/offloaded_tensors/rank00/1_2.tensor.swp: " in result.stderr
    assert "note: not-checked: files that are not DeepSpeed's: rng_state_0.pth" in result.stderr
    expert = folder / "step4" / "expp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer": None}, expert)
    result = verify(folder, "--full")
    assert result.exit_code == 0 and result.stdout.startswith("ok: 5 files, "), result.output
    flip(expert, record_offset(expert, "data.pkl") * 8)
    assert {finding["file"] for finding in found_by(folder, "--full")} == {str(expert)}
