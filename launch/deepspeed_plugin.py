"""A pytest plugin that runs DeepSpeed's own tests on the CPU, with elastic_ckpt installed if ``ELASTIC`` is ``1``.

``bash launch/deepspeed_tests.sh FOLDER`` runs pytest with ``-p launch.deepspeed_plugin`` and ``FOLDER/tests``
on the path. The file ``OUTCOMES`` gets a JSON line for each test, so a run that is ended early has a table too.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
from collections.abc import Generator
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from unit.common import DistributedExec  # type: ignore[import-not-found]  # of DeepSpeed's tests

import elastic_ckpt


def close_pool(test: Any, pool: Any, num_procs: int, force: bool = False) -> None:
    """End a test's processes without the barrier of DeepSpeed's own, at which those of a failed test wait for ever."""
    if force or not test.reuse_dist_env:
        pool.terminate()
        pool.join()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """A test that hangs fails; DeepSpeed's harness would end the whole run."""
    try:
        return (yield)
    except pytest.exit.Exception as ended:
        raise pytest.fail.Exception(str(ended)) from ended


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test's call, or of its setup if that failed or skipped it."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        with open(os.environ["OUTCOMES"], "a", encoding="utf-8") as stream:
            stream.write(json.dumps([report.nodeid, report.outcome]) + "\n")


# the processes of a test are forked from one that has imported this module
multiprocessing.set_forkserver_preload([__name__])
DistributedExec._close_pool = close_pool
get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not believe it of a CPU
# the shared-memory all-reduce leaves 66 MiB in /dev/shm for every rank of every test
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):  # until 0.19.6, whose tests compare it
    DeepSpeedEngine.sparse_tensor_module_names = ()
if os.environ["ELASTIC"] == "1":
    elastic_ckpt.install()
