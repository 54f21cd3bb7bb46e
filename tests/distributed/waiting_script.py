"""``launch/demo_train.py`` that waits in front of a step, where the environment says so, until it is asked to stop.

A test that ends a job in the middle then knows which step that was, on a machine of any speed.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from tests.distributed.launch import REPO, end_with_parent

#: The step in front of which to wait.
WAIT_AT = "ELASTIC_CKPT_TEST_WAIT_AT"
#: A folder: ``waiting`` appears in it when the wait begins, ``stop`` ends it.
WAIT_IN = "ELASTIC_CKPT_TEST_WAIT_IN"


def load_demo() -> Any:
    """The demo, as a module."""
    spec = importlib.util.spec_from_file_location("demo_train", REPO / "launch" / "demo_train.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo


def main() -> None:
    end_with_parent()
    demo = load_demo()
    train_step = demo.train_step

    def step_after_waiting(engine: Any, text: Any, step: int) -> float:
        if step == int(os.environ.get(WAIT_AT, "0")):
            folder = Path(os.environ[WAIT_IN])
            (folder / "waiting").touch()
            limit = time.monotonic() + 120
            while not (folder / "stop").exists():
                assert time.monotonic() < limit, "waiting for two minutes"
                time.sleep(0.05)
        return train_step(engine, text, step)

    demo.train_step = step_after_waiting
    demo.main()


if __name__ == "__main__":
    main()
