"""``elastic-ckpt enable``, ``disable`` and ``exec``: installed once DeepSpeed is imported, and never in the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.config import flag_given, flags, read_config
from elastic_ckpt.errors import ConfigError
from elastic_ckpt.load import installation

REPO = Path(installation.__file__).parents[3]
PATCHED = "'elastic_ckpt' in deepspeed.DeepSpeedEngine.load_checkpoint.__code__.co_filename"
#: As DeepSpeed: importing it imports its engine before its own import is over.
FAKE = {
    "deepspeed/__init__.py": "from deepspeed.runtime.engine import DeepSpeedEngine\nimport deepspeed.ops\nWHOLE = True\n",
    "deepspeed/runtime/__init__.py": "",
    "deepspeed/runtime/engine.py": "class DeepSpeedEngine: pass\n",
    "deepspeed/ops.py": "",
    "elastic_ckpt/__init__.py": "def install():\n    import deepspeed\n    print('installed', deepspeed.WHOLE)\n",
}


def environment(**variables: str) -> dict[str, str]:
    """This process's, without its own PYTHONPATH."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "ELASTIC_CKPT", "RANK")}
    return {**own, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}


def run(words: Sequence[str | Path], code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    command = list(map(str, words))
    done = subprocess.run(
        command, cwd="/", env=environment(**variables), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with packages that stand for DeepSpeed and elastic_ckpt."""
    for name, text in FAKE.items():
        file = tmp_path / "fake" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "fake"


def below_exec(code: str, fake: Path, exit_code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program as ``elastic-ckpt exec`` does, where DeepSpeed and elastic_ckpt are others."""
    given = {**installation.variables(), **variables}
    given["PYTHONPATH"] = os.pathsep.join([installation.variables()["PYTHONPATH"].split(os.pathsep)[0], str(fake)])
    return run([sys.executable, "-c", code], exit_code, **given)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment, which sees this checkout and what is installed for the tests."""
    folder = tmp_path_factory.mktemp("fresh")
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    packages = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip()
    Path(packages, "installed.pth").write_text(f"{REPO}\n{sysconfig.get_path('purelib')}\n")
    return python


@pytest.mark.slow
def test_an_environment_is_enabled_until_it_is_disabled(fresh: Path) -> None:
    listed = [fresh, "-c", "import sys; print(*sorted(sys.modules), sep='\\n')"]
    before = run(listed).stdout.split()
    file = Path(run([fresh, "-m", "elastic_ckpt", "enable"]).stdout.removeprefix("enabled by ").strip())
    assert file.is_file() and file.is_relative_to(fresh.parents[1])
    assert run([fresh, "-m", "elastic_ckpt", "enable"]).stdout == f"enabled by {file}\n"
    assert {*run(listed).stdout.split()} - {*before} == {"_elastic_ckpt_startup"}, "what every process pays"

    shows = f"import deepspeed, sys; print({PATCHED})"
    assert run([fresh, "-c", shows]).stdout.endswith("True\n")
    assert run([fresh, "-I", "-c", shows]).stdout.endswith("True\n")
    assert run([fresh, "-c", shows], ELASTIC_CKPT="0").stdout.endswith("False\n")
    both = f"import elastic_ckpt; elastic_ckpt.install(); {shows}; elastic_ckpt.uninstall(); print({PATCHED})"
    done = run([fresh, "-c", both])
    assert done.stdout.endswith("True\nFalse\n") and "cannot be installed" not in done.stderr
    opted_out = f"import elastic_ckpt; elastic_ckpt.uninstall(); {shows}"
    assert run([fresh, "-c", opted_out]).stdout.endswith("False\n")

    found = json.loads(run([fresh, "-m", "elastic_ckpt", "doctor", "--json"], ELASTIC_CKPT="0").stdout)
    assert (found["enabled"], found["variable"]) == ([str(file)], "0")
    shown = run([fresh, "-m", "elastic_ckpt", "doctor"], ELASTIC_CKPT="0", COLUMNS="400").stdout
    assert str(file) in shown and "0, which turns it off" in shown

    assert run([fresh, "-m", "elastic_ckpt", "disable"]).stdout == f"removed {file}\n"
    assert run([fresh, "-m", "elastic_ckpt", "disable"]).stdout == "was not enabled\n"
    assert run(listed).stdout.split() == before
    assert not [*file.parent.rglob("*elastic_ckpt_startup*")]


def test_an_environment_whose_elastic_ckpt_is_gone_works_and_says_so_where_deepspeed_is_imported(
    fresh: Path, fake: Path
) -> None:
    run([fresh, "-m", "elastic_ckpt", "enable"])
    (fake / "elastic_ckpt" / "__init__.py").unlink()
    try:
        assert run([fresh, "-c", ""], PYTHONPATH=str(fake)).stderr == ""
        done = run([fresh, "-c", "import deepspeed; print(deepspeed.WHOLE)"], PYTHONPATH=str(fake))
    finally:
        run([fresh, "-m", "elastic_ckpt", "disable"])
    assert done.stdout == "True\n"
    assert done.stderr.count("\n") == 1 and "ELASTIC_CKPT=0" in done.stderr and "elastic-ckpt disable" in done.stderr
    assert str(fresh.parents[1]) in done.stderr


@pytest.mark.parametrize(
    "broken",
    ["raise SystemError('broken')", "def install(: pass", "def install(): raise OSError('a\\nb')", "import no"],
)
def test_a_broken_elastic_ckpt_breaks_no_import(broken: str, fake: Path) -> None:
    (fake / "elastic_ckpt" / "__init__.py").write_text(broken)
    program = "import deepspeed; print(deepspeed.WHOLE)"
    done = below_exec(program, fake)
    assert done.stdout == "True\n" and done.stderr.count("\n") == 1 and "ELASTIC_CKPT=0" in done.stderr
    assert below_exec(program, fake, RANK="1").stderr == "", "one line for a node"
    assert below_exec(program, fake, RANK="8", LOCAL_RANK="0").stderr.count("\n") == 1
    assert below_exec(program, fake, ELASTIC_CKPT="0").stderr == ""
    assert "ELASTIC_CKPT=require" in below_exec(program, fake, 1, ELASTIC_CKPT="require").stderr
    again = f"try: import deepspeed\nexcept RuntimeError: {program}"
    assert "ELASTIC_CKPT=require" in below_exec(again, fake, 1, ELASTIC_CKPT="require").stderr


PROGRAMS = {
    "once, when its own import is over": "import deepspeed.ops, deepspeed",
    "in a thread that comes first": """
import threading
threads = [threading.Thread(target=__import__, args=("deepspeed.runtime.engine",)) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
    "not again by a reload": "import importlib, deepspeed; importlib.reload(deepspeed)",
    "after somebody has asked whether it is there": """
import importlib.util
assert importlib.util.find_spec("deepspeed") is not None
import deepspeed
assert "exec_module" not in vars(deepspeed.__loader__)
""",
    "in a forked process": """
import os, sys
if os.fork(): sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
import deepspeed
""",
    "in a spawned process": """
import multiprocessing
process = multiprocessing.get_context("spawn").Process(target=__import__, args=("deepspeed",))
process.start()
process.join()
""",
    "in a grandchild": """
import subprocess, sys
inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import deepspeed'], check=True)"
subprocess.run([sys.executable, "-c", inner], check=True)
""",
    "after an import that failed": """
import os
os.environ["FAIL"] = "1"
try: import deepspeed
except ValueError: del os.environ["FAIL"]
import deepspeed
""",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_it_is_installed(program: str, fake: Path) -> None:
    with (fake / "deepspeed" / "ops.py").open("a") as stream:
        stream.write("import os\nif 'FAIL' in os.environ: raise ValueError\n")
    assert below_exec(program, fake).stdout == "installed True\n"


def test_a_deepspeed_in_an_archive_is_noticed(fake: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name, text in FAKE.items():
            archive.writestr(name, text)
    assert below_exec("import deepspeed, deepspeed.ops", tmp_path / "all.zip").stdout == "installed True\n"


def test_another_package_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fake" / "deepspeed").mkdir(parents=True)
    (tmp_path / "fake" / "deepspeed" / "__init__.py").touch()
    done = below_exec("import deepspeed, sys; print('elastic_ckpt' in sys.modules)", tmp_path / "fake")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_users_own_sitecustomize_and_python_path_stay(fake: Path, tmp_path: Path) -> None:
    (fake / "sitecustomize.py").write_text("import sys\nsys.marks = [__file__]\n")
    done = below_exec("import sys, sitecustomize; print(sys.marks[0], sitecustomize.__file__)", fake)
    assert done.stdout.split() == [str(fake / "sitecustomize.py")] * 2
    (fake / "sitecustomize.py").write_text("raise ValueError('of mine')\n")
    assert "of mine" in below_exec("print('started')", fake).stderr


@pytest.mark.parametrize(
    ("before", "mode", "after"),
    [
        (None, None, "1"),
        ("0", None, "1"),
        ("require", None, "require"),
        ("require", "off", "off"),
        ("0", "auto", "auto"),
    ],
)
def test_the_environment_of_a_command(
    before: str | None, mode: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_CKPT", raising=False)
    if before is not None:
        monkeypatch.setenv("ELASTIC_CKPT", before)
    own = str(Path(installation.__file__).parent)
    for path, expected in (("", own), ("/a:/b", f"{own}:/a:/b"), (f"/a:{own}:", f"{own}:/a:"), (":", f"{own}::")):
        monkeypatch.setenv("PYTHONPATH", path)
        assert installation.variables(mode) == {"PYTHONPATH": expected, "ELASTIC_CKPT": after}


def exec_(*words: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "elastic_ckpt", "exec", *words], code, PYTHONPATH=str(REPO), **variables)


def test_a_command_takes_the_place_of_exec() -> None:
    shows = "import os, sys; print(os.environ['ELASTIC_CKPT'], sys.argv[1:], '_elastic_ckpt_startup' in sys.modules)"
    python = [sys.executable, "-c", shows, "--help", "-x"]
    assert exec_("--universal-checkpoint=require", "--", *python).stdout == "require ['--help', '-x'] True\n"
    assert exec_("--universal-checkpoint", "off", *python).stdout.startswith("off ")
    assert exec_("bash", "-c", "exit 7", code=7).stdout == ""
    exec_("bash", "-c", "kill -TERM $$", code=-signal.SIGTERM)
    assert exec_("bash", "-c", "yes | head -n 1; exit ${PIPESTATUS[0]}", code=128 + signal.SIGPIPE).stderr == ""
    assert "no-such-command cannot be run" in exec_("no-such-command", code=127).stderr
    exec_(str(REPO / "README.md"), code=126)
    assert f"'{REPO}'" in exec_(str(REPO), code=126).stderr.replace("\n", "")
    assert "'on'" in exec_("--universal-checkpoint=on", "true", code=2).stderr


def test_a_mode_in_the_environment_is_that_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    flags.clear()
    section = {"elastic_checkpoint": {"mode": "off"}}
    for value, mode, given in (
        ("", "off", False),
        ("0", "off", False),
        ("1", "off", False),
        ("require", "require", True),
    ):
        monkeypatch.setenv("ELASTIC_CKPT", value)
        assert (read_config(section).mode, flag_given()) == (mode, given)
    monkeypatch.setenv("ELASTIC_CKPT", "yes")
    with pytest.raises(ConfigError, match="ELASTIC_CKPT"):
        read_config({})


def test_a_folder_that_cannot_be_written_or_is_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(folder))
    result = CliRunner().invoke(app, ["enable"])
    assert result.exit_code == 2 and f"reads no .pth files in {tmp_path}" in result.output
    assert "elastic-ckpt exec" in result.output and not any(tmp_path.rglob("*.p*"))
    folder = tmp_path / "nowhere"
    result = CliRunner().invoke(app, ["enable"])
    assert result.exit_code == 2 and str(folder) in result.output
