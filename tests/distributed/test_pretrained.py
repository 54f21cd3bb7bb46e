"""``load_pretrained`` and ``from_pretrained`` make the same model of the same folder, bit by bit."""

from __future__ import annotations

import json
import re
import shutil
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from safetensors.torch import load_file

from tests.distributed.cells import Cell, Change, Save, Saves, cells
from tests.distributed.facts import Refused, Refuses
from tests.distributed.model import Setup
from tests.distributed.pretrained_folders import MODELS
from tests.distributed.pretrained_jobs import ENGINE, META, MODULE, Hooked
from tests.hostile_text import HOSTILE_UTF8

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
#: Models that go everywhere on two ranks; each of the others goes to one place on each number of ranks.
EVERYWHERE = ("llama", "gpt2", "mixtral")
UNPERSISTENT = Setup(3, "bf16", zero=(("stage3_param_persistence_threshold", 0),))
#: Models whose folders lack something, which has no values on the meta device.
ON_META = [
    (2, "llama", Setup(3)),
    (2, "mixtral", UNPERSISTENT),
    (3, "gpt2", Setup(3)),
    (3, "qwen2_moe", UNPERSISTENT),
]


def folder_of(name: str) -> Save:
    return Save(name, 1, "pretrained_folders.save")


LLAMA, GPT2 = folder_of("llama"), folder_of("gpt2")
ADAPTER = Save("adapter", 1, "pretrained_folders.save_adapter", source=LLAMA)
WITHOUT_HEAD = folder_of("llama, prefix added")
LLAMA_CASE = {"model": "LlamaForCausalLM", "setup": Setup(3)}


def loaded(name: str, ranks: int, setup: Setup, into: str, job: str = "load") -> Cell:
    case = {"model": MODELS[name].loaded, "setup": setup, "into": into}
    title = f"{name} into {into} of {setup.name} on {ranks}{', from a bucket' * (job != 'load')}"
    return Cell(title, folder_of(name), f"pretrained_jobs.{job}", ranks, case)


def places_of(position: int, name: str, ranks: int) -> list[tuple[Setup, str]]:
    """Where a model goes on so many ranks."""
    if ranks == 2 and name in EVERYWHERE:
        return PLACES
    return [PLACES[(position + ranks) % len(PLACES)]]


@cells(
    [
        *(
            loaded(name, ranks, setup, into)
            for ranks in (1, 2, 3)
            for position, name in enumerate(MODELS)
            for setup, into in places_of(position, name, ranks)
        ),
        *(loaded(name, ranks, setup, META) for ranks, name, setup in ON_META),
        loaded("llama", 2, Setup(1), ENGINE, "load_from_bucket"),
        loaded("llama", 2, Setup(3, "bf16"), META, "load_from_bucket"),
    ]
)
def test_engines_and_modules_get_what_from_pretrained_makes(cell: Cell, facts: list[dict[str, str]]) -> None:
    assert facts == [{}] * cell.ranks


def hooked(name: str, save: Save, ranks: int, case: dict[str, Any], base: Save | None, change: Any = None) -> Cell:
    """``from_pretrained``, for which elastic_ckpt loads the folder ``base``, or leaves it to Transformers."""
    fits = None if change is None else (save, LLAMA_CASE)
    return Cell(name, save, "pretrained_jobs.hooked", ranks, case, change, expected=base, fits=fits)


# with Transformers 5.24 those of these two fail under ZeRO-3: they initialize what is partitioned
HOOKED = [name for name in MODELS if name not in ("whisper", "resnet")]


@cells(
    [
        hooked(name, folder_of(name), 3, {"model": MODELS[name].loaded, "setup": Setup(3, "bf16")}, folder_of(name))
        for name in HOOKED
    ]
)
def test_from_pretrained_takes_this_path_by_itself_under_zero_3(cell: Cell, facts: list[Hooked], saves: Saves) -> None:
    for each in facts:
        assert each.loads == [str(saves.folder(cell.expected))], each.said
        assert each.differences == {}
    assert len(facts) == cell.ranks


OFF = Setup(3, config=(("elastic_checkpoint", {"pretrained": "off"}),))


def leave_nothing_known(folder: Path) -> None:
    """Weights of names that the model lacks."""
    archive({"weight": torch.ones(3)})(folder)


