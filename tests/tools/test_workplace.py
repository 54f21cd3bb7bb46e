"""Output folders of conversions and exports: atomic and resumable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.tools.workplace import CONVERSION, Workplace, fingerprint


def test_a_folder_gets_its_name_when_all_is_there(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Workplace(CONVERSION, target, (), ("abc",), restart=False) as place:
        place.write("zero/w/fp32.pt", lambda path: path.write_bytes(b"x" * 7))
        assert place.has("zero/w/fp32.pt") and not place.has("zero/w/step.pt")
        assert not target.exists()
        with pytest.raises(ElasticCkptError, match="under way"):
            Workplace(CONVERSION, target, (), ("abc",), restart=False)
    with Workplace(CONVERSION, target, (), ("abc",), restart=False) as place:  # goes on
        assert place.has("zero/w/fp32.pt")
        place.finish("latest_universal")
    assert [path.name for path in target.rglob("*")] == ["zero", "w", "fp32.pt"]
    assert (tmp_path / "latest_universal").read_text() == "out"
    with pytest.raises(ElasticCkptError, match="there already"):
        Workplace(CONVERSION, target, (), ("abc",), restart=False)


def test_an_attempt_that_ended_in_its_last_moments_goes_on(tmp_path: Path) -> None:
    target = tmp_path / "out"
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "conversion.json.part").write_text("{")  # ended before its first file had a name
    with Workplace(CONVERSION, target, (), ("abc",), restart=False) as place:
        place.write("zero/w/fp32.pt", lambda path: path.write_bytes(b"x"))
        manifest = (tmp_path / ".out.partial" / "conversion.json").read_text()
        place.finish("latest_universal")
    (target / "conversion.json").write_text(manifest)  # as if it had ended before the latest file was written
    (tmp_path / "latest_universal").unlink()
    with pytest.raises(ElasticCkptError, match="there already"):
        Workplace(CONVERSION, target, (), ("xyz",), restart=False)
    with Workplace(CONVERSION, target, (), ("abc",), restart=False) as place:
        assert place.has("zero/w/fp32.pt")
        place.finish("latest_universal")
    assert (tmp_path / "latest_universal").read_text() == "out"
    assert [path.name for path in target.rglob("*")] == ["zero", "w", "fp32.pt"]
    assert not (tmp_path / ".out.partial").exists()


def test_another_source_does_not_go_on_from_what_lies_there(tmp_path: Path) -> None:
    with Workplace(CONVERSION, tmp_path / "out", (), ("abc",), restart=False) as place:
        place.write("zero/w/fp32.pt", lambda path: path.write_bytes(b"x"))
    with pytest.raises(ElasticCkptError, match="something else") as error:
        Workplace(CONVERSION, tmp_path / "out", (), ("xyz",), restart=False)
    assert "--restart" in str(error.value)
    with Workplace(CONVERSION, tmp_path / "out", (), ("xyz",), restart=True) as place:
        assert not place.has("zero/w/fp32.pt")


def test_a_file_that_fails_has_no_name(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with Workplace(CONVERSION, tmp_path / "out", (), ("abc",), restart=False) as place:
        with pytest.raises(OSError, match="disk full"):
            place.write("zero/w/fp32.pt", fails)
        assert not place.has("zero/w/fp32.pt")


def test_a_changed_source_changes_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    path.write_bytes(b"12")
    before = fingerprint([SourceFile(str(path), 2)], [1])
    assert before == fingerprint([SourceFile(str(path), 2)], [1]) != fingerprint([SourceFile(str(path), 2)], [2])
    path.write_bytes(b"34")

    os.utime(path, ns=(1, 1))
    assert before != fingerprint([SourceFile(str(path), 2)], [1])
