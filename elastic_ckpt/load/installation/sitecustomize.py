"""What Python imports as it starts where this folder is in ``PYTHONPATH``; then the ``sitecustomize`` that it hides."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import _elastic_ckpt_flag
import _elastic_ckpt_startup  # noqa: F401

if os.environ.get(_elastic_ckpt_flag.VARIABLE) != "0":
    _elastic_ckpt_flag.take_flag(sys.orig_argv[1:])

_later = sys.path[sys.path.index(os.path.dirname(__file__)) + 1 :]
_hidden = PathFinder.find_spec("sitecustomize", _later)
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(_hidden)
    _hidden.loader.exec_module(sys.modules["sitecustomize"])
