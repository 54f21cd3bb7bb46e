"""The metadata of a ``torch.save`` file, without its tensor data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.errors import DamagedError, ElasticCkptError, LayoutError
from elastic_ckpt.formats.datastates import is_datastates, read_datastates_tree
from elastic_ckpt.formats.torch_archive.archive import Trees, read_archive_tree
from elastic_ckpt.formats.torch_archive.directory import ArchiveError


@dataclass(frozen=True)
class PickledFile:
    """A file's object tree, with each tensor replaced by a :class:`TensorRef`.

    ``root`` is the name that the file was saved under, without its suffix; ``None`` or ``"archive"``: not recorded.
    ``records`` are those of its tensors, if it has checksums; ``surplus_nbytes`` are bytes that no record needs.
    """

    path: str
    nbytes: int
    tree: Any
    root: str | None = None
    records: Records = field(default_factory=Records)
    surplus_nbytes: int = 0

    def section(self, *keys: str) -> Any:
        """The entry at a path of dictionary keys; a :class:`DamagedError` if there is none."""
        node = self.tree
        for depth, key in enumerate(keys):
            if not isinstance(node, Mapping) or key not in node:
                raise LayoutError(
                    "this file lacks an entry that DeepSpeed always writes",
                    file=self.path,
                    expected=" / ".join(keys[: depth + 1]),
                    found=sorted(map(str, node))[:12] if isinstance(node, Mapping) else type(node).__name__,
                    remedy="the file is not of this checkpoint, or of a DeepSpeed version that is not supported",
                )
            node = node[key]
        return node


def open_pickled(path: str, trust_pickle: bool = False, known: Trees | None = None) -> PickledFile:
    """Read the metadata of one file: a zip archive or a legacy one of ``torch.save``, or one of DataStates-LLM.

    With ``trust_pickle`` the file may run code; only at the user's explicit wish. Trees in ``known`` are not read again
    but shared, and those that are read are added.

    Raises:
        DamagedError: missing, truncated, not a ``torch.save`` file, or shorter than its tensors claim.
        UnsafePickleError: a class or function is not on the list of safe globals.
        UnsupportedError: a tensor or object that cannot be read piece by piece.
    """
    if not os.path.isfile(path):
        raise DamagedError(
            "a file of the checkpoint is missing",
            file=path,
            expected="a file, visible on every rank",
            found="no such file",
            remedy="restore the file, take another tag, or put the folder on storage that all nodes share",
        )
    try:
        with open(path, "rb") as stream:
            if is_datastates(stream):
                archive = read_datastates_tree(stream, trust_pickle)
            else:
                archive = read_archive_tree(stream, trust_pickle, known)
    except ElasticCkptError as error:
        raise type(error)(error.problem, **{**error.details, "file": path}) from error
    except ArchiveError as error:
        raise unreadable(path, str(error)) from error
    except Exception as error:  # noise in a pickle can raise anything at all
        raise unreadable(path, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]) from error
    return PickledFile(path, archive.nbytes, archive.tree, archive.root, archive.records, archive.surplus_nbytes)


def unreadable(path: str, found: str) -> DamagedError:
    """A file that is no complete archive."""
    return DamagedError(
        "a file of the checkpoint is truncated or unreadable",
        file=path,
        expected="a complete torch.save archive",
        found=found,
        remedy="copy the file again from its original, or take another tag",
    )
