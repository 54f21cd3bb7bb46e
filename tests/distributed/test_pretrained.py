"""``load_pretrained`` and ``from_pretrained`` make the same model of the same folder, bit by bit."""

from __future__ import annotations

import json
import shutil
from collections import ChainMap
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers

from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.distributed.pretrained_folders import MODELS, write
from tests.distributed.pretrained_jobs import ENGINE, META, MODULE, Case
from tests.storage.buckets import serve_bucket

#: Where to: engines of each stage, and modules of ZeRO-3 before they have one.
PLACES = [
    (Setup(0), ENGINE),
    (Setup(3, "bf16"), MODULE),
    (Setup(1, "bf16"), ENGINE),
    (Setup(3), ENGINE),
    (Setup(2), ENGINE),
    (Setup(3), MODULE),
    (Setup(3, "bf16", zero=(("stage3_param_persistence_threshold", 0), ("sub_group_size", 150))), ENGINE),
]


BY_URL = [(Setup(1), ENGINE), (Setup(3, "bf16"), META)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("pretrained") for name in MODELS}
    for name, folder in found.items():
        write(name, folder)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_engines_and_modules_get_what_from_pretrained_makes(
    ranks: int, launch: Launch, folders: dict[str, Path]
) -> None:
    everywhere = {"llama", "gpt2", "mixtral"} if ranks == 2 else set()
    cases = [
        Case(str(folders[name]), model.loaded, *place)
        for position, (name, model) in enumerate(MODELS.items())
        for number, place in enumerate(PLACES)
        if name in everywhere or number == (position + ranks) % len(PLACES)
    ]
    if ranks > 1:  # what the folder lacks has no values there
        names = ("llama", "mixtral") if ranks == 2 else ("gpt2", "qwen2_moe")
        setups = (Setup(3), Setup(3, "bf16", zero=(("stage3_param_persistence_threshold", 0),)))
        cases += [Case(str(folders[n]), MODELS[n].loaded, s, META) for n, s in zip(names, setups, strict=True)]
    found = launch(ranks, "pretrained_jobs.load", cases, timeout=500)
    assert len(found) == len(cases) * ranks
    assert not [each for each in found if each.differences]


def test_from_pretrained_takes_this_path_by_itself_under_zero_3(launch: Launch, folders: dict[str, Path]) -> None:
    # with Transformers 5.24 those of these two fail under ZeRO-3: they initialize what is partitioned
    models = {name: model for name, model in MODELS.items() if name not in ("whisper", "resnet")}
    cases = [Case(str(folders[name]), model.loaded, Setup(3, "bf16")) for name, model in models.items()]
    found = launch(3, "pretrained_jobs.hooked", cases)
    assert len(found) == len(cases) * 3
    assert [(each.case.folder, each.differences, each.said) for each in found if each.loads != [each.case.folder]] == []
    assert not [each for each in found if each.differences]


def test_what_may_come_out_otherwise_is_left_to_transformers(launch: Launch, folders: dict[str, Path]) -> None:
    llama, off = str(folders["llama"]), (("elastic_checkpoint", {"pretrained": "off"}),)
    cases = [Case(llama, "LlamaForCausalLM", Setup(3, config=off)), Case(llama, "OwnLoader", Setup(3))]
    for each in launch(2, "pretrained_jobs.hooked", cases):
        assert not each.loads and not each.differences
        said = any("OwnLoader loads its entries in a way of its own" in line for line in each.said)
        assert said == (each.case.model == "OwnLoader" and bool(each.said)), each


def test_files_that_differ_between_ranks_names_of_checkpoints_and_adapters_are_no_mixtures(
    launch: Launch, folders: dict[str, Path], tmp_path: Path
) -> None:
    llama, name = folders["llama"], "LlamaForCausalLM"
    other = shutil.copytree(llama, tmp_path / "other")
    for path in other.glob("*.safetensors"):
        weights = safetensors.torch.load_file(path)
        safetensors.torch.save_file({key: 2 * value for key, value in weights.items()}, path, {"format": "pt"})
    whole = shutil.copytree(llama, tmp_path / "whole", ignore=shutil.ignore_patterns("*safetensors*"))
    shards = [safetensors.torch.load_file(path) for path in llama.glob("*.safetensors")]
    safetensors.torch.save_file(dict(ChainMap(*shards)), whole / "model.safetensors", {"format": "pt"})
    adapter = tmp_path / "adapter"
    base = transformers.LlamaForCausalLM.from_pretrained(llama)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    rename = (("elastic_checkpoint", {"rename": [["layers\\.0\\.", "layers.9."]]}),)
    cases = {
        "ranks": Case(str(llama), name, Setup(3), elsewhere=str(other)),
        "numbers": Case(str(llama), name, Setup(3), elsewhere=str(whole)),
        "renamed": Case(str(llama), name, Setup(3, config=rename)),
        "adapter": Case(str(adapter), name, Setup(3)),
    }
    found = launch(2, "pretrained_jobs.hooked", list(cases.values()))
    for each, what in zip(found, [*cases, *cases], strict=True):
        assert not each.differences, (what, each.differences)
        assert each.loads == ([] if what in ("ranks", "numbers") else [str(llama)]), (what, each.loads)
        kept = [keys for keys in each.expected_keys if keys is not None]
        assert len(kept) == (what == "adapter") and all("lora" in key for keys in kept for key in keys), (what, kept)
    assert [sum("ranks have different files" in line for line in each.said) for each in found[:2]] == [1, 1]


