"""Jobs that load what has odd text: all that a rank prints and logs of it, and tracebacks."""

from __future__ import annotations

import io
import logging
import traceback
from contextlib import redirect_stderr
from typing import Any

import elastic_ckpt
from tests.distributed.model import build_engine, close


def load(arguments: dict[str, Any]) -> list[tuple[str, bool]]:
    """Of each folder: what this rank printed while it was loaded, and whether elastic_ckpt has loaded it."""
    elastic_ckpt.install()
    config = ("elastic_checkpoint", {"on_damage": "previous"})
    setup = arguments["setup"]
    engine = build_engine(type(setup)(setup.stage, config=(config,)))
    found = []
    for folder in arguments["folders"]:
        out = io.StringIO()
        handler = logging.StreamHandler(out)
        logging.getLogger().addHandler(handler)
        try:
            with redirect_stderr(out):
                engine.load_checkpoint(folder)
            out.write(f"{engine.elastic_report}\n{engine.elastic_report!r}\n")
        except elastic_ckpt.ElasticCkptError:
            traceback.print_exc(file=out)
        finally:
            logging.getLogger().removeHandler(handler)
        found.append((out.getvalue(), engine.elastic_report is not None))
    close(engine)
    return found
