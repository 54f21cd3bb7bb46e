"""``torch.save`` files of the time before zip archives, as ``"checkpoint_serialization": false`` writes them.

Where a tensor's bytes lie in such a file is known only once all of it has been read, so none is read piece by piece.
"""

from __future__ import annotations

from elastic_ckpt.errors import UnzippedError

#: ``torch.serialization.MAGIC_NUMBER`` as its own pickle, which such a file begins with.
_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def is_unzipped(path: str) -> bool:
    """Whether a file is a legacy pickle archive."""
    with open(path, "rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def refuse_unzipped(path: str) -> None:
    """Raise where a file is a legacy pickle archive.

    Raises:
        UnzippedError: saying what it is, and how files become ones that can be read.
    """
    if is_unzipped(path):
        raise UnzippedError(
            "this file is a legacy (non-zip) pickle archive of torch.save, whose reading is not supported yet",
            file=path,
            expected="a zip archive, which torch.save writes since torch 1.6",
            found='a legacy pickle archive, as "checkpoint": {"checkpoint_serialization": false} makes DeepSpeed write',
            remedy='load it at the topology and ZeRO stage it was saved with, then save it with "checkpoint": '
            '{"checkpoint_serialization": true}, which is the default',
        )
