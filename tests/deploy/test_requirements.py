"""pyproject.toml's packages and requirements, and the versions in constraints.txt for tests and images."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    found = [Requirement(line) for line in [*project["dependencies"], *extras]]
    return {one.name: one for one in found}


@pytest.mark.parametrize("version", ["2.9.0", "2.9.1"])
def test_torch_without_cudnn_for_conv3d_is_not_installed(requirements: dict[str, Requirement], version: str) -> None:
    assert not requirements["torch"].specifier.contains(version)
    assert requirements["torch"].specifier.contains("2.9.2")


def test_the_tested_versions_satisfy_the_requirements(requirements: dict[str, Requirement]) -> None:
    text = (ROOT / "constraints.txt").read_text()
    tested = {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}
    assert "torch" in tested
    for name, requirement in requirements.items():
        version = tested.get(name.lower().replace("_", "-")) or tested.get(name.lower())
        assert version is None or requirement.specifier.contains(version), f"{requirement} is not {version}"


def required_by(*names: str) -> set[str]:
    """The packages and all that they require, without extras, as installed here."""
    found: set[str] = set()
    for name in names:
        name = canonicalize_name(name)
        if name not in found:
            lines = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
            needed = [one.name for one in lines if one.marker is None or one.marker.evaluate({"extra": ""})]
            found |= {name} | required_by(*needed)
    return found


def test_the_wheels_for_the_gpu_check_are_all_that_it_needs() -> None:
    lines = (ROOT / "deploy" / "gpu_checks" / "wheels.txt").read_text().splitlines()
    wheels = dict(line.split("==") for line in lines if not line.startswith("#"))
    tested = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    versions = {canonicalize_name(name): version for name, version in tested}
    assert {name for name, version in wheels.items() if versions[name] != version} == {"imageio-ffmpeg"}
    own = ["svdq", "accelerate", "comfy-kitchen", "diffusers", "ftfy", "gguf", "imageio-ffmpeg", "psutil"]
    own += ["python-json-logger"]
    assert required_by(*own) - required_by("torch", "transformers") - {"svdq"} <= wheels.keys()


def test_an_installation_has_every_module_and_every_file() -> None:
    """An editable one, as of the tests, has them in any case."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [ROOT / folder for folder in setuptools["package-dir"].values()]
    files = [path for folder in folders for path in folder.rglob("*.*") if "__pycache__" not in path.parts]
    files = [path for path in files if path.is_file()]
    packages = {ROOT.joinpath(*name.split(".")[1:]): name for name in setuptools["packages"]}
    modules = {path for path in files if path.suffix == ".py"}
    assert {path.parent for path in modules} == packages.keys()
    patterns = setuptools["package-data"]
    data = {
        path
        for folder, name in packages.items()
        for pattern in (*patterns["*"], *patterns.get(name, ()))
        for path in folder.glob(pattern)
    }
    assert {*files} - modules <= data
