"""Prints and writes the report of a load, on the rank that does so for all."""

from __future__ import annotations

import json
import os
import sys

from rich.console import Console

from elastic_ckpt import distributed
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.errors import ElasticCkptError, shortened
from elastic_ckpt.report import LoadReport

logger = logger_of(__name__)


def publish_refusal(error: ElasticCkptError, config: ElasticConfig) -> None:
    """Write the error of a load to the file of its report, with all names of its lists."""
    if isinstance(config.report, str) and distributed.rank() == 0:
        _write(json.dumps(error.document, indent=2, default=str), config.report)


def publish(report: LoadReport, warnings: tuple[str, ...], config: ElasticConfig) -> None:
    """Print the report and write it to its file; failing to do so does not fail the load."""
    for warning in warnings:
        logger.warning("elastic_ckpt: %s", warning)
    if names := report.initialized:
        text = "elastic_ckpt: %d frozen parameters were initialized by this run and not loaded, since the checkpoint "
        text += "lacks them; if their values differ from the saved run's, so does the model: %s"
        logger.warning(text, len(names), shortened(names))
    if report.restores_little and not config.report:
        logger.warning(report.heading)
    if config.report:
        try:
            report.print_to(Console(file=sys.stderr))
        except Exception:
            logger.warning("elastic_ckpt could not print its load report", exc_info=True)
    if isinstance(config.report, str):
        _write(report.as_json(), config.report)


def _write(text: str, path: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", opener=_open_at_once) as stream:  # asks the system: the report
            stream.write(text + "\n")
    except Exception as error:  # a full disk, or text that is none
        logger.warning("elastic_ckpt could not write its load report to %s: %s", path, error)


def _open_at_once(path: str, flags: int) -> int:
    """A descriptor for writing; an error of the system's for a pipe that nobody reads, which would be waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)  # asks the system: the report
    os.set_blocking(descriptor, True)
    return descriptor