def test_folders_in_object_stores_are_loaded(launch: Launch, folders: dict[str, Path]) -> None:
    with serve_bucket() as bucket:
        bucket.put(folders["llama"], "models/llama")
        url, config = "s3://bucket/models/llama", (("elastic_checkpoint", {"storage_options": bucket.options}),)
        llama, kind = str(folders["llama"]), MODELS["llama"].loaded
        names = {"url": url, "elsewhere": f"{url}/"}  # one folder
        cases = [Case(llama, kind, replace(setup, config=config), into, **names) for setup, into in BY_URL]
        found = launch(2, "pretrained_jobs.load", cases)
        away = Case(llama, kind, replace(Setup(1), config=config), url="s3://bucket/models/gone")
        (gone, _) = launch(2, "pretrained_jobs.refused", [away])
    assert not [each for each in found if each.differences]
    assert gone.kinds[:1] == ("NotFoundError",) and "no weights" in "".join(gone.texts)


def damaged(source: Path, folder: Path) -> dict[str, tuple[Path, str, str]]:
    """Folders with what is wrong with each, the class of the error, and what it says."""
    found = {}

    def add(what: str, kind: str, text: str) -> Path:
        found[what] = shutil.copytree(source, folder / what), kind, text
        return folder / what

    shard = max(add("cut", "DamagedError", "truncated or unreadable").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    max(add("lacking", "DamagedError", "file of the checkpoint is missing").glob("*.safetensors")).unlink()
    index = add("mixed", "DamagedError", "index does not belong") / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.norm.weight", "model.norm.scale"))
    for file in add("empty", "NotFoundError", "this folder has no weights").glob("model*"):
        file.unlink()
    for what, content, kind, text in (
        ("others", {"note": "of no tensor"}, "UnsupportedError", "does not hold weights alone"),
        ("code", {"weight": print}, "UnsafePickleError", "safe globals"),
        ("views", {"weight": torch.ones(3, 4).t()}, "UnsupportedError", "a view that is not contiguous"),
        ("foreign", {"weight": torch.ones(3)}, "MismatchError", "no weight of this folder is in the live model"),
    ):
        place = add(what, kind, text)
        for file in place.glob("model*"):
            file.unlink()
        torch.save(content, place / "pytorch_model.bin")
    return found


def test_wrong_folders_are_errors_that_change_nothing(launch: Launch, folders: dict[str, Path], tmp_path: Path) -> None:
    llama, gpt2 = folders["llama"], folders["gpt2"]
    wrong: dict[str, tuple[Path | str, str, str]] = {**damaged(llama, tmp_path)}
    wider = transformers.LlamaConfig.from_pretrained(llama, hidden_size=32, head_dim=4)
    wider.save_pretrained(tmp_path / "wider")
    wrong["wider"] = llama, "MismatchError", "differs"
    wrong["strict"] = folders["llama, prefix added"], "MismatchError", "do not have the same weights"
    tied = shutil.copytree(gpt2, tmp_path / "tied")
    names = safetensors.torch.load_file((tied / "model.safetensors").rename(tied / "part.safetensors"))
    index = {"weight_map": dict.fromkeys([*names, "lm_head.weight"], "part.safetensors")}
    (tied / "model.safetensors.index.json").write_text(json.dumps(index))
    wrong["tied"] = tied, "", "loaded without an error"  # what is tied is not missing, though the index lists it
    wrong["hub id"] = "organization/model", "NotFoundError", "no such folder"
    wrong["page"] = "https://huggingface.co/organization/model", "NotFoundError", "snapshot_download"
    twice = shutil.copytree(llama, tmp_path / "twice")
    for path in twice.glob("*.safetensors"):
        weights = safetensors.torch.load_file(path)
        safetensors.torch.save_file({key: 2 * value for key, value in weights.items()}, path, {"format": "pt"})
    wrong["other files"] = llama, "MismatchError", f"others in {twice} on rank 1"
    configs = {"wider": tmp_path / "wider", "tied": gpt2}
    classes = {"tied": "GPT2LMHeadModel"}
    cases = [
        Case(
            str(folder),
            classes.get(what, "LlamaForCausalLM"),
            Setup(3),
            config=str(configs.get(what, llama)),
            strict=True,
            elsewhere=str(twice) if what == "other files" else "",
        )
        for what, (folder, _, _) in wrong.items()
    ]
    found = launch(2, "pretrained_jobs.refused", cases)
    assert len(found) == 2 * len(cases)
    for each, (what, (_, kind, text)) in zip(found, [*wrong.items()] * 2, strict=True):
        assert (each.kinds[:1] or ("",)) == (kind,) and len(each.texts) == 1, (what, each)
        assert text in next(iter(each.texts)) and not (each.changed and kind), (what, each)


def test_a_folder_without_all_weights_of_a_meta_module_is_refused(
    launch: Launch, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Whose other parameters would have no values; nothing is allocated."""
    transformers.LlamaConfig.from_pretrained(folders["llama"], num_hidden_layers=3).save_pretrained(tmp_path)
    case = Case(str(folders["llama"]), "LlamaForCausalLM", Setup(3), config=str(tmp_path))
    found = launch(2, "pretrained_jobs.lacking", case)
    assert found[0] == found[1]
    said, is_untouched = found[0]
    assert said.startswith("MismatchError: this folder lacks weights of a module that was on the meta device")
    assert "model.layers.2." in said and is_untouched
