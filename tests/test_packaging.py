"""What surrounds the package: its metadata, the files a project is expected to have, continuous integration."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from setuptools.config.pyprojecttoml import read_configuration

import elastic_ckpt
from elastic_ckpt.engines.versions import REQUIREMENTS
from elastic_ckpt.sharding.rules import Preset

REPO = Path(__file__).parents[1]
WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
PYPROJECT = read_configuration(REPO / "pyproject.toml", expand=False)


def test_the_version_is_in_one_place() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"] and "version" not in PYPROJECT["project"]
    assert version("elastic_ckpt") == elastic_ckpt.__version__
    literal = f'"{elastic_ckpt.__version__}"'
    files = [*REPO.glob("*.py"), *REPO.glob("*.toml"), *REPO.glob("*.cff"), *(REPO / "elastic_ckpt").rglob("*.py")]
    assert [path.name for path in files if literal in path.read_text()] == ["__init__.py"]


def test_the_metadata_states_the_supported_versions() -> None:
    project = PYPROJECT["project"]
    oldest = {each.name.lower(): each.oldest for each in REQUIREMENTS}
    assert project["requires-python"] == f">={oldest['python']}"
    assert f"torch>={oldest['torch']}" in project["dependencies"]
    assert project["optional-dependencies"]["deepspeed"] == [f"deepspeed>={oldest['deepspeed']}"]
    assert not any("deepspeed" in each for each in project["dependencies"]), "forks have distributions of other names"
    (newest,) = (each.newest for each in REQUIREMENTS if each.name == "Python")
    listed = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    assert (listed[0], listed[-1]) == (oldest["python"], newest)
    assert metadata("elastic_ckpt")["Requires-Python"] == project["requires-python"]


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(elastic_ckpt.__file__).parent / "py.typed").is_file()


_BUILD = """
import json
from setuptools import distutils
from distutils.core import run_setup
build = run_setup("setup.py", ["build_py"], stop_after="commandline").get_command_obj("build_py")
build.include_package_data = False  # looking for these writes a folder
build.ensure_finalized()
print(json.dumps([build.get_outputs(include_bytecode=False), build.build_lib]))
"""


def test_the_wheel_has_the_presets_and_the_pages_but_no_script_of_the_site() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BUILD], cwd=REPO, capture_output=True, text=True, timeout=120, check=True
    )
    outputs, root = json.loads(done.stdout.splitlines()[-1])
    built = {os.path.relpath(path, root) for path in outputs}
    pages = {f"elastic_ckpt/docs/{path.name}" for path in (REPO / "docs").glob("*.md")}
    assert {each for each in built if each.startswith("elastic_ckpt/docs/")} == pages
    assert {f"elastic_ckpt/configs/rules/{name}.json" for name in Preset.names()} <= built
    assert {"elastic_ckpt/__init__.py", "elastic_ckpt/py.typed", "elastic_ckpt/cli/docs.py"} <= built


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    assert all("timeout-minutes" in job or "publish" in name for name, job in jobs.items())
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_scripts_that_exist(workflow: Path) -> None:
    text = workflow.read_text()
    assert steps_of(workflow)
    for script in re.findall(r"launch/[\w.]+\.sh", text):
        assert (REPO / script).is_file(), script


def test_a_release_is_built_checked_and_published_without_a_token() -> None:
    text = (REPO / ".github" / "workflows" / "release.yml").read_text()
    assert "launch/package.sh" in text and "pypi-publish" in text and "id-token: write" in text
    assert "secrets." not in "".join(path.read_text() for path in WORKFLOWS)
    assert "twine check --strict" in (REPO / "launch" / "package.sh").read_text()


def test_the_hooks_of_pre_commit_are_the_checks_of_the_test_script() -> None:
    hooks = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    script = (REPO / "launch" / "test.sh").read_text()
    for hook in hooks:
        assert hook["entry"].replace(" --force-exclude", "") in script, hook["id"]


@pytest.mark.parametrize("name", ["CHANGELOG", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT"])
def test_the_files_that_people_look_for_exist(name: str) -> None:
    assert (REPO / f"{name}.md").read_text().startswith("# ")


def test_forms_and_the_citation_can_be_parsed() -> None:
    for form in (REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text())
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", elastic_ckpt.__version__)


def test_the_changelog_has_a_section_for_what_comes_next_and_for_this_version() -> None:
    text = (REPO / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)[:2] == ["Unreleased", elastic_ckpt.__version__]


_STUB = """#!/usr/bin/env bash
[[ $1 == -m ]] && echo "${@: -1}" >>"$INSTALLED"
[[ $1 == -c ]] && echo /scripts
exit 0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a Python that only notes what it is asked to install."""
    for name in ("launch/environment.sh", "setup.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((REPO / name).read_text())
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(_STUB)
    stub.chmod(0o755)
    return tmp_path


def installed(checkout: Path, extras: str = "") -> list[str]:
    """What a script that sources the environment has installed."""
    log = checkout / "installed"
    log.write_text("")
    environment = {"PATH": os.environ["PATH"], "INSTALLED": str(log), **({"EXTRAS": extras} if extras else {})}
    script = "set -euo pipefail; source launch/environment.sh"
    subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, check=True, timeout=30)
    return log.read_text().split()


def test_the_demo_installs_only_what_it_needs(checkout: Path) -> None:
    assert "EXTRAS=plots source launch/environment.sh" in (REPO / "launch" / "demo.sh").read_text()
    assert installed(checkout, "plots") == ["torch==2.13.0", "deepspeed==0.19.8", ".[deepspeed,plots]"]
    assert installed(checkout, "plots") == []
    assert installed(checkout)[-1] == ".[deepspeed,test,plots,docs,package]"
    assert installed(checkout) == installed(checkout, "plots") == []


@pytest.mark.parametrize("file", ["setup.py", "pyproject.toml"])
def test_an_environment_that_is_older_than_the_packaging_is_made_anew(file: str, checkout: Path) -> None:
    assert installed(checkout) and installed(checkout) == []
    later = time.time() + 10
    os.utime(checkout / file, (later, later))
    assert installed(checkout)
