"""Output folders of conversions and exports: whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import ConfigError, ElasticCkptError, SavedOverError
from elastic_ckpt.tools.output_folder import output_folder


def test_a_folder_gets_its_name_when_all_is_there(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with output_folder(target, tmp_path / "source", (), "latest_universal") as place:
        (place / "zero").mkdir()
        (place / "zero" / "w.pt").write_bytes(b"x" * 7)
        assert not target.exists() and not (target.parent / "latest_universal").exists()
    assert [path.name for path in target.rglob("*")] == ["zero", "w.pt"]
    assert (target.parent / "latest_universal").read_text() == "out"
    with pytest.raises(ConfigError, match="cannot be written there"), output_folder(target, tmp_path / "s", ()):
        pytest.fail("it exists")
    assert sorted(path.name for path in target.parent.iterdir()) == ["latest_universal", "out"]


def test_a_url_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = Path("s3://bucket/out").absolute()
    with pytest.raises(ConfigError, match="object store"), output_folder(target, tmp_path / "source", ()):
        pytest.fail("a folder s3: was made")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("a bug")])
def test_after_an_error_nothing_is_left(error: BaseException, tmp_path: Path) -> None:
    with (
        pytest.raises(ElasticCkptError if isinstance(error, OSError) else type(error)),
        output_folder(tmp_path / "out", tmp_path / "source", (), "latest") as place,
    ):
        (place / "w.pt").write_bytes(b"half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path = source / "shard.pt"
    path.write_bytes(b"12")
    files = [SourceFile(str(path), 2)]
    for change in (lambda: os.utime(path, ns=(1, 1)), path.unlink):
        with pytest.raises(SavedOverError), output_folder(tmp_path / "out", source, files):
            change()
        assert list(tmp_path.iterdir()) == [source]
    with pytest.raises(ConfigError, match="cannot be written there"), output_folder(source / "out", source, ()):
        pytest.fail("inside")


def test_where_nothing_can_name_it_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "latest_universal").mkdir()
    with (
        pytest.raises(ElasticCkptError, match="could not be written") as error,
        output_folder(tmp_path / "out", tmp_path / "source", (), "latest_universal"),
    ):
        pass
    assert "latest_universal" in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["latest_universal"]
