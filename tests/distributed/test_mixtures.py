"""Files of two saves in one folder, as where a tag is saved over: every combination is refused, or is one of them."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import ElasticCkptError, LayoutError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats import MetadataOptions, native
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.tools.conversion import convert
from elastic_ckpt.tools.opened import locate, open_checkpoint
from elastic_ckpt.tools.verification import verify
from tests.distributed.cells import Cell, Save, Saves, cells, crossing
from tests.distributed.mixture_jobs import Pair
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

pytestmark = pytest.mark.core

NO_SHEET = (("elastic_checkpoint", {"sheet": False}),)
PLAIN = [
    *(Pair(Setup(stage, precision)) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "fp16")),
    Pair(Setup(1, "bf16_fp32acc")),
    *(Pair(Setup(stage, "bf16"), step="still") for stage in (1, 2, 3)),
    *(Pair(Setup(stage, "fp16"), step="skipped") for stage in (1, 2, 3)),
    *(Pair(Setup(stage, "bf16", config=NO_SHEET), step="beside") for stage in (2, 3)),
    *(Pair(Setup(stage), at=0) for stage in (1, 3)),
    *(Pair(Setup(stage), at=0, step="still") for stage in (1, 3)),
]
PARALLEL = [
    Pair(Parallel("autotp", "llama", tp=2, stage=0)),
    Pair(Parallel("autotp", "llama", tp=2, stage=1, precision="bf16"), step="still"),
    Pair(Parallel("pipeline", "uniform", pp=2, stage=1, precision="bf16")),
    Pair(Parallel("pipeline", "uniform", pp=2, stage=1)),
]
CONFIG = ElasticConfig()


PairOf = Callable[[Pair], Path]


def pair_of(pair: Pair) -> Save:
    return Save(pair, 2, "mixture_jobs.save_pair")


@pytest.fixture(scope="module")
def saved(saves: Saves) -> PairOf:
    """The folder of a pair, with the tags ``a`` and ``b``."""
    saves.make([pair_of(pair) for pair in PLAIN + PARALLEL])
    return lambda pair: saves.folder(pair_of(pair))


#: Saved under one tag by four ranks, and then by two.
MORE = tuple(Setup(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16"))


def tag_of(setup: Setup, ranks: int, tag: str = "tag", over: Save | None = None) -> Save:
    return Save(setup, ranks, "mixture_jobs.save_tag", {"tag": tag}, source=over)


def saved_over(setup: Setup) -> Save:
    """By two ranks, over a save of four."""
    return tag_of(setup, 2, "over", tag_of(setup, 4, "over"))


@pytest.fixture(scope="module")
def saved_by_others(saves: Saves) -> Saves:
    """Those of :func:`tag_of` and :func:`saved_over` are made."""
    saves.make([tag_of(setup, ranks) for setup in MORE for ranks in (2, 4)])
    saves.make([saved_over(setup) for setup in MORE])
    return saves


@pytest.mark.parametrize("setup", MORE, ids=lambda setup: setup.name)
def test_saves_of_two_sizes_in_one_folder_are_one_of_both_or_refused(
    setup: Setup, saved_by_others: Saves, tmp_path: Path
) -> None:
    """Files of the ranks that only one of them (``a``) had are there, cut short (``x``), or not."""
    folders = {name: saved_by_others.folder(tag_of(setup, ranks)) / "tag" for name, ranks in (("a", 4), ("b", 2))}
    files = {name: {path.name for path in folder.glob("*.pt")} for name, folder in folders.items()}
    names = sorted(files["a"] | files["b"])
    beyond = [name not in files["b"] for name in names]
    of_b = list(product(*(["b", "a-x"][is_beyond] for is_beyond in beyond)))
    others = list(product(*(["ab", "a-x"][is_beyond] for is_beyond in beyond)))
    choices = {("a",) * len(names), *of_b, *random.Random(0).sample(others, min(len(others), 100))}
    known = {name: content(folder, with_states=True) for name, folder in folders.items()}
    found: dict[str, str | None] = {}
    for number, choice in enumerate(choices):
        mixed = tmp_path / str(number) / "tag"
        mixed.mkdir(parents=True)
        for name, save in zip(names, choice, strict=True):
            if save == "x":
                raw = (folders["a"] / name).read_bytes()
                (mixed / name).write_bytes(raw[: len(raw) // 2])
            elif save != "-":
                os.link(folders[save] / name, mixed / name)
        found["".join(choice)] = content(mixed, with_states=True)
        assert (found["".join(choice)] is None) == bool(verify(str(mixed), None, CONFIG).findings), choice
    assert None not in known.values() and set(found.values()) == {*known.values(), None}
    assert {found["".join(choice)] for choice in of_b} == {known["b"]}


@cells([crossing(saved_over(setup), setup, 2, "mixture_jobs.load_beside_leftovers") for setup in MORE])
def test_what_an_earlier_save_on_more_ranks_has_left_is_told_and_left_out(cell: Cell, facts: list[Any]) -> None:
    """DeepSpeed's own loader resumes beside it."""
    for each in facts:
        assert each["off"] == each["require"] and each["require"][0] == 4
        assert sum("left out: files of another save of this tag" in note for note in each["notes"]) == 1


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("setup", [each for each in MORE if each.stage == 3], ids=lambda setup: setup.name)
def test_what_is_left_over_is_neither_verified_nor_converted(
    setup: Setup, saved_by_others: Saves, tmp_path: Path
) -> None:
    tag = shutil.copytree(saved_by_others.folder(saved_over(setup)) / "over", tmp_path / "over")
    left = max(tag.glob("*zero_pp_rank_3_*optim_states.pt"))
    left.write_bytes(left.read_bytes()[:-100])
    verification = verify(str(tag), None, CONFIG, full=True)
    assert not verification.findings and verification.files == 4
    report = convert(open_checkpoint(locate(str(tag), None, False), CONFIG), tmp_path / "universal")
    assert not any("rank_2" in name for name in os.listdir(report.folder))
    assert content(Path(report.folder), with_states=True) is not None
    torch.save(Code(), left)  # which DeepSpeed's own loader would run on more ranks
    with pytest.raises(UnsafePickleError, match=left.name):
        open_checkpoint(locate(str(tag), None, False), CONFIG)
    assert [finding.file for finding in verify(str(tag), None, CONFIG).findings] == [str(left)]


