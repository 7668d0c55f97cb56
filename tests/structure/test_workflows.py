"""Workflows of a forge, which do not run here: files, scripts and versions that they name exist and agree."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORGE = ROOT / ".github"
WORKFLOWS = sorted(FORGE.glob("workflows/*.yml"))
PYTHON_VERSION = "Programming Language :: Python :: 3."


def jobs(workflow: Path) -> dict:
    return yaml.safe_load(workflow.read_text())["jobs"]


def supported_versions() -> list[str]:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [name.rpartition(" ")[2] for name in classifiers if name.startswith(PYTHON_VERSION)]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_name_scripts_that_exist(workflow: Path) -> None:
    steps = [step for job in jobs(workflow).values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    text = "\n".join(step.get("run", "") for step in steps)
    scripts = set(re.findall(r"(?:^|\s)((?:\.ci|tools|tests)/\S+)", text))
    assert scripts
    for name in scripts:
        assert (ROOT / name).is_file(), name
        assert name.endswith(".py") or os.access(ROOT / name, os.X_OK), name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_have_a_version(workflow: Path) -> None:
    for job in jobs(workflow).values():
        assert set([job["needs"]] if "needs" in job else []) <= jobs(workflow).keys()
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step.get("uses", "a/b@v1.2.3")), step


def test_wheels_are_built_for_all_supported_versions() -> None:
    versions = supported_versions()
    matrices = [job["strategy"]["matrix"]["python"] for job in jobs(FORGE / "workflows/release.yml").values()
                if "strategy" in job]  # fmt: skip
    assert versions and matrices == [versions, versions]
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert requires == f">={versions[0]}"


def test_the_image_has_a_supported_version() -> None:
    text = (ROOT / "Containerfile").read_text()
    version = re.search(r"^FROM python:([\d.]+)-", text, re.MULTILINE)[1]
    assert version in supported_versions()
    assert f"-cp{version.replace('.', '')}-" in text


def test_issue_forms_have_the_required_fields() -> None:
    for path in FORGE.glob("ISSUE_TEMPLATE/*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys(), path
        assert len({field["id"] for field in form["body"]}) == len(form["body"]), path