@cells([hooked("foreign", LLAMA, 2, LLAMA_CASE, LLAMA, leave_nothing_known)])
def test_weights_of_another_model_are_all_initialized_as_transformers_does(
    cell: Cell, facts: list[Hooked], saves: Saves
) -> None:
    for each in facts:
        assert len(each.loads) == 1 and each.differences == {}


@cells(
    [
        hooked("switched off", LLAMA, 2, {**LLAMA_CASE, "setup": OFF}, None),
        hooked("a loader of its own", LLAMA, 2, {**LLAMA_CASE, "model": "OwnLoader"}, None),
    ]
)
def test_what_may_come_out_otherwise_is_left_to_transformers(cell: Cell, facts: list[Hooked]) -> None:
    for each in facts:
        assert not each.loads and not each.differences
        said = any("OwnLoader loads its entries in a way of its own" in line for line in each.said)
        assert said == (cell.case["model"] == "OwnLoader" and bool(each.said)), each


def copy_of(folder: Path, name: str) -> Path:
    """A copy of a folder, in it."""
    return Path(shutil.copytree(folder, folder / name))


def double_elsewhere(folder: Path) -> None:
    """Beside the weights, others of the same shapes."""
    for path in copy_of(folder, "elsewhere").glob("*.safetensors"):
        weights = safetensors.torch.load_file(path)
        safetensors.torch.save_file({key: 2 * value for key, value in weights.items()}, path, {"format": "pt"})


def join_elsewhere(folder: Path) -> None:
    """Beside the weights, the same in one file."""
    shards = [safetensors.torch.load_file(path) for path in folder.glob("*.safetensors")]
    whole = copy_of(folder, "elsewhere")
    for path in whole.glob("*safetensors*"):
        path.unlink()
    safetensors.torch.save_file(dict(ChainMap(*shards)), whole / "model.safetensors", {"format": "pt"})


RENAMING = Setup(3, config=(("elastic_checkpoint", {"rename": [["layers\\.0\\.", "layers.9."]]}),))
ELSEWHERE = {**LLAMA_CASE, "elsewhere": "elsewhere"}


@cells(
    [
        hooked("names of checkpoints", LLAMA, 2, {**LLAMA_CASE, "setup": RENAMING}, LLAMA),
        hooked("an adapter", ADAPTER, 2, LLAMA_CASE, LLAMA),
    ]
)
def test_names_of_checkpoints_and_adapters_are_no_mixtures(cell: Cell, facts: list[Hooked], saves: Saves) -> None:
    for each in facts:
        assert each.differences == {} and each.loads == [str(saves.folder(cell.expected))]
        kept = [keys for keys in each.expected_keys if keys is not None]
        assert len(kept) == (cell.save == ADAPTER) and all("lora" in key for keys in kept for key in keys), kept


WEIGHT = "model.layers.0.mlp.down_proj.weight"