def test_names_of_enormous_ranks_cost_nothing(saved: PairOf, tmp_path: Path) -> None:
    tag = shutil.copytree(saved(PLAIN[0]) / "a", tmp_path / "a")
    whole, last = content(tag, with_states=True), max(tag.glob("*zero_pp_rank_1_*"))
    far = tag / "zero_pp_rank_999999999999_mp_rank_00_optim_states.pt"
    shutil.copy(last, far)
    assert content(tag, with_states=True) == whole  # it is not what its name says
    last.unlink()
    with pytest.raises(
        LayoutError, match=r"(?s)is missing.*zero_pp_rank_1_mp.*999999999999.* but 1 file of lower ranks"
    ):
        open_checkpoint(locate(str(tag), None, False), ElasticConfig(verify="bytes"))


def test_what_is_missing_is_told_before_what_is_not_supported(
    saved: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The missing file may come, and an older tag may have it."""
    tag = shutil.copytree(saved(PLAIN[0]) / "a", tmp_path / "a")

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedError("not supported yet")

    monkeypatch.setattr(native, "index_shard", refuse)
    with pytest.raises(UnsupportedError):
        open_checkpoint(locate(str(tag), None, False), CONFIG)
    min(tag.glob("*zero_pp_rank_0_*")).unlink()
    with pytest.raises(LayoutError, match="is missing"):
        open_checkpoint(locate(str(tag), None, False), CONFIG)


def test_layers_of_more_tensor_parallel_ranks_than_were_saved_are_refused(saved: PairOf, tmp_path: Path) -> None:
    tag = shutil.copytree(saved(PARALLEL[-1]) / "a", tmp_path / "a")
    layer = min(tag.glob("layer_*"))
    torch.save(torch.load(layer), tag / f"{layer.name.partition('-')[0]}-model_01-model_states.pt")
    with pytest.raises(LayoutError, match="tensor-parallel rank that the save did not have"):
        open_checkpoint(locate(str(tag), None, False), CONFIG)


#: Runs whose optimizer, or loss scaler, has not counted the steps of the counters, which each save states.
HOPS: dict[str, tuple[list[Setup], list[dict[str, bool]]]] = {
    "a phase without ZeRO": ([Setup(0, "bf16"), Setup(3, "bf16"), Setup(3, "bf16"), Setup(1, "bf16")], []),
    "a reset": ([Setup(3), Setup(3), Setup(3), Setup(2)], [{"load_optimizer_states": False}]),
    "later in fp16": ([Setup(1), Setup(1, "fp16"), Setup(3, "fp16"), Setup(0, "fp16"), Setup(1, "fp16")], []),
}


def mixtures(saves: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Every choice of one of two saves for each file, as a folder of a tag; of many files, each file alone, and some."""
    names = sorted(os.listdir(saves / "a"))
    assert names == sorted(os.listdir(saves / "b"))
    choices = list(product("ab", repeat=len(names)))
    if len(names) > 4:
        drawn = random.Random(0).sample(choices, 30)
        choices = [each for each in choices if each in drawn or min(each.count("a"), each.count("b")) < 2]
    for number, choice in enumerate(choices):
        mixed = folder / str(number) / "tag"
        mixed.mkdir(parents=True)
        for name, save in zip(names, choice, strict=True):
            os.link(saves / save / name, mixed / name)
        yield "".join(choice), mixed


def content(folder: Path, with_states: bool) -> str | None:
    """A digest of all that a load takes from a checkpoint; ``None`` if it is refused."""
    found = look_at(str(folder.parent), folder.name)
    assert found is not None
    try:
        checkpoint = read_checkpoint(found, MetadataOptions(with_states=with_states))
    except ElasticCkptError:
        return None
    metadata, state, digest = checkpoint.metadata, checkpoint.training_state, hashlib.sha256()
    raw = [Path(file.path).read_bytes() for file in metadata.files]
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        for chunk in tensor.chunks:
            nbytes = chunk.range.numel * ITEMSIZE[tensor.dtype]
            digest.update(raw[chunk.file][chunk.byte_offset : chunk.byte_offset + nbytes])
    scalars = {name: saved.scalars for name, saved in metadata.parameters.items()}
    others = (state.counters, state.lr_scheduler, state.loss_scale, state.overflow, state.checkpoint.get("epoch"))
    digest.update(repr((sorted(scalars.items()), metadata.groups, others)).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("pair", PLAIN + PARALLEL, ids=lambda pair: pair.name)
def test_every_mixture_is_refused_or_is_one_of_both_saves(pair: Pair, saved: PairOf, tmp_path: Path) -> None:
    with_states = pair.setup.stage > 0  # which only a live model can name
    found = [
        (choice, content(folder, with_states), verify(str(folder), None, CONFIG).findings)
        for choice, folder in mixtures(saved(pair), tmp_path)
    ]
    saves = {digest for choice, digest, _ in found if len(set(choice)) == 1}
    assert None not in saves and len(saves) == 2
    for choice, digest, findings in found:
        assert digest is None or digest in saves, choice
        assert (digest is None) == bool(findings), (choice, findings)


@cells(
    [
        Cell(name, None, "mixture_jobs.hop", 2, {"setups": setups, "arguments": arguments})
        for name, (setups, arguments) in HOPS.items()
    ]
)
def test_runs_that_began_elsewhere_go_on(cell: Cell, facts: list[list[str]]) -> None:
    assert not any(facts)


MOVING = [(Setup(3), "rename"), (Setup(1, "bf16"), "cut"), (Setup(2), "folders")]


@cells(
    [
        Cell(
            f"{setup.name}, {way}",
            pair_of(Pair(setup)),
            "mixture_jobs.load_while_saved_over",
            2,
            {"setup": setup, "way": way, "times": 20},
        )
        for setup, way in MOVING
    ]
)
def test_a_tag_that_is_saved_over_is_one_save_or_an_error(cell: Cell, facts: list[Any]) -> None:
    first, second = facts
    assert first.wrong == second.wrong == []
    assert first.found == second.found
    assert first.found["loaded"] and len(first.found) > 1, "it is a race, which neither side wins each time"
