"""The package as it is built, without a network: an sdist of the source, and a wheel of the sdist.

`tests/e2e/test_wheel.py` installs a wheel and runs it; `make package` does so with dependencies
from the index.
"""

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from commands import said_by
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from wheels import LEFT_OUT, ROOT, copy_source, faults_of, installed_files

import autoshard
from autoshard.benchmark.operator.fbgemm import TORCH_OF_FBGEMM

# What importing the package alone must not load, as it takes seconds.
HEAVY = ("torch", "ray", "numpy", "scipy", "mlflow", "pandas", "pyarrow", "torchrec", "fbgemm_gpu")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    said_by([sys.executable, "-c", BUILD, str(folder)], copy_source(folder / "source"))
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the sdist, which thus has all that the wheel needs."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    said_by([*pip, "--wheel-dir", str(sdist.parent), str(sdist)], sdist.parent)
    (found,) = sdist.parent.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Metadata:
    (name,) = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("dist-info/METADATA")]
    return Metadata.from_email(zipfile.ZipFile(wheel).read(name), validate=True)


def test_a_wheel_of_the_sdist_has_all_that_packages_have_and_nothing_else(wheel: Path) -> None:
    assert faults_of(wheel) == []
    assert "cost_model/pretrained/cpu/model.safetensors" in installed_files()  # the rule sees data


def test_a_file_that_is_forgotten_or_too_much_is_named(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(other, "w") as changed:
        for name in whole.namelist():
            if name != "autoshard/sharders/pretrained/cpu/policy.json":
                changed.writestr(name, whole.read(name))
        changed.writestr("autoshard/tests/conftest.py", "")
    assert faults_of(other) == [
        "the wheel lacks autoshard/sharders/pretrained/cpu/policy.json",
        "the wheel has autoshard/tests/conftest.py",
    ]


def test_the_sdist_has_no_tests_and_no_measurements(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= {*names}
    left_out = (*LEFT_OUT, "tests/", "docs/", ".ci/", ".venv")
    assert [name for name in names if name.startswith(left_out)] == []


def test_the_metadata_are_valid_and_say_the_version_in_one_place(metadata: Metadata) -> None:
    assert str(metadata.version) == autoshard.__version__
    assert metadata.license_expression == "MIT"
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert {"cpu", "gpu", "torchrec"} <= {*(metadata.provides_extra or ())}


def test_an_extra_names_one_pair_of_torch_and_fbgemm(metadata: Metadata) -> None:
    """With ranges, pip would take the newest fbgemm beside an older torch that is installed."""
    pairs = {}
    for extra in metadata.provides_extra or ():
        needed = {
            each.name: str(each.specifier)
            for each in metadata.requires_dist or ()
            if each.marker is not None and each.marker.evaluate({"extra": extra})
        }
        fbgemm = [needed[name] for name in ("fbgemm-gpu-cpu", "fbgemm-gpu") if name in needed]
        if fbgemm:
            pairs[extra] = (needed["torch"], *fbgemm)
    assert pairs == {
        "cpu": ("==2.13.*", "==1.8.*"),
        "gpu": ("==2.13.*", "==1.8.*"),
        "cpu-torch214": ("==2.14.*", "==1.9.*"),
        "gpu-torch214": ("==2.14.*", "==1.9.*"),
    }
    for torch, fbgemm in pairs.values():
        minor = fbgemm.removeprefix("==").removesuffix(".*")
        assert TORCH_OF_FBGEMM[minor] == torch.removeprefix("==").removesuffix(".*")


def test_importing_the_package_loads_none_of_what_it_needs(tmp_path: Path) -> None:
    script = f"import autoshard, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert said_by([sys.executable, "-c", script], tmp_path) == "[]\n"


@pytest.mark.parametrize("file", sorted((ROOT / "constraints").glob("*.txt")), ids=lambda f: f.stem)
def test_constraints_are_versions_that_the_package_allows(file: Path, metadata: Metadata) -> None:
    pinned = {}
    for line in file.read_text().splitlines():
        if line.partition("#")[0].strip():
            requirement = Requirement(line.partition("#")[0])
            pinned[requirement.name] = requirement.specifier
    suffix = "" if file.stem == "torch-2.13" else f"-torch{file.stem[6:].replace('.', '')}"
    for each in metadata.requires_dist or ():
        extras = ("", f"cpu{suffix}", f"gpu{suffix}", "torchrec")
        needed = each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras)
        for specifier in pinned.get(each.name, ()) if needed else ():
            assert specifier.operator == "=="
            assert each.specifier.contains(specifier.version), each
