"""What a conversion or an export writes: a folder under a temporary name, until all of it is on the disk."""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.errors import ConfigError, ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL
from elastic_ckpt.storage.local import see, steady

#: One of them is beside the weights: a model's, or a PEFT adapter's.
_CONFIGS = {"config.json", "adapter_config.json"}
#: Of generation, tokenizers and processors, as ``save_pretrained`` of Transformers writes them.
_OTHERS = re.compile(
    r"(added_tokens|chat_template|generation_config|(pre)?processor_config|special_tokens_map|tokenizer(_config)?|vocab)"
    r"\.json|chat_template\.jinja|(merges|vocab)\.txt|(sentencepiece\.bpe|spiece|tokenizer)\.model"
)
_LARGEST_NBYTES = 128 << 20


@dataclass(frozen=True)
class WriteReport:
    """The outcome: folder, tensors, files and bytes that were written, and notes."""

    folder: str
    tensors: int
    files: int
    nbytes: int
    seconds: float
    notes: tuple[str, ...]


@contextmanager
def output_folder(target: Path, source: Path, files: Sequence[SourceFile], latest: str | None = None) -> Iterator[Path]:
    """A new folder to write to, which is renamed to ``target`` at the end, and removed after an error.

    Args:
        target: the final name.
        source, files: the checkpoint's folder, and its files, which must not change meanwhile.
        latest: the name of a file beside ``target`` that shall name it.

    Raises :class:`ElasticCkptError` if ``target`` exists or is inside the checkpoint, a file of the checkpoint has
    changed, or the system refuses something.
    """
    inside = source.resolve() in target.resolve().parents
    if inside or os.path.lexists(target) or target.name in ("", "..", LATEST, LATEST_UNIVERSAL):
        raise ElasticCkptError(
            "a checkpoint cannot be written there",
            file=str(target),
            expected="a folder with a name of its own that does not exist, outside of the checkpoint's",
            found=f"a folder inside {source}" if inside else "it exists" if target.exists() else repr(target.name),
            remedy="choose another name, or remove it",
        )
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        folder.mkdir(parents=True)
        with steady():
            for file in files:
                see(file.path, os.stat(file.path))
            yield folder
            if latest is not None:
                (folder / latest).write_text(target.name, encoding="utf-8")
            _sync(folder)
        os.rename(folder, target)
        if latest is not None:
            try:
                os.replace(target / latest, target.with_name(latest))
            except OSError:
                os.rename(target, folder)
                raise
        _sync(target.parent, deep=False)
    except (OSError, RuntimeError) as raised:
        error = _os_error_in(raised)
        if error is None:
            raise
        raise ElasticCkptError(
            "the folder could not be written, or the checkpoint not be read",
            file=str(error.filename or target),
            expected="a checkpoint that stays, and a folder to write to",
            found=f"{type(error).__name__}: {error.strerror or error}",
            remedy="check the path, its file system and its permissions, and give the same command again",
        ) from raised
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _os_error_in(error: BaseException | None) -> OSError | None:
    """The error of the system that an exception is, or was raised for, or while it was handled."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _sync(path: Path, deep: bool = True) -> None:
    for each in [path, *(path.rglob("*") if deep else ())]:
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def copy_configs(source: Path, target: Path) -> list[str]:
    """Copy the model's config, generation config and tokenizer files, and no others; returns their names.

    Raises :class:`ConfigError` if there is no config, or one of these is no regular file, or too large.
    """
    try:
        names = sorted(name for name in os.listdir(source) if name in _CONFIGS or _OTHERS.fullmatch(name))
    except OSError as error:
        raise _refused(source, "a folder", error) from error
    if not _CONFIGS.intersection(names):
        raise _refused(source, f"{' or '.join(sorted(_CONFIGS))} in this folder", None)
    for name in names:
        expected = f"a regular file, no symbolic link, of at most {_LARGEST_NBYTES} bytes"
        try:
            with open(os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
                is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
                data = stream.read(_LARGEST_NBYTES + 1) if is_file else b""
        except OSError as error:
            raise _refused(source / name, expected, error) from error
        if not is_file or len(data) > _LARGEST_NBYTES:
            raise _refused(source / name, expected, None)
        (target / name).write_bytes(data)
    return names


def _refused(path: Path, expected: str, error: OSError | None) -> ConfigError:
    problem, found = "the files to copy beside the weights cannot be taken", None if error is None else error.strerror
    return ConfigError(problem, str(path), expected, found)
