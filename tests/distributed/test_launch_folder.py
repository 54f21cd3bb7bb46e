"""The scripts of ``launch/``, run for real: with torchrun's elasticity, and under a SLURM that this file plays."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.launch import REPO, end, environment, free_port, start
from tests.distributed.waiting_script import WAIT_AT, WAIT_IN

SCRIPT = str(REPO / "tests" / "distributed" / "waiting_script.py")
#: 24 samples a step on any number of ranks, 2 at a time.
CONFIG = str(REPO / "configs" / "elasticity.json")
STEPS = 10
#: Seconds that a job may take; they take ten to forty.
LIMIT = 150
#: Of float32 sums in another order.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Run:
    """A job that has been started.

    Attributes:
        process: the launcher.
        log: what it and its ranks print.
    """

    process: subprocess.Popen[bytes]
    log: Path

    def ends_well(self) -> str:
        """Wait for it; what was printed."""
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running\n{self.log.read_text()[-6000:]}")
        printed = self.log.read_text()
        assert code == 0, printed[-6000:]
        return printed

    def reaches(self, mark: Path) -> None:
        """Wait for a file."""
        self._waits_for(mark.exists)

    def says(self, words: str) -> None:
        """Wait until it has printed something."""
        self._waits_for(lambda: words in self.log.read_text())

    def _waits_for(self, has_come: Callable[[], bool]) -> None:
        limit = time.monotonic() + LIMIT
        while not has_come():
            assert self.process.poll() is None and time.monotonic() < limit, self.log.read_text()[-6000:]
            time.sleep(0.05)


@contextmanager
def running(script: str, arguments: list[str], log: Path, env: dict[str, str]) -> Iterator[Run]:
    """A script of ``launch/`` while it runs; what is left of it is ended."""
    scripts = str(Path(sys.executable).parent)  # torchrun and deepspeed
    env = {**env, "PATH": os.pathsep.join([env.get("STUBS", scripts), scripts, os.environ["PATH"]])}
    process = start(["bash", str(REPO / "launch" / script), SCRIPT, *arguments], env, log)
    try:
        yield Run(process, log)
    finally:
        end(process)


def training(losses: Path, folder: Path) -> list[str]:
    """The script's arguments for a run that goes on with what a folder holds, and saves there."""
    return ["--deepspeed_config", CONFIG, "--steps", str(STEPS), "--losses", str(losses),
            "--save-dir", str(folder), "--resume-from", str(folder)]  # fmt: skip


def read_losses(path: Path) -> dict[int, float]:
    with path.open(newline="") as stream:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(stream)}


@pytest.fixture(scope="module")
def env(extensions_dir: str) -> dict[str, str]:
    return environment(extensions_dir)


@dataclass(frozen=True)
class Uninterrupted:
    """A run of all steps on one rank.

    Attributes:
        folder: its checkpoint, of step 4.
        losses: of every step.
    """

    folder: Path
    losses: dict[int, float]

    def go_on_like(self, resumed: dict[int, float], first: int) -> None:
        """The resumed run trained from step ``first`` on, with this run's losses."""
        expected = {step: self.losses[step] for step in range(first, STEPS + 1)}
        assert resumed == pytest.approx(expected, abs=ROUNDING)