def shard_of(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"))


def cut(folder: Path) -> None:
    shard = shard_of(folder)
    shard.write_bytes(shard.read_bytes()[:-1])


def rename_in_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.norm.weight", "model.norm.scale"))


def edit_index(edit: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """Change which tensor is in which file, by the index."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        edit(index["weight_map"])
        path.write_text(json.dumps(index))

    return change


def lead_out(folder: Path) -> None:
    """An index that leads out of its folder, and into it again."""
    edit_index(lambda index: index.update({name: f"../{folder.name}/{file}" for name, file in index.items()}))(folder)


def save_twice(folder: Path) -> None:
    """One more tensor in the last shard, with other values than it has in its own."""
    shard = shard_of(folder)
    weights = safetensors.torch.load_file(shard)
    name, file = next(pair for pair in index_of(folder).items() if pair[1] != shard.name)
    other = 2 * safetensors.torch.load_file(folder / file)[name]
    safetensors.torch.save_file({**weights, name: other}, shard, {"format": "pt"})


def index_of(folder: Path) -> dict[str, str]:
    index: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return index


def list_what_is_tied(folder: Path) -> None:
    """An index that lists a head which is the embedding."""
    names = safetensors.torch.load_file((folder / "model.safetensors").rename(folder / "part.safetensors"))
    index = {"weight_map": dict.fromkeys([*names, "lm_head.weight"], "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def empty(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def archive(content: dict[str, Any]) -> Callable[[Path], None]:
    """A file of ``torch.save`` in the place of all weights."""

    def change(folder: Path) -> None:
        empty(folder)
        torch.save(content, folder / "pytorch_model.bin")

    return change


def weight_in_archive(convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """All weights in a file of ``torch.save``, one of them converted."""

    def change(folder: Path) -> None:
        names = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
        archive({**names, WEIGHT: convert(names[WEIGHT])})(folder)

    return change


def with_entry(entry: Any) -> Callable[[Path], None]:
    """All weights in a file of ``torch.save``, with one more entry."""

    def change(folder: Path) -> None:
        names = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
        archive({**names, "more": entry})(folder)

    return change


def listed_weights(folder: Path) -> None:
    empty(folder)
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")


def cut_archive(folder: Path) -> None:
    with_entry(torch.ones(1))(folder)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-10])


def wide_view(folder: Path) -> None:
    """A view, which is left to Transformers, beside the configuration of a wider model."""
    weight_in_archive(transposed)(folder)
    with_config(hidden_size=32, head_dim=4)(folder)


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """The same values in the other order in memory."""
    return weight.t().contiguous().t()


def without_values(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of the meta device."""
    return weight.to("meta")


def wide(weight: torch.Tensor) -> torch.Tensor:
    """Terabytes of one value."""
    return weight[0, :1].expand(1 << 40)


def with_dtype(name: str) -> Callable[[Path], None]:
    """Another dtype in the header, of as many bytes."""

    def change(folder: Path) -> None:
        file = next(each for each in folder.glob("*.safetensors") if WEIGHT in load_file(each))
        whole = file.read_bytes()
        nbytes = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + nbytes])
        header[WEIGHT]["dtype"] = name
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + nbytes :])

    return change


def add_scale(folder: Path) -> None:
    """One more tensor, of a dtype that torch has and Transformers' list of dtypes has not."""
    shard = shard_of(folder)
    whole = shard.read_bytes()
    nbytes = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + nbytes])
    data = whole[8 + nbytes :]
    header["scale"] = {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [len(data), len(data) + 8]}
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data + bytes(8))
    edit_index(lambda index: index.update(scale=shard.name))(folder)


def add_extra_state(folder: Path) -> None:
    """Bytes that a module of the model may unpickle."""
    shard = shard_of(folder)
    weights = safetensors.torch.load_file(shard)
    weights["model._extra_state"] = torch.ones(3, dtype=torch.uint8)
    safetensors.torch.save_file(weights, shard, {"format": "pt"})
    edit_index(lambda index: index.update({"model._extra_state": shard.name}))(folder)


def name_badly(folder: Path) -> None:
    """A tensor that begins nowhere, with a name that does something to a terminal."""
    shard = shard_of(folder)
    text = json.dumps({HOSTILE_UTF8: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))


def name_at_length(folder: Path) -> None:
    """The same, with a name as long as a file may want it."""
    name = "experts." * 1000
    with_entry(torch.ones(1))(folder)
    weights = torch.load(folder / "pytorch_model.bin")
    weights[name] = weights.pop("more")
    torch.save(weights, folder / "pytorch_model.bin")


def with_config(**widths: int) -> Callable[[Path], None]:
    """The configuration of another model beside the weights."""

    def change(folder: Path) -> None:
        transformers.LlamaConfig.from_pretrained(folder, **widths).save_pretrained(folder / "config")

    return change


def wrong(
    name: str,
    error: str,
    words: str,
    change: Change | None = None,
    save: Save = LLAMA,
    job: str = "refused",
    **case: Any,
) -> Cell:
    expected = Refuses(error, (words,))
    more = {**LLAMA_CASE, **case}
    return Cell(name, save, f"pretrained_jobs.{job}", 2, more, change, expected=expected, fits=(LLAMA, LLAMA_CASE))


GONE = "s3://bucket/models/gone"


