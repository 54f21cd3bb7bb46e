"""Tied pipeline modules with parameters that the stages do not synchronize: only the first stage trains its copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.tools.verification import verify
from tests.distributed.conftest import Launch
from tests.distributed.tied_jobs import Tied

#: Whether a load into other stages is refused: nothing says that copies which were trained, or may have been, are dead.
SETUPS = {
    Tied(): False,
    Tied(has_three=True): False,
    Tied("adam", declares=True): False,
    Tied("sgd", declares=True): False,
    Tied("adam"): True,
    Tied("sgd"): True,
    Tied(trains_copies=True): True,
}
UNSYNCHRONIZED = "tied_modules.embed.norm.bias, tied_modules.embed.norm.weight, tied_modules.embed.positions"


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    launch(3, "tied_jobs.save", {"folder": str(folder), "setups": list(SETUPS)})
    return folder


def test_at_the_saved_stages_each_gets_its_own_copy(launch: Launch, saved: Path) -> None:
    arguments = {"folder": str(saved), "setups": list(SETUPS), "pp": 3, "refused": [False] * len(SETUPS)}
    found = launch(3, "tied_jobs.load", arguments)[: len(SETUPS)]  # every rank knows what all found
    for setup, (differing, notes) in zip(SETUPS, found, strict=True):
        assert differing == [[], [], []], setup
        assert any("every pipeline stage keeps its own copy" in note and UNSYNCHRONIZED in note for note in notes)


@pytest.mark.parametrize(("ranks", "pp"), [(1, 1), (2, 2), (2, 1)])
def test_at_other_stages_the_first_copy_is_the_parameter_or_the_load_is_refused(
    launch: Launch, saved: Path, ranks: int, pp: int
) -> None:
    arguments = {"folder": str(saved), "setups": list(SETUPS), "pp": pp, "refused": list(SETUPS.values())}
    facts = launch(ranks, "tied_jobs.load", arguments)[: len(SETUPS)]
    for (setup, is_refused), found in zip(SETUPS.items(), facts, strict=True):
        if is_refused:
            (text,) = found.texts
            assert not found.changed and "copies of replicated parameters differ" in text, (setup, found)
            continue
        differing, notes = found
        assert differing == [[]] * pp, setup
        assert any("only the first pipeline stage trains" in note for note in notes), (setup, notes)


def test_verify_accuses_no_copy_of_a_module_whose_tied_weights_are_equal(saved: Path) -> None:
    for number, setup in enumerate(SETUPS):
        verified = verify(str(saved / str(number)), None, ElasticConfig(), full=True)
        assert not verified.findings, (setup, verified)
        noted = {note.message for note in verified.notes if note.kind == "drift"}
        assert bool(noted) == (setup.trains_copies or setup.optimizer != "adamw"), (setup, noted)
