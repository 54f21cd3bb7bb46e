"""The package's loggers, whose records are printable whatever a checkpoint's text is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core.text import printable, printable_lines
from elastic_ckpt.errors import ElasticCkptError, with_printable_causes


class PrintableRecords(logging.Filter):
    """Escapes control characters in what records were given to print; the package's own words have none."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Make a record printable, for all handlers; none is left out."""
        record.msg = printable_lines(str(record.msg))
        if isinstance(record.args, Mapping):
            record.args = {name: _argument(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(map(_argument, record.args))
        if record.exc_info and (error := record.exc_info[1]) is not None:
            shown = with_printable_causes(error)
            record.exc_info = (type(shown), shown, shown.__traceback__)
        return True


def _argument(value: Any) -> Any:
    """An argument of a record; an error of this package is printable, and has lines of its own."""
    return value if isinstance(value, (int, float, ElasticCkptError)) else printable(str(value))


_PRINTABLE = PrintableRecords()


def logger_of(module: str) -> logging.Logger:
    """The logger of a module of this package."""
    logger = logging.getLogger(module)
    logger.addFilter(_PRINTABLE)  # once: a logger has no filter twice
    return logger