@cells(
    [
        wrong("cut", "DamagedError", "truncated or unreadable", cut),
        wrong("lacking", "DamagedError", "file of the checkpoint is missing", lambda folder: shard_of(folder).unlink()),
        wrong("mixed", "DamagedError", "index does not belong", rename_in_index),
        wrong("empty", "NotFoundError", "this folder has no weights", empty),
        wrong("others", "UnsupportedError", "holds more than weights", archive({"note": "of no tensor"})),
        wrong("code", "UnsafePickleError", "safe globals", archive({"weight": print})),
        wrong("views", "UnsupportedError", "a view that is not contiguous", archive({"weight": torch.ones(3, 4).t()})),
        wrong("transposed", "UnsupportedError", "a view that is not contiguous", weight_in_archive(transposed)),
        wrong("complex", "MismatchError", "would lose precision", weight_in_archive(torch.Tensor.cfloat)),
        wrong("integers", "MismatchError", "would lose precision", with_dtype("I32")),
        wrong("of no engine", "MismatchError", "dtype of this weight", with_dtype("I32"), job="refused_by_module"),
        wrong("four bits", "UnsupportedError", "a dtype that is not supported", with_dtype("F4")),
        wrong("foreign", "MismatchError", "no weight of this folder is in", archive({"weight": torch.ones(3)})),
        wrong("wider", "MismatchError", "differs", with_config(hidden_size=32, head_dim=4), config="config"),
        wrong("strict", "MismatchError", "do not have the same weights", save=WITHOUT_HEAD),
        wrong("hub id", "NotFoundError", "no such folder", url="organization/model"),
        wrong("page", "NotFoundError", "snapshot_download", url="https://huggingface.co/organization/model"),
        wrong("other files", "MismatchError", "/elsewhere on rank 1", double_elsewhere, elsewhere="elsewhere"),
        wrong("no such object", "NotFoundError", "no weights", job="refused_from_bucket", url=GONE),
    ]
)
def test_wrong_folders_are_errors_that_change_nothing(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)
    assert [each.kinds[0] for each in facts] == [cell.expected.error] * cell.ranks
    for each in facts:
        (text,) = each.texts
        assert each.remedies and not re.search(r"\btag\b|topology|load_checkpoint|this frozen", text), text


@cells([Cell("strict", WITHOUT_HEAD, "pretrained_jobs.follow", 2, LLAMA_CASE)])
def test_the_remedy_of_a_strict_load_loads_the_rest(cell: Cell, facts: list[dict[str, str]]) -> None:
    assert facts == [{}] * cell.ranks


@cells(
    [
        Cell(
            "a tied head",
            GPT2,
            "pretrained_jobs.refused",
            2,
            {"model": "GPT2LMHeadModel", "setup": Setup(3)},
            list_what_is_tied,
            fits=(WITHOUT_HEAD, LLAMA_CASE),
        )
    ]
)
def test_what_is_tied_is_not_missing_though_the_index_lists_it(cell: Cell, facts: list[Refused]) -> None:
    assert [each.kinds for each in facts] == [()] * cell.ranks
    assert [each.texts for each in facts] == [{"loaded without an error"}] * cell.ranks


@cells([wrong("deeper", "MismatchError", "", with_config(num_hidden_layers=3), job="lacking", config="config")])
def test_a_folder_without_all_weights_of_a_meta_module_is_refused(cell: Cell, facts: list[tuple[str, bool]]) -> None:
    """Whose other parameters would have no values; nothing is allocated."""
    assert len(facts) == cell.ranks and facts[0] == facts[1]
    said, is_untouched = facts[0]
    assert said.startswith("MismatchError: this folder lacks weights of a module that was on the meta device")
    assert "model.layers.2." in said and is_untouched


HOOK = "refused_by_hook"


