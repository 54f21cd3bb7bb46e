"""Hands a load over to DeepSpeed's own loader, which runs whatever code the pickles of its files name.

So each file is screened: all that DeepSpeed may look for before anything is loaded, on all ranks together, and again
the very file that it opens, which may have been exchanged since.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, BinaryIO

import torch

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.engines.compat import intercepted_loads
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.datastates import is_datastates, read_datastates_tree
from elastic_ckpt.formats.pickled import named_errors
from elastic_ckpt.formats.torch_archive.screening import screen
from elastic_ckpt.storage.local import file_names, open_stream

#: What DeepSpeed's loader opens in the folder of a tag, with what its ``fast`` writer appends.
_OPENED = re.compile(r".*(?:model|optim)_states\.pt(?:-\d+\.\d+)?")


def screen_folder(found: CheckpointInfo, own_files: bool) -> None:
    """Screen the files of a folder; ``own_files``: whether each rank sees files of its own. Collective.

    Raises the same error on every rank, which names the file: :class:`UnsafePickleError` for code,
    :class:`DamagedError` or :class:`UnsupportedError` for what cannot be screened.
    """

    def screen_mine() -> None:
        names = sorted(filter(_OPENED.fullmatch, file_names(found.folder)))
        for name in names if own_files else names[distributed.rank() :: distributed.world_size()]:
            with _screened(found.path(name)):
                pass

    distributed.all_gather("screen the files for DeepSpeed's own loader", screen_mine)


def screened_loads(engine: Any, config: ElasticConfig) -> AbstractContextManager[None]:
    """Screens each file that DeepSpeed's loader opens meanwhile, unless the config trusts pickles or is off."""
    trusts = config.trust_pickle or config.mode == "off"
    return nullcontext() if trusts else intercepted_loads(engine, _screened)


@contextmanager
def _screened(path: str) -> Iterator[BinaryIO]:
    """The open file at a path, of which nothing that its loader unpickles runs code."""
    with open_stream(path) as stream:
        with named_errors(path):
            if is_datastates(stream):
                read_datastates_tree(stream, trust_pickle=False)
            else:
                screen(stream)
        stream.seek(0)
        # torch trusts indices, which are addresses
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            yield stream
