"""The files beside the weights from which Transformers and PEFT make the model and its tokenizer."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ckpt.core.metadata import is_floating
from elastic_ckpt.errors import ConfigError, listed, shortened
from elastic_ckpt.tools.export.shards import Exported

#: One of them is there: a model's, or a PEFT adapter's.
MODEL_CONFIG = "config.json"
_CONFIGS = (MODEL_CONFIG, "adapter_config.json")
#: Of generation, tokenizers and processors, as ``save_pretrained`` of Transformers writes them.
_OTHERS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_LARGEST_NBYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file to copy: its name and folder, its size in bytes, and the time of its last change in nanoseconds."""

    name: str
    folder: str
    nbytes: int
    mtime_ns: int

    def copy(self, path: Path) -> None:
        """Copy the file to a path; overwrites. Raises :class:`ConfigError` as :meth:`read` does."""
        path.write_bytes(self.read())

    def read(self) -> bytes:
        """The file's content. Raises :class:`ConfigError` if it is a link by now, or of another size."""
        source = Path(self.folder, self.name)
        try:
            with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
                data = stream.read(self.nbytes + 1)
        except OSError as error:
            raise _refused(source, "a regular file, as when the export began", str(error.strerror)) from error
        if len(data) != self.nbytes:
            raise _refused(source, f"{self.nbytes} bytes, as when the export began", f"{len(data)} or more")
        return data


def config_files(folder: str | os.PathLike[str]) -> tuple[ConfigFile, ...]:
    """The model's config, generation config and tokenizer files in a folder, by name; all other files are left out.

    Raises :class:`ConfigError` if there is no config, or one of these is no regular file, or too large.
    """
    root = Path(folder).absolute()
    try:
        there = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(root)}
    except OSError as error:
        raise _refused(root, "a folder with the model's config.json", str(error.strerror)) from error
    if not any(name in there for name in _CONFIGS):
        raise _refused(root, f"a folder with {' or '.join(_CONFIGS)}", shortened(sorted(there)) or "an empty folder")
    found = []
    for name in sorted({*_CONFIGS, *_OTHERS} & there.keys()):
        status = there[name]
        if not stat.S_ISREG(status.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
            raise _refused(root / name, "a regular file", what, "copy the folder with cp -rL, and give the copy")
        if status.st_size > _LARGEST_NBYTES:
            raise _refused(root / name, f"at most {_LARGEST_NBYTES} bytes", f"{status.st_size} bytes")
        found.append(ConfigFile(name, str(root), status.st_size, status.st_mtime_ns))
    return tuple(found)


def config_notes(files: Sequence[ConfigFile], weights: Iterable[Exported]) -> Iterator[str]:
    """Which files are copied, and whether ``from_pretrained`` would convert the weights to a dtype in ``config.json``.

    Raises :class:`ConfigError` if that is no JSON object.
    """
    if files:
        yield f"copied beside the weights: {', '.join(file.name for file in files)}"
    for file in files:
        if file.name == MODEL_CONFIG:
            path = Path(file.folder, file.name)
            try:
                config = json.loads(file.read())
                named = config.get("dtype") or config.get("torch_dtype")
            except (ValueError, AttributeError, RecursionError) as error:
                raise _refused(path, "a JSON object", str(error)) from error
            if not isinstance(named, str | None):
                raise _refused(path, "the name of a dtype", str(named)[:100])
            dtypes = {tensor.entry.dtype for tensor in weights if is_floating(tensor.entry.dtype)}
            if named is not None and dtypes != {named}:
                yield (
                    f"{MODEL_CONFIG} names {named}, and parameters are {listed(dtypes)}: "
                    "from_pretrained converts them, unless it is given a dtype"
                )


def _refused(path: Path, expected: str, found: str, remedy: str | None = None) -> ConfigError:
    return ConfigError(
        "the files to copy beside the weights cannot be taken",
        file=str(path),
        expected=expected,
        found=found,
        remedy=remedy,
    )
