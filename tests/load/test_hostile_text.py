"""Text that controls a terminal, in each place of a checkpoint that has text: what loads and commands print has none."""

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.text import printable
from elastic_ckpt.engines.training_state import LoadArguments
from elastic_ckpt.errors import ElasticCkptError, printable_errors
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.load.flow import LoadCall
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.load.retries import RetryPolicy
from tests.hostile_text import HOSTILE, controls_in, hostile_texts, with_strings
from tests.unpartitioned import FILE, Model, indexed, trained

Change = Callable[[Path, str], None]
TAG = "step3"


def edited(change: Callable[[dict[str, Any], str], Any]) -> Change:
    """The change of a folder that one of its file's tree makes."""

    def edit(folder: Path, text: str) -> None:
        path = folder / TAG / FILE
        tree = torch.load(path, weights_only=False)
        change(tree, text)
        torch.save(tree, path)

    return edit


def of_tag(folder: Path, text: str) -> None:
    name = of_a_name(text)
    (folder / TAG).rename(folder / name)
    (folder / "latest").write_text(name, errors="surrogateescape")


def of_a_name(text: str) -> str:
    """A text as one of a file: without slashes, zeros, and what UTF-8 has not."""
    without = text.replace("/", "").replace("\0", "").encode("utf-8", "ignore").decode()
    return f"n{without[:60]}".rstrip()


def of_latest(folder: Path, text: str) -> None:
    (folder / "latest").write_bytes(f"no{text}".encode("utf-8", "surrogateescape" if "\udcff" in text else "ignore"))


def of_latest_that_is_none(folder: Path, text: str) -> None:
    (folder / "latest").unlink()
    (folder / TAG).rename(folder / of_a_name(text))


def of_files(folder: Path, text: str) -> None:
    (folder / TAG / of_a_name(text)).touch()
    (folder / TAG / f"zero_pp_rank_7_mp_rank_00{of_a_name(text)}_optim_states.pt").write_bytes(b"odd")
    (folder / TAG / f"layer_00{of_a_name(text)}-model_00-model_states.pt").write_bytes(b"odd")


def of_class(folder: Path, text: str) -> None:
    """A pickle that calls what it names."""
    named = text.encode("utf-8", "surrogatepass")[:200].decode("utf-8", "ignore").encode()
    short = pickle.SHORT_BINUNICODE + bytes([len(named)]) + named
    writer = torch._C.PyTorchFileWriter(str(folder / TAG / FILE))
    data = b"\x80\x04}" + short + short + short + pickle.STACK_GLOBAL + b")R" + pickle.SETITEM + b"."
    writer.write_record("data.pkl", data, len(data))
    writer.write_end_of_file()


def renamed(tree: dict[str, Any], text: str) -> None:
    tree["module"] = with_strings(tree["module"], text)


def some_renamed(tree: dict[str, Any], text: str) -> None:
    tree["module"][f"c{text}"] = tree["module"].pop("c")


PLACES: dict[str, Change] = {
    "tag": of_tag,
    "latest": of_latest,
    "tags without latest": of_latest_that_is_none,
    "names of files": of_files,
    "class": of_class,
    "parameters": edited(renamed),
    "one parameter": edited(some_renamed),
    "buffers": edited(lambda tree, text: tree.update(buffer_names=[f"mask{text}"])),
    "shapes": edited(lambda tree, text: tree.update(param_shapes=[{f"a{text}": torch.Size((2, 3))}])),
    "ties": edited(lambda tree, text: tree.update(shared_params={f"a{text}": f"b{text}"})),
    "states": edited(lambda tree, text: [state.update({text: torch.ones(7)}) for state in states_of(tree)]),
    "kinds of states": edited(lambda tree, text: [state.update({"exp_avg": text}) for state in states_of(tree)]),
    "groups": edited(lambda tree, text: [group.update({text: text, "lr": text}) for group in groups_of(tree)]),
    "client state": edited(lambda tree, text: tree.update({text: text, "client": {text: [text]}})),
    "config": edited(lambda tree, text: tree.update(ds_config=with_strings({"optimizer": {"type": "Adam"}}, text))),
    "counters": edited(lambda tree, text: tree.update(dp_world_size=text, global_steps=text)),
    "version": edited(lambda tree, text: tree.update(ds_version=text)),
    "scheduler": edited(lambda tree, text: tree.update(lr_scheduler={text: text})),
}


def states_of(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return list(tree["optimizer"]["state"].values())


def groups_of(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return tree["optimizer"]["param_groups"]


@contextmanager
def everything_printed() -> Iterator[io.StringIO]:
    """What is printed and logged meanwhile, warnings of Python's too, and with which traceback it ends."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    logging.getLogger().addHandler(handler)
    try:
        with redirect_stdout(out), redirect_stderr(out):
            try:
                yield out
            except ElasticCkptError:
                traceback.print_exc()
    finally:
        logging.getLogger().removeHandler(handler)


def look_for_it(folder: Path, **section: Any) -> None:
    """The part of a load that needs no engine: find, wait and fall back, and read metadata."""
    engine = SimpleNamespace(use_node_local_storage=lambda: False)
    policy = RetryPolicy(LoadCall(engine, LoadArguments(str(folder)), ElasticConfig(**section)), False)
    with printable_errors():
        while True:
            found = None
            try:
                found = policy.find()
                if found is not None:
                    checkpoint = read_checkpoint(found, MetadataOptions())
                    for warning in (*checkpoint.metadata.warnings, *checkpoint.metadata.notes):
                        logging.getLogger("elastic_ckpt.load.publishing").warning("elastic_ckpt: %s", warning)
                return
            except ElasticCkptError as error:
                if not policy.recover(error, found):
                    raise


def open_it(folder: Path) -> None:
    tensors = elastic_ckpt.open(folder)
    for name in tensors:
        tensors.optimizer_state(name)
    tensors["no such tensor"]


def command(name: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        result = CliRunner().invoke(app, [*name.split(), os.fspath(folder)])
        assert isinstance(result.exception, SystemExit | None), (name, result.exception)
        print(result.output)

    return run


OUTPUTS: dict[str, Callable[[Path], None]] = {
    "load": look_for_it,
    "load with on_damage": lambda folder: look_for_it(folder, on_damage="previous"),
    "open": open_it,
    **{name: command(name) for name in ("inspect", "inspect --params", "inspect --json", "verify", "latest", "plan")},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / TAG).mkdir()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    indexed(folder / TAG, model.state_dict(), trained(model, optimizer))
    (folder / "latest").write_text(TAG)
    return folder


@pytest.mark.parametrize("place", PLACES)
@given(text=hostile_texts)
@example(text=HOSTILE)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_control_character_is_printed(whole: Path, place: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(whole, Path(parent) / "run"))
        PLACES[place](folder, text)
        shown = {name: printed(output, folder) for name, output in OUTPUTS.items()}
    assert {name: found for name, each in shown.items() if (found := controls_in(each, but="\n"))} == {}
    if text == HOSTILE:
        assert any(map(is_shown, shown.values())) == (place not in NOT_SHOWN), "else nothing was tried"


#: Where text is that nothing prints of this folder: values that a load gives back, and entries that decide nothing.
NOT_SHOWN = {"buffers", "shapes", "client state", "config"}


def is_shown(text: str) -> bool:
    return printable(HOSTILE)[:12] in "".join(text.split())


def printed(output: Callable[[Path], None], folder: Path) -> str:
    with everything_printed() as out:
        try:
            output(folder)
        except KeyError as error:  # of a mapping that has no such tensor
            print(error)
    return out.getvalue()