@cells(
    [
        wrong("cut", "DamagedError", "truncated or unreadable", cut, job=HOOK),
        wrong("index that leads out", "DamagedError", "not in its folder", lead_out, job=HOOK),
        wrong(
            "index of more",
            "DamagedError",
            "index does not belong",
            edit_index(lambda index: index.update(more=index[WEIGHT])),
            job=HOOK,
        ),
        wrong("in two shards", "DamagedError", "index does not belong", save_twice, job=HOOK),
        wrong(
            "other values", "MismatchError", "/elsewhere on rank 1", double_elsewhere, job=HOOK, elsewhere="elsewhere"
        ),
        wrong(
            "other files",
            "MismatchError",
            "ranks have different files",
            join_elsewhere,
            job=HOOK,
            elsewhere="elsewhere",
        ),
        wrong("integers", "MismatchError", "dtype of this weight", with_dtype("I32"), job=HOOK),
        wrong("code", "UnsafePickleError", "safe globals", with_entry(print), job=HOOK),
        wrong("code elsewhere", "UnsafePickleError", "weights_only", with_entry(print), job=HOOK, model="OwnLoader"),
        wrong("index that leads out, left", "DamagedError", "not in its folder", lead_out, job=HOOK, model="OwnLoader"),
        wrong("cut, left", "DamagedError", "truncated or unreadable", cut, job=HOOK, model="OwnLoader"),
        wrong("in two shards, left", "MismatchError", "tensor of one name", save_twice, job=HOOK, model="OwnLoader"),
        wrong("extra state", "UnsafePickleError", "may unpickle", add_extra_state, job=HOOK, model="OwnLoader"),
        wrong("long name", "DamagedError", "too long", name_at_length, job=HOOK),
        wrong("long name, left", "DamagedError", "too long", name_at_length, job=HOOK, model="OwnLoader"),
        wrong(
            "sparse", "UnsupportedError", "holds more than weights", weight_in_archive(torch.Tensor.to_sparse), job=HOOK
        ),
        wrong("no values", "UnsupportedError", "holds more than weights", weight_in_archive(without_values), job=HOOK),
        wrong("one value", "UnsupportedError", "which share", weight_in_archive(wide), job=HOOK),
        wrong("number", "UnsupportedError", "holds more than weights", archive({5: torch.ones(1)}), job=HOOK),
        wrong("a list", "UnsupportedError", "holds more than weights", listed_weights, job=HOOK),
        wrong("cut archive", "DamagedError", "truncated", cut_archive, job=HOOK, model="OwnLoader"),
        wrong(
            "wider", "MismatchError", "other shapes", with_config(hidden_size=32, head_dim=4), job=HOOK, config="config"
        ),
    ]
)
def test_from_pretrained_refuses_wrong_folders_on_every_rank(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)
    assert [each.kinds[0] for each in facts] == [cell.expected.error] * cell.ranks
    assert len({each.texts for each in facts}) == 1 and all(each.remedies for each in facts)


@cells([Cell("text", LLAMA, "pretrained_jobs.controls_of_hook", 2, {**LLAMA_CASE, "model": "OwnLoader"}, name_badly)])
def test_what_the_library_of_safetensors_says_of_a_file_controls_no_terminal(
    cell: Cell, facts: list[list[str]]
) -> None:
    assert facts == [[]] * cell.ranks


@cells([Cell("scale", LLAMA, "pretrained_jobs.refused_by_hook", 2, LLAMA_CASE, add_scale)])
def test_what_transformers_reads_on_rank_0_alone_keeps_no_rank_waiting(cell: Cell, facts: list[Refused]) -> None:
    """Of other ranks, Transformers asks the name of a dtype, which it does not know."""
    assert [each.texts for each in facts] == [{"loaded without an error"}] * cell.ranks


@cells(
    [
        wrong(
            "more words",
            "MismatchError",
            "other shapes",
            with_config(vocab_size=70),
            job="follow_hook",
            config="config",
        )
    ]
)
def test_what_has_another_shape_is_initialized_if_from_pretrained_is_to_ignore_it(
    cell: Cell, facts: list[tuple[Refused, dict[str, str], frozenset[str]]]
) -> None:
    cell.expected.check([tried for tried, _, _ in facts])
    for _, differences, new in facts:
        assert differences == {} and new == {"model.embed_tokens.weight", "lm_head.weight"}


@cells(
    [
        hooked("a text", LLAMA, 2, LLAMA_CASE, None, with_entry("text")),
        hooked("a view", LLAMA, 2, LLAMA_CASE, None, weight_in_archive(transposed)),
    ]
)
def test_what_transformers_gets_of_an_archive_is_made_here(cell: Cell, facts: list[Hooked]) -> None:
    for each in facts:
        assert each.differences == {} and not each.loads
        assert each.given == [True]


@cells(
    [Cell("wider", LLAMA, "pretrained_jobs.errors_of_transformers", 2, {**LLAMA_CASE, "config": "config"}, wide_view)]
)
def test_what_transformers_finds_on_rank_0_is_an_error_on_every_rank(cell: Cell, facts: list[str]) -> None:
    assert len(facts) == cell.ranks and len(set(facts)) == 1
    assert "RuntimeError" in facts[0] and "size mismatch" in facts[0]
