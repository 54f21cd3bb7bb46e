"""``python -m elastic_ckpt``: the command line."""

from elastic_ckpt.cli import app

app()
