"""Errors print what is known, and survive the way from one rank to the others."""

from __future__ import annotations

import copy
import errno
import json
import pickle
import re
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from elastic_ckpt import errors
from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan
from elastic_ckpt.core.text import NamesText, printable, whole_text
from elastic_ckpt.errors import WITHOUT_STATES, DamagedError, ElasticCkptError, MismatchError, Remedy, UnforeseenError
from elastic_ckpt.formats.detect import read_latest
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.io.reader import check_files
from elastic_ckpt.load.publishing import publish_refusal
from tests.hostile_text import READABLE, controls_in, hostile_texts

DETAILS: dict[str, Any] = {
    "parameter": "layers.0.weight",
    "file": "/ckpt/step4/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "expected": "(2, 5) in the live model",
    "found": "(5, 2) in the checkpoint",
    "remedy": "build the model as it was",
    "rank": 3,
}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ElasticCkptError)]


def test_there_are_the_kinds_that_the_documentation_names() -> None:
    assert {kind.__name__ for kind in KINDS} == {
        "ElasticCkptError",
        "ConfigError",
        "NotFoundError",
        "DamagedError",
        "ConflictingCopiesError",
        "LayoutError",
        "MissingFilesError",
        "MixedSavesError",
        "SavedOverError",
        "UnknownLayoutError",
        "UnsafePickleError",
        "MismatchError",
        "UnsupportedError",
        "UnforeseenError",
        "CommunicationError",
        "PartialLoadError",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_prints_its_problem_first_and_then_every_detail(kind: type[ElasticCkptError]) -> None:
    lines = str(kind("shape differs", **DETAILS)).splitlines()
    assert lines[0] == "shape differs"
    assert lines.pop() == f"  see:       elastic-ckpt docs troubleshooting#{kind.__name__.lower()}"
    assert [line.split(":", 1)[0].strip() for line in lines[1:]] == list(DETAILS)
    assert [line.split(":", 1)[1].strip() for line in lines[1:]] == [str(value) for value in DETAILS.values()]
    assert len({len(line) - len(line.split(":", 1)[1].lstrip()) for line in lines[1:]}) == 1, "values are aligned"


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_line_of_an_error_is_a_command_that_opens_the_section_of_its_class(
    kind: type[ElasticCkptError],
) -> None:
    command = str(kind("shape differs", **DETAILS)).splitlines()[-1].removeprefix("  see:").strip()
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True).stdout
    assert words.split() == command.split(), "a shell leaves it as it is"
    program, *arguments = words.split()
    shown = CliRunner().invoke(app, arguments)
    assert program == "elastic-ckpt" and shown.exit_code == 0
    assert shown.stdout.strip().startswith(f"{kind.__name__} ") and len(shown.stdout.splitlines()) > 2


@pytest.mark.parametrize(
    ("remedy", "text"),
    [
        (Remedy("wait"), "wait"),
        (Remedy("leaves it out", config={"states": {"ä": "fresh"}}), '"elastic_checkpoint": {"states": {"ä": "fresh"}} leaves it out'),
        (Remedy(arguments={"tag": "step4", "load_module_strict": False}), "load_checkpoint(..., tag='step4', load_module_strict=False)"),
        (Remedy(command=("elastic-ckpt", "verify", "a folder", "--full")), "elastic-ckpt verify 'a folder' --full"),
        (
            Remedy(when="if it was meant", config={"verify": "bytes"}, arguments={"tag": "a"}),
            "if it was meant: \"elastic_checkpoint\": {\"verify\": \"bytes\"} and load_checkpoint(..., tag='a')",
        ),
    ],
)  # fmt: skip
def test_a_remedy_is_printed_from_its_data(remedy: Remedy, text: str) -> None:
    assert str(remedy) == text
    error = MismatchError("differs", remedy=(remedy, WITHOUT_STATES))
    assert error.remedy == f"{text}; or {WITHOUT_STATES}" and error.remedy in str(error)
    error.remarks += ("files on all nodes: 3",)
    again = type(error)(error.problem, **pickle.loads(pickle.dumps(error)).details)
    assert again.remedies[:2] == error.remedies == (remedy, WITHOUT_STATES)
    assert error.remedy.endswith("; files on all nodes: 3") and "files on all nodes: 3" in str(again)


