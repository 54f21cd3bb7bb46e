"""Remedies of errors as ways out of a load of pretrained weights, which have no tag, no topology and no optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ckpt.errors import ANOTHER_TAG, AT_ITS_DTYPE, DamagedError, ElasticCkptError, Remedy

_FUNCTIONS = ("load_pretrained", "from_pretrained")
#: For files that are damaged, and for all that does not fit the model, where nothing else is known.
_COPY_AGAIN = Remedy("copy the folder again from its original")
_BEFORE_THE_ENGINE = Remedy("load the weights with from_pretrained, before deepspeed.initialize")
_OTHER_WEIGHTS = (
    Remedy("give a folder that save_pretrained wrote of this model"),
    Remedy("load them with from_pretrained, and give a folder to which save_pretrained writes them again"),
)


def with_ways_for_weights(error: ElasticCkptError) -> ElasticCkptError:
    """The same error, without remedies that only a load of a checkpoint can follow, and with one at least."""
    remedies = tuple(_followed(error))
    others = (_BEFORE_THE_ENGINE,) if error.file is None else _OTHER_WEIGHTS
    others = (_COPY_AGAIN,) if isinstance(error, DamagedError) else others
    error.remedies = remedies or others
    return error


def _followed(error: ElasticCkptError) -> Iterator[Remedy]:
    """The remedies that a call of ``load_pretrained`` or of ``from_pretrained`` can follow."""
    for remedy in error.remedies:
        is_of_checkpoints = bool(remedy.arguments) and remedy.function not in _FUNCTIONS
        if not (is_of_checkpoints or remedy.at_saved_topology or remedy in (ANOTHER_TAG, AT_ITS_DTYPE)):
            yield remedy