@pytest.fixture(scope="module")
def uninterrupted(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """Started by ``launch/torchrun.sh``, in a folder that holds no checkpoint yet."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    arguments = [*training(folder / "losses.csv", folder), "--save-at", "4"]
    with running("torchrun.sh", arguments, folder / "log", {**env, "RANKS": "1"}) as run:
        run.ends_well()
    losses = read_losses(folder / "losses.csv")
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.2  # it learns: going on with other weights would be seen
    return Uninterrupted(folder, losses)


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (["torchrun.sh"], {}, "usage: "),
        (["torchrun.sh", "train.py"], {"NODES": "1:2"}, "HEAD_NODE=host"),
        (["deepspeed.sh"], {}, "usage: "),
        (["deepspeed.sh", "train.py"], {"HOSTFILE": "no such/hosts"}, "HOSTFILE=no such/hosts: there is no such file"),
        (["slurm.sbatch", "train.py"], {}, "CHECKPOINTS: the folder that all nodes see"),
        (["slurm.sbatch", "train.py"], {"CHECKPOINTS": "/tmp"}, "SLURM_JOB_ID: is set in a job"),
        (["slurm.sbatch"], {"CHECKPOINTS": "/tmp", "SLURM_JOB_ID": "1"}, "usage: "),
        (["universal_torchrun.sh"], {}, "usage: "),
        (["universal_deepspeed.sh"], {}, "usage: "),
        (["universal_slurm.sbatch", "train.py"], {}, "SLURM_JOB_ID: is set in a job"),
        (["universal_slurm.sbatch"], {"SLURM_JOB_ID": "1"}, "usage: "),
    ],
)
def test_a_script_says_what_it_was_not_told(words: list[str], more: dict[str, str], said: str) -> None:
    command = ["bash", str(REPO / "launch" / words[0]), *words[1:]]
    ended = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode != 0 and said in ended.stderr


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ({}, ["--master_port", "29500"]),
        ({"RANKS": "2", "PORT": "7"}, ["--master_port", "7", "--num_gpus", "2"]),
        ({"HOSTFILE": "my hosts"}, ["--master_port", "29500", "--hostfile", "my hosts"]),
    ],
)
def test_deepspeed_sh_starts_the_script_under_elastic_ckpt(
    told: dict[str, str], options: list[str], tmp_path: Path
) -> None:
    """What it starts is run for real by ``test_launchers.py``."""
    (tmp_path / "my hosts").touch()
    stub = tmp_path / "deepspeed"
    stub.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\nexit 3\n")
    stub.chmod(0o755)
    env = {**os.environ, **told, "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    command = ["bash", str(REPO / "launch" / "deepspeed.sh"), "my train.py", "--note", "two words"]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False)
    started = [*options, "--module", "elastic_ckpt.run", "my train.py", "--note", "two words"]
    assert ended.stdout.splitlines() == started and ended.returncode == 3, ended.stderr


@pytest.mark.parametrize("script", ["universal_torchrun.sh", "universal_deepspeed.sh", "universal_slurm.sbatch"])
def test_a_universal_checkpoint_is_resumed_with_the_flag(
    script: str, uninterrupted: Uninterrupted, slurm: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(uninterrupted.folder, tmp_path / "folder"))
    result = CliRunner().invoke(app, ["convert", str(folder), "universal"])
    assert result.exit_code == 0, result.output
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    arguments = training(tmp_path / "losses.csv", folder)
    with running(script, arguments, tmp_path / "log", {**slurm, **job, "MODE": "require"}) as run:
        printed = " ".join(run.ends_well().split())
    assert "universal" in printed and "loaded global_step4_universal (step 4)" in printed
    uninterrupted.go_on_like(read_losses(tmp_path / "losses.csv"), first=5)


@pytest.mark.nightly
def test_a_lost_node_leaves_a_job_of_fewer_ranks_that_resumes_with_the_same_global_batch(
    uninterrupted: Uninterrupted, env: dict[str, str], tmp_path: Path
) -> None:
    arguments = [*training(tmp_path / "losses.csv", tmp_path), "--save-every", "3"]
    job = {**env, "NODES": "1:2", "HEAD_NODE": f"localhost:{free_port()}", "RANKS": "1", "RESTARTS": "1"}
    # The node that is left waits so long for another.
    wait = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=2"
    head = {**job, "RDZV_CONF": f"is_host=1,{wait}"}
    other = {**job, "RDZV_CONF": f"is_host=0,{wait}", WAIT_AT: "8", WAIT_IN: str(tmp_path), "LOGLEVEL": "INFO"}
    with running("torchrun.sh", arguments, tmp_path / "other.log", other) as leaving:
        leaving.says("Starting elastic_operator")  # it is waiting for the first node, which else might start without it
        with running("torchrun.sh", arguments, tmp_path / "head.log", head) as staying:
            leaving.reaches(tmp_path / "waiting")  # steps 1 to 7 are done, 3 and 6 are saved
            leaving.process.kill()  # its rank goes with it, as on a node that is lost
            printed = staying.ends_well()
    before, after = printed.split("checkpoint restored")
    assert "local_rank: 0" in before and "failed (exitcode: 1)" in before, before[-3000:]
    assert "at step 6" in after and "ZeRO-1, DP=2" in after and "ZeRO-1, DP=1" in after
    assert "gradient_accumulation_steps: 6 -> 12, micro-batch: 2 -> 2" in before
    uninterrupted.go_on_like(read_losses(tmp_path / "losses.csv"), first=7)


SRUN = """#!/usr/bin/env bash
[[ $1 == --kill-on-bad-exit=1 ]] && shift
ranks=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node "$@" &
    ranks+=($!)
done
for rank in "${ranks[@]}"; do wait "$rank" || exit; done
"""
SCONTROL = """#!/usr/bin/env bash
if [[ "$1 $2" == "show hostnames" ]]; then tr , '\\n' <<<"$3"; else echo "scontrol $*" >>"$CALLS"; fi
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >>"$CALLS"
"""


@pytest.fixture
def slurm(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """What a job of SLURM sees, on a machine that has none."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    (tmp_path / "calls").touch()
    values = {"STUBS": stubs, "CALLS": tmp_path / "calls", "CHECKPOINTS": tmp_path / "saved", "PORT": free_port()}
    return {**env, **{key: str(value) for key, value in values.items()}, "RANKS": "1"}


def test_slurm_sbatch_adds_no_argument_to_those_of_the_script(slurm: dict[str, str], tmp_path: Path) -> None:
    stub = tmp_path / "stubs" / "srun"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"; echo "$STOP_FILE"\n')
    job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    command = ["bash", str(REPO / "launch" / "slurm.sbatch"), "my train.py", "--note", "two words"]
    env = {**slurm, **job, "PATH": os.pathsep.join([str(tmp_path / "stubs"), os.environ["PATH"]])}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)
    script = ["-m", "elastic_ckpt.run", "my train.py", "--note", "two words", str(tmp_path / "saved" / "stop"), "done"]
    assert ended.stdout.splitlines()[-len(script) :] == script and ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("latest", ["latest", "checkpoint-5/latest"])