def test_a_remedy_that_is_a_sentence_may_be_given_as_one() -> None:
    error = MismatchError("differs", remedy="build the model as it was")
    assert error.remedies == (Remedy("build the model as it was"),) and not error.remedies[0].is_data
    error.remedy = None
    assert error.remedies == () and error.remedy is None


def test_of_many_names_the_first_few_are_printed_and_all_are_kept() -> None:
    names = [f"layers.{number:02d}.weight" for number in reversed(range(20))]
    error = pickle.loads(pickle.dumps(MismatchError("differs", parameter=names)))
    assert error.parameters == tuple(sorted(names))
    assert error.parameter == ", ".join(sorted(names)[:8]) + " and 12 more"
    again = DamagedError("differs", **error.details)
    assert (again.parameters, again.parameter) == (error.parameters, error.parameter)
    again.parameter = "another"
    assert MismatchError("one", **MismatchError("one", parameter="a").details).parameters == ()


def test_what_is_not_known_is_not_printed() -> None:
    assert str(MismatchError("gone")).splitlines()[:-1] == ["gone"]
    assert str(MismatchError("gone", file="/x")).splitlines()[:-1] == ["gone", "  file:      /x"]


def test_rank_zero_and_empty_findings_are_known() -> None:
    text = str(DamagedError("gone", found="", rank=0, expected=0))
    assert "rank:" in text
    assert "found:" in text
    assert "expected:" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("details", [DETAILS, {}, {"rank": 0}, {"file": "/x", "found": [1, 2]}])
def test_an_error_survives_pickling(kind: type[ElasticCkptError], details: dict[str, Any]) -> None:
    error = kind("shape differs", **details)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is kind
        assert vars(back) == vars(error)
        assert str(back) == str(error)
        assert back.args == error.args


def test_an_error_survives_copying() -> None:
    error = MismatchError("shape differs", **DETAILS)
    back = copy.deepcopy(error)
    assert (type(back), vars(back)) == (MismatchError, vars(error))


def test_values_of_any_kind_become_text_so_that_they_can_travel() -> None:
    error = MismatchError("x", expected=lambda: 0, found={"lr": 1})  # a lambda cannot be pickled
    back = pickle.loads(pickle.dumps(error))
    assert back.found == "{'lr': 1}"
    assert "lambda" in back.expected


