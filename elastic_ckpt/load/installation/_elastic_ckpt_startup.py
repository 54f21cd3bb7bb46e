"""Installs elastic_ckpt once DeepSpeed is imported; ``ELASTIC_CKPT=0`` in the environment turns it off.

Every Python process imports this file as it starts: through a ``.pth`` file after ``elastic-ckpt enable``, which copies
it, and through ``sitecustomize`` below ``elastic-ckpt exec``. So it imports nothing but what is loaded by then.
"""

import os
import sys

TYPE_CHECKING = False  # that of typing takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: Both, since elastic_ckpt imports other modules of DeepSpeed, whose own import must be over by then.
_awaited = {"deepspeed", "deepspeed.runtime.engine"}


class AwaitDeepSpeed:
    """Notices that DeepSpeed has been imported; stays on ``sys.meta_path``, over which other threads may iterate."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """What the other finders find of an awaited module, with a loader that installs elastic_ckpt in the end."""
        if name not in _awaited:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        execute = getattr(spec and spec.loader, "exec_module", None)
        attributes = getattr(spec and spec.loader, "__dict__", None)
        if execute is not None and isinstance(attributes, dict):

            def exec_module(module: "ModuleType") -> None:
                attributes.pop("exec_module", None)
                execute(module)
                _executed(module.__name__)

            attributes["exec_module"] = exec_module
        return spec


def _executed(name: str) -> None:
    if name in _awaited:
        _awaited.remove(name)
        if not _awaited:
            try:
                _install()
            except RuntimeError:  # required: the next import ends in the same way
                _awaited.add(name)
                raise


def _install() -> None:
    """Install elastic_ckpt, or say in one line why not: a run that asked for nothing goes on with DeepSpeed alone.

    The first rank of each node says so: where only some nodes can install it, these wait for the others in a load.
    """
    import importlib  # noqa: PLC0415
    import logging  # noqa: PLC0415

    try:
        importlib.import_module("elastic_ckpt").install()
    except Exception as error:
        problem = f"elastic_ckpt cannot be installed into DeepSpeed: {type(error).__name__}: {error}".partition("\n")[0]
        if os.environ.get("ELASTIC_CKPT") == "require":
            raise RuntimeError(f"{problem}, and ELASTIC_CKPT=require") from error
        if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
            logging.getLogger("elastic_ckpt").warning(
                "%s. This run continues with DeepSpeed's own loader; to turn this off: ELASTIC_CKPT=0 for one run, "
                "elastic-ckpt disable, or removing %s, for all",
                problem,
                os.path.splitext(__file__)[0] + ".pth",
            )


if os.environ.get("ELASTIC_CKPT") != "0":
    sys.meta_path.insert(0, AwaitDeepSpeed())
