"""The one family of errors that a user of elastic_ckpt meets.

Every error names what is known of: parameter, file, expected, found, remedy. The same error is raised
on every rank of the job (see :mod:`elastic_ckpt.distributed`), so all of them can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_NAMES_SHOWN = 8
_DETAILS = ("parameter", "file", "expected", "found", "remedy", "rank")


def listed(names: Iterable[str]) -> str:
    """Names for an error message: sorted, the first few, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else ""
    return (", ".join(ordered[:_NAMES_SHOWN]) or "none") + more


class ElasticCkptError(Exception):
    """A load that was refused or failed.

    Args:
        problem: one sentence that says what is wrong.
        parameter: name of the model parameter, buffer or state concerned.
        file: path of the file concerned.
        expected: what a correct checkpoint or engine would hold.
        found: what is there instead.
        remedy: what the user can do, config lines included.
        rank: global rank that met the problem first.
    """

    def __init__(
        self,
        problem: str,
        *,
        parameter: str | None = None,
        file: str | None = None,
        expected: Any = None,
        found: Any = None,
        remedy: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.problem = problem
        self.parameter = parameter
        self.file = file
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.remedy = remedy
        self.rank = rank
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [self.problem]
        lines += [f"  {name + ':':<11}{value}" for name, value in self.details.items() if value is not None]
        return "\n".join(lines)

    @property
    def details(self) -> dict[str, Any]:
        """Everything but the problem, as arguments of another error."""
        return {name: getattr(self, name) for name in _DETAILS}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.problem, self.details)


def _rebuild(cls: type[ElasticCkptError], problem: str, details: dict[str, Any]) -> ElasticCkptError:
    return cls(problem, **details)


class ConfigError(ElasticCkptError):
    """A key or value under ``"elastic_checkpoint"`` is not understood."""


class NotFoundError(ElasticCkptError):
    """The folder, the tag or the ``latest`` file is not there."""


class DamagedError(ElasticCkptError):
    """A file is missing, truncated, unreadable, or belongs to another save."""


class LayoutError(DamagedError):
    """Files do not fit the layout that they state: one is damaged or missing, or the layout is one not known here."""


class UnsafePickleError(ElasticCkptError):
    """A file wants to run code that is not on the list of safe globals."""


class MismatchError(ElasticCkptError):
    """Checkpoint and live engine disagree: names, shapes, dtypes, groups, states."""


class UnsupportedError(ElasticCkptError):
    """Something that this version cannot restore exactly, and therefore refuses by name."""


class UnzippedError(UnsupportedError):
    """A file in the format that ``torch.save`` wrote before zip archives: whole, but not to be read piece by piece."""


class UnforeseenError(ElasticCkptError):
    """An exception that nobody foresaw, on one rank or on all."""


class PartialLoadError(ElasticCkptError):
    """Reading failed after every rank had agreed to load: the engine is partly overwritten."""