def test_an_error_can_be_caught_as_one_family_and_as_an_exception() -> None:
    assert issubclass(ElasticCkptError, Exception)
    for kind in KINDS:
        with pytest.raises(ElasticCkptError):
            raise kind("x")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_without_descriptors_or_memory_accuses_no_file(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ``"on_damage": "previous"`` would go back to an older checkpoint for it."""
    torch.save({"a": 1}, tmp_path / "file.pt")
    (tmp_path / "latest").write_text("step4")

    def used_up(*_: Any, **__: Any) -> Any:
        raise OSError(number, "used up")

    monkeypatch.setattr("os.open", used_up)
    plan = ReadPlan((SourceFile(str(tmp_path / "file.pt"), 1),), (), (ReadItem(0, 0, 0, 0, 1, "float32"),))
    for read in (
        lambda: open_pickled(str(tmp_path / "file.pt")),
        lambda: read_latest(str(tmp_path), "latest"),
        lambda: check_files(plan),
    ):
        with pytest.raises(UnforeseenError, match="not damaged"):
            read()


# --- text of a checkpoint ---------------------------------------------------------------------------------------


def traceback_of(raising: Callable[[], Any]) -> str:
    """What Python prints of what a public function raises."""
    try:
        errors.printable_errors()(raising)()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


@given(hostile_texts, st.sampled_from(KINDS), st.sampled_from(["problem", *DETAILS]))
def test_an_error_prints_text_of_a_checkpoint_escaped_and_keeps_it_as_it_is(
    text: str, kind: type[ElasticCkptError], place: str
) -> None:
    fields = {"problem": "p", **DETAILS, place: text}
    error = pickle.loads(pickle.dumps(kind(**fields)))
    assert controls_in(str(error), but="\n") == [] and str(error).count("\n") == len(DETAILS) + 1
    assert printable(text) in str(error)
    assert getattr(error, place) == text, "as JSON has it"


@pytest.mark.parametrize("text", READABLE)
def test_an_error_leaves_names_of_any_language_readable(text: str) -> None:
    assert str(ElasticCkptError(text, parameter=text)).count(text) == 2


class SaysItself(Exception):
    """Makes its text in a way of its own, as pydantic's errors do."""

    def __str__(self) -> str:
        return f"says {self.args[0]}"


class CannotSay(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


CAUSES: list[Callable[[str], Exception]] = [
    ValueError,
    RuntimeError,
    KeyError,
    SaysItself,
    CannotSay,
    lambda text: OSError(5, text, text),
    lambda text: ValueError(text, 1),
    lambda text: RuntimeError(Path(text.replace("\0", ""))),
    lambda text: DamagedError(text, text),
]


@given(hostile_texts, st.lists(st.sampled_from(CAUSES), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_a_traceback_has_no_control_characters_down_to_the_first_cause(
    text: str, causes: list[Callable[[str], Exception]], linked: bool, ours: bool
) -> None:
    def raising(number: int = 0) -> None:
        if number == len(causes):
            raise DamagedError(text, text) if ours else RuntimeError(text)
        try:
            raise causes[number](text)
        except Exception as error:
            if linked:
                raise (DamagedError(text) if ours else KeyError(text)) from error
            raising(number + 1)

    shown = traceback_of(raising)
    assert controls_in(shown, but="\n") == []
    assert "another exception" in shown or "direct cause" in shown


def test_causes_stay_as_they_are_where_they_have_none() -> None:
    cause = SaysItself("two\nlines")
    cause.__context__ = context = KeyError("k")
    error = DamagedError("p")
    error.__cause__ = cause
    assert errors.with_printable_causes(error) is error
    assert error.__cause__ is cause and cause.__context__ is context and not cause.__suppress_context__
    error.__cause__ = SaysItself("\x1b")
    assert str(errors.with_printable_causes(error).__cause__) == r"SaysItself: says \x1b"
    full = OSError(errno.EIO, "full\x1b", "/x\x1b")
    assert errors.with_printable_causes(full) is full and controls_in(str(full)) == [] and full.filename == "/x\x1b"
    circle = ValueError("a\tb\x1b")
    circle.__context__ = DamagedError("q")
    circle.__context__.__context__ = circle
    assert str(errors.with_printable_causes(circle)) == r"a   b\x1b", "as indented as before"


NAMES = [f"layers.{number}.weight" for number in range(20)]


def test_lists_of_names_are_whole_in_a_file_and_cut_with_a_count_on_the_screen(tmp_path: Path) -> None:
    expected = "in the model: " + errors.listed(NAMES) + "; and more"
    raised = MismatchError("p", "/x", expected, errors.shortened(NAMES), parameter=set(NAMES), remedy=WITHOUT_STATES)
    for error in (raised, pickle.loads(pickle.dumps(raised)), copy.deepcopy(raised)):
        assert "and 12 more" in str(error.expected) and "and 12 more" in str(error.found)
        assert "layers.19.weight" not in str(error.found) and str(error).count("and 12 more") == 3
        again = MismatchError(error.problem, **error.details)
        for each in (error, again):
            publish_refusal(each, ElasticConfig(report=str(tmp_path / "load.json")))
            written = json.loads((tmp_path / "load.json").read_text())
            assert written["error"] == "MismatchError" and written["file"] == "/x"
            assert written["expected"] == f"in the model: {', '.join(sorted(NAMES))}; and more"
            assert written["found"] == ", ".join(NAMES) and written["parameters"] == sorted(NAMES)
            assert written["remedies"][0]["arguments"] == {"load_optimizer_states": False}


@given(st.lists(st.text() | st.lists(st.text(), max_size=12)))
def test_text_with_lists_is_text(parts: list[Any]) -> None:
    shown, whole, text = "", "", ""
    for part in parts:
        piece = part if isinstance(part, str) else errors.shortened(part, 3)
        shown, whole = shown + str(piece), whole + whole_text(piece)
        text = text + piece
    assert text == shown and whole_text(text) == whole
    assert isinstance(text, NamesText) == any(isinstance(part, list) for part in parts)


def test_no_sentence_of_an_error_cuts_its_lists_for_the_file() -> None:
    """An f-string has the first few names alone: sentences are put together with ``+``."""
    pattern = re.compile(r'(expected|found|have)\w* = f".*\{(listed|shortened)\(')
    package = Path(errors.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if pattern.search(path.read_text())] == []
