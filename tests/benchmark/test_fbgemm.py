from importlib import metadata

import pytest

from autoshard.benchmark.operator import fbgemm


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that exactly these distributions are installed."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(fbgemm.metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"torch": "2.11.0", "fbgemm_gpu_cpu": "1.8.0"}, "torch 2.11.0 and fbgemm-gpu-cpu 1.8.0"),
        ({"torch": "2.13.0", "fbgemm_gpu": "1.6.0"}, "install torch 2.11"),
        ({"torch": "2.13.0", "fbgemm_gpu": "0.9"}, "install torch 2.13.* with fbgemm-gpu 1.8.0"),
        ({"torch": "2.13.0"}, "fbgemm is not installed"),
        ({"fbgemm_gpu": "1.8.0"}, "torch is not installed"),
        ({"torch": "2.13.0", "fbgemm_gpu": "1.8.0", "fbgemm_gpu_cpu": "1.8.0"}, "both installed"),
    ],
)
def test_a_wrong_pair_is_one_clear_sentence(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], says: str
) -> None:
    install(monkeypatch, **versions)
    with pytest.raises(fbgemm.InstallationError) as caught:
        fbgemm.check_pair()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loader_that_fails_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise OSError("fbgemm.so: undefined symbol: _ZN3c10\nmore of it")

    monkeypatch.setattr(fbgemm.importlib, "import_module", fail)
    with pytest.raises(fbgemm.InstallationError, match="undefined symbol") as caught:
        fbgemm.training_ops.__wrapped__()
    assert "\n" not in str(caught.value)


def test_a_missing_driver_is_told_of_behind_what_torch_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_name: str) -> None:
        cause = OSError("libnvidia-ml.so.1: cannot open shared object file: No such file")
        raise OSError("Could not load this library: fbgemm_gpu_py.so") from cause

    monkeypatch.setattr(fbgemm.importlib, "import_module", fail)
    with pytest.raises(
        fbgemm.InstallationError, match=r"driver, .* \(libnvidia-ml\.so\.1: "
    ) as said:
        fbgemm.training_ops.__wrapped__()
    assert "\n" not in str(said.value)


def test_what_is_installed_belongs_together() -> None:
    torch, version = fbgemm.check_pair()
    assert torch in fbgemm.library_versions()
    assert version in fbgemm.library_versions()
