"""What a release contains and says of itself: versions, addresses, images, workflows, and the wheel."""

import re
import shutil
import subprocess
import sys
import tomllib
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from jobs.config.slurm import script_text

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
PACKAGES = ("conf", "jobs", "runtime", "weightstream")
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "scripts" / "install_image.sh").read_text(encoding="utf-8")
EXPLAINS_THE_CHECKOUT = {ROOT / "conf" / "README.md", ROOT / "conf" / "machine" / "README.md"}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_is_the_same_wherever_it_stands() -> None:
    version = PROJECT["version"]
    assert CITATION["version"] == version
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE)
    assert f"the latest {version.rpartition('.')[0]}.x" in SECURITY


def test_the_citation_names_the_authors_and_the_license_of_the_package() -> None:
    assert [author["name"] for author in CITATION["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert CITATION["license"] == PROJECT["license"]
    assert CITATION["keywords"] == PROJECT["keywords"][: len(CITATION["keywords"])]


def test_the_address_of_the_repository_is_the_same_in_all_three_files_or_in_none() -> None:
    """docs/project/release.md explains when it is added."""
    address = PROJECT.get("urls", {}).get("Repository")
    assert CITATION.get("repository-code") == address
    assert "example" not in str(address)
    in_security = re.findall(r"https?://[^\s)>]+", SECURITY.partition("## Reporting")[2])
    assert all(address is not None and found.startswith(address) for found in in_security)
    assert bool(in_security) is (address is not None)


def test_cells_of_the_security_page_are_short() -> None:
    cells = [cell for line in SECURITY.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell) > 130] == []


def test_every_file_of_the_packages_is_python_or_package_data() -> None:
    """What is neither would be missing in the wheel."""
    globs = PYPROJECT["tool"]["setuptools"]["package-data"]
    assert set(globs) == set(PACKAGES)
    shipped = {path for package in PACKAGES for glob in globs[package] for path in (ROOT / package).glob(glob)}
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {ROOT / name for name in listed.stdout.splitlines()}
    assert {path for path in files - shipped if path.suffix != ".py"} == EXPLAINS_THE_CHECKOUT


def test_both_images_install_the_same_from_what_the_sdist_has_too() -> None:
    dockerfile, definition = (ROOT / name for name in ("Dockerfile", "apptainer.def"))
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", dockerfile.read_text(), re.MULTILINE))
    section = definition.read_text().partition("%arguments\n")[2].partition("\n\n")[0]
    assert dict(line.split("=", 1) for line in section.split()) == arguments
    copied = {word.removeprefix("./") for line in re.findall(r"^COPY (.*) \S+$", dockerfile.read_text(), re.MULTILINE)
              for word in line.split()}  # fmt: skip
    section = definition.read_text().partition("%files\n")[2].partition("\n\n")[0]
    assert {line.split()[0] for line in section.splitlines()} == copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    in_sdist = {"pyproject.toml", "README.md", "LICENSE", *PACKAGES}  # by setuptools
    includes = re.findall(r"^include (.*)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    in_sdist |= {word for line in includes for word in line.split()}
    assert copied | {"Dockerfile", ".dockerignore", "apptainer.def", "environment.yml"} <= in_sdist
    extras = {*arguments["EXTRAS"].split(",")}
    assert extras <= {*PROJECT["optional-dependencies"]}
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]["pip"]
    assert conda[-1] == f"-e .[{arguments['EXTRAS']}]"


def test_the_installer_of_the_images_is_shell_and_uses_the_pinned_versions() -> None:
    assert subprocess.run(["sh", "-n"], input=INSTALL, text=True).returncode == 0
    assert "-c constraints.txt" in INSTALL
    refused = subprocess.run(["sh"], input=INSTALL, text=True, capture_output=True, env={"TORCH": "rocm"})
    assert (refused.returncode, refused.stderr) == (2, "TORCH must be cpu or cuda, got rocm\n")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_with_a_tested_python(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [step["run"].split() for step in steps if "run" in step]
    assert commands
    assert [words for words in commands if words[0] != "make" or words[1] not in targets] == []
    tested = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name}
    assert {step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")} == tested


def test_ci_and_the_workflow_run_the_same_targets() -> None:
    ci = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())["jobs"]["test"]["steps"]
    assert [step["run"].split()[1] for step in steps if "run" in step] == ci


@pytest.mark.slow("test_release.py::test_every_file_of_the_packages_is_python_or_package_data")
def test_the_wheel_alone_runs_generates_and_prints_its_slurm_scripts(tmp_path: Path) -> None:
    source, home, away = (tmp_path / name for name in ("source", "home", "away"))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    away.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", tmp_path, source], check=True, timeout=300
    )
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
        names = {name.partition("/")[0] for name in archive.namelist()}
    assert names == {*PACKAGES, f"weightstream-{PROJECT['version']}.dist-info"}
    assert (headers["Name"], headers["Version"]) == ("weightstream", PROJECT["version"])
    assert (headers["License-Expression"], headers["Author"]) == (PROJECT["license"], PROJECT["authors"][0]["name"])
    assert headers.get_all("Classifier") == PROJECT["classifiers"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", home, wheel], check=True, timeout=300)

    def run(*words: str) -> str:
        command = [sys.executable, "-P", "-m", "weightstream", *words]
        environment = {"PYTHONPATH": str(home), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            command, cwd=away, env=environment, check=True, capture_output=True, text=True, timeout=300
        ).stdout

    assert run("slurm") == script_text("generate")
    assert run("slurm", "export") == script_text("export")
    assert "rows ok" in run("generate", "dataset.limit=2", "sampling.max_new_tokens=4", "run=two")
    assert (away / "outputs" / "generate" / "two" / "_SUCCESS.json").exists()
