"""What all tests have in common."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.distributed.launch import build_ops, close_zygotes, zygote_of
from tests.reporting import NAME, LinePerFile
from tests.shuffling import SEED, shuffled

# readline exports the width of a terminal, which workers of pytest-xdist inherit: output is as wide as where there is none
os.environ.pop("COLUMNS", None)
# how long an example takes is no matter of correctness, and a busy machine would make tests fail by it
settings.register_profile("no_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_clock")
if os.environ.get("ELASTIC_CKPT_TEST_VERSIONS") == "1" and "ELASTIC_CKPT_TEST_EXTENSIONS" in os.environ:
    zygote_of(os.environ["ELASTIC_CKPT_TEST_EXTENSIONS"])  # imports what ranks need while this process does


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Where nobody asked for more or less, one line a file."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and config.get_verbosity() == -1 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(LinePerFile(terminal), NAME)


def pytest_collection_finish() -> None:
    """What imports and collection left, a million objects, is not looked at again whenever garbage is collected."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all workers of pytest-xdist have."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "of_all_workers"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def extensions_dir(of_all_workers: Path) -> Iterator[str]:
    """Where DeepSpeed builds its ops. Private to this run: a killed build leaves a lock that would hang the next run.

    ``ELASTIC_CKPT_TEST_EXTENSIONS`` names a folder to build in once and use again, for work on a few tests.
    """
    folder = Path(os.environ.get("ELASTIC_CKPT_TEST_EXTENSIONS") or of_all_workers / "extensions")
    folder.mkdir(exist_ok=True)
    if "PYTEST_XDIST_WORKER" in os.environ:
        build_ops(str(folder))
    yield str(folder)
    close_zygotes()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seed of a shuffled run."""
    if SEED:
        terminalreporter.write_line(f"shuffled by ELASTIC_CKPT_TEST_SHUFFLE={SEED}")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Tests that start jobs are slow, but for those that are marked to run with every run of ``launch/test.sh``.

    The order is drawn when all others have left out what they leave out.
    """
    for item in items:
        starts_jobs = item.path.parent.name in ("distributed", "integration")
        if starts_jobs and not any(item.iter_markers("core")) and not any(item.iter_markers("nightly")):
            item.add_marker(pytest.mark.slow)
    yield
    if SEED:
        items[:] = shuffled(items, SEED)
