"""Controllers that start a failed job again, or with other workers: it goes on with the right batch and samples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

from elastic_ckpt.data import ElasticSampler
from tests.distributed.elastic_nodes import outcome_of
from tests.distributed.launch import REPO, end, environment, run_ranks, start
from tests.distributed.nodes_script import BATCH, FAIL
from tests.integration.conftest import SCRIPTS, Job, Run
from tests.integration.scripts.trainer_data import LENGTH

pytestmark = pytest.mark.nightly

STEPS, LIMIT = 6, 400
AGENTS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=1"],
    "Accelerate": [
        *("accelerate.commands.launch", "--use_deepspeed", "--num_processes=2", "--max_restarts=1"),
        *("--rdzv_backend=c10d", "--rdzv_conf=is_host=1"),
    ],
}
#: Else torch 2.13 gives gloo the addresses of the ranks that have ended.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def run_to_the_end(command: list[str], env: dict[str, str], log: Path, python: str | Path = sys.executable) -> None:
    process = start([str(python), *command], env, log)
    try:
        assert process.wait(LIMIT) == 0, log.read_text()[-6000:]
    except subprocess.TimeoutExpired:
        pytest.fail(log.read_text()[-6000:])
    finally:
        end(process)


@pytest.mark.parametrize("agent", AGENTS)
def test_ranks_that_an_agent_restarts_in_place_go_on(agent: str, extensions_dir: str, tmp_path: Path) -> None:
    """The last rank fails before step 4, of which the two before it are saved."""
    command = ["-m", *AGENTS[agent], "-m", "tests.distributed.nodes_script", str(tmp_path), str(STEPS)]
    run_to_the_end(command, environment(extensions_dir) | NEW_STORE | {FAIL: "4"}, tmp_path / "agent.log")
    found = outcome_of(tmp_path)
    assert (found.starts, found.lost_or_twice, len(found.samples)) == (2, 0, STEPS * BATCH)
    assert found.worlds == dict.fromkeys(range(1, STEPS + 1), 2)


@pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: bash launch/frameworks.sh FOLDER ray runs this"
)
def test_a_worker_group_of_ray_goes_on_with_other_workers(extensions_dir: str, tmp_path: Path) -> None:
    """Two workers, of which one fails before step 3 and Ray starts both again; then three, then one."""
    folder, alone = tmp_path / "ray", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    run_to_the_end([str(SCRIPTS / "ray_train.py"), str(folder)], environment(extensions_dir), tmp_path / "ray.log")
    run_ranks(1, "nodes_script.uninterrupted", (str(alone), 8), extensions_dir, LIMIT)
    found, expected = outcome_of(folder), outcome_of(alone)
    assert list(found.worlds.values()) == [2, 2, 2, 2, 3, 3, 1, 1]
    assert (found.starts, found.lost_or_twice) == (4, 0)
    assert found.losses == pytest.approx(expected.losses, abs=1e-4)  # sums of float32 in another order


def samples(job: Job) -> list[int]:
    """Of all micro-batches, in their global order: ranks take samples in turn."""
    ranks = [json.loads(path.read_text())[1] for path in sorted(job.seen.glob("samples-*.json"))]
    batches = (zip(*parts, strict=True) for parts in zip(*ranks, strict=True))
    return list(chain.from_iterable(chain.from_iterable(batches)))


def test_a_sampler_goes_on_in_lightning_over_2_3_and_1_ranks(run: Run) -> None:
    """Two steps of 12 samples, two of 3 to the end of the epoch, three of 10."""

    def steps(ranks: int, micro: int, accumulation: int, until: int, before: Job | None = None) -> Job:
        sizes = ("--micro", str(micro), "--accumulation", str(accumulation), "--steps", str(until))
        found = () if before is None else ("--ckpt_path", str(max(before.output.glob("step=*.ckpt"))))
        return run(ranks, "lightning_data.py", *sizes, *found, elastic=True)

    first = steps(2, 3, 2, 2)
    second = steps(3, 1, 1, 4, first)
    third = steps(1, 5, 2, 7, second)
    sampler = ElasticSampler(LENGTH, seed=5)
    found = [samples(first), samples(second), samples(third)]
    assert list(map(len, found)) == [24, 6, 30]
    assert found[0] + found[1] + found[2] == [*sampler.order(0).tolist(), *sampler.order(1).tolist()]


@pytest.fixture
def enabled(tmp_path: Path) -> Iterator[Path]:
    """The Python of a fresh environment that sees what is installed for the tests, after ``elastic-ckpt enable``."""
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh"], check=True)
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
    Path(packages, "installed.pth").write_text(f"{REPO}\n{sysconfig.get_path('purelib')}\n")
    subprocess.run([python, "-m", "elastic_ckpt", "enable"], check=True)
    yield python


@pytest.mark.nightly
def test_a_trainer_goes_on_with_its_batch_and_samples_by_an_environment_that_is_enabled(
    enabled: Path, extensions_dir: str, tmp_path: Path
) -> None:
    """Nothing else brings the plugin: not the command, the script or a variable. DeepSpeed builds for this Python."""
    shutil.copytree(extensions_dir, tmp_path / "extensions")
    env = environment(str(tmp_path / "extensions"))
    env["PYTHONPATH"] = os.pathsep.join([str(REPO / "tests" / "integration" / "cpu"), env["PYTHONPATH"]])

    def samples_of(ranks: int, name: str, *more: str) -> list[int]:
        seen, out = tmp_path / f"seen-{name}", tmp_path / name
        seen.mkdir()
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        script = [str(SCRIPTS / "trainer_data.py"), "--output_dir", str(out), "--seen", str(seen), "--save", "7", *more]
        run_to_the_end([*launcher, *script], env, tmp_path / f"{name}.log", enabled)
        every = [json.loads(path.read_text()) for path in sorted(seen.glob("samples-*.json"))]
        return [number for turn in zip(*every, strict=True) for _, _, batch in turn for number in batch]

    order = samples_of(2, "whole", "--micro", "3")
    at_42 = ("--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-7"))
    assert samples_of(3, "resumed", "--micro", "2", *at_42) == order[42:]
    assert "elastic_ckpt: checkpoint restored" in (tmp_path / "resumed.log").read_text()