def test_slurm_sbatch_cancels_the_array_after_two_failures_in_a_row_without_a_save(
    latest: str, slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "stubs" / "srun").write_text('#!/usr/bin/env bash\necho "cores: $SRUN_CPUS_PER_TASK"; exit 3\n')
    job = {"SLURM_JOB_ID": "43", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    job |= {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_ON_NODE": "64"}
    env = {**slurm, **job, "PATH": os.pathsep.join([str(tmp_path / "stubs"), os.environ["PATH"]])}
    saved, called = tmp_path / "saved" / latest, list[str]()
    saved.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(4):
        command = ["bash", str(REPO / "launch" / "slurm.sbatch"), "train.py"]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)
        assert ended.returncode == 1 and "cores: 64" in ended.stdout, ended.stderr
        called.append((tmp_path / "calls").read_text())
        if len(called) < 3:  # the first two slices save before they fail
            saved.write_text("global_step5")
            for path, modified in ((tmp_path / "saved" / "failed-42", 100), (saved, 200)):
                os.utime(path, (modified, modified))
    assert called == ["", "", "", "scancel --state=PENDING 42\n"]


def test_slurm_sbatch_saves_before_its_time_is_over_and_goes_on_with_the_nodes_it_gets(
    uninterrupted: Uninterrupted, slurm: dict[str, str], tmp_path: Path
) -> None:
    calls, saved = tmp_path / "calls", tmp_path / "saved"
    arguments = [*training(tmp_path / "losses.csv", saved), "--stop-file", str(saved / "stop")]
    one = {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    hold = {WAIT_AT: "5", WAIT_IN: str(saved)}
    with running("slurm.sbatch", arguments, tmp_path / "first.log", {**slurm, **one, **hold}) as run:
        run.reaches(saved / "waiting")
        os.kill(run.process.pid, signal.SIGUSR1)  # as --signal=B:USR1@600: to the batch shell alone
        assert "asked to stop" in run.ends_well()
    assert (saved / "latest").read_text() == "global_step5"
    assert calls.read_text() == "scontrol requeue 41\n"  # it is no array

    two = {"SLURM_JOB_ID": "43", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "localhost,localhost"}
    array = {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1"}
    calls.write_text("")
    with running("slurm.sbatch", arguments, tmp_path / "second.log", {**slurm, **two, **array}) as run:
        printed = run.ends_well()
    assert "2 nodes, the first is localhost" in printed
    assert "ZeRO-1, DP=1" in printed and "ZeRO-1, DP=2" in printed
    assert calls.read_text() == "scancel --state=PENDING 42\n"  # trained to the end: the other slices are not needed
    uninterrupted.go_on_like(read_losses(tmp_path / "losses.csv"), first=6)
