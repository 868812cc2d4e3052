"""Checks the CUDA wheels of the pinned versions on a machine without GPUs: make gpu-wheels.

Some 3 GB are downloaded, and `make setup EXTRA=gpu` installs them into an environment of its own,
as on a machine with GPUs. What needs no driver is then checked there, with a stub in the place of
the driver's library: fbgemm loads and has code for the architectures and widths that this package
expects, and all of it says in one line that no GPU is here.
"""

import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_CHECK = "check"  # what this file is called with inside of the environment
# Settings of pip that prefer builds of this machine to those of the index.
_LOCAL = {"find_links", "extra_index_url", "constraint", "no_index", "prefer_binary"}
_DRIVER = "libnvidia-ml.so.1"
_FATBIN = struct.pack("<I", 0xBA55ED50)  # begins each group of kernels in a library
_PTX = 1  # kind of code that a driver translates for newer GPUs


def main() -> None:
    """Installs the wheels and checks them in their environment."""
    if Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        sys.exit("a driver of NVIDIA is here, and this stands in for one: run make gpu-check")
    if shutil.which("cc") is None:
        sys.exit("the stub of the driver's library needs a C compiler, cc: install gcc")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv = folder / "venv"
        environment = _environment()
        say("installing: make setup EXTRA=gpu")
        _run(["make", "setup", "EXTRA=gpu", f"VENV={venv}"], environment)
        python = str(venv / "bin" / "python")
        _stub(folder, venv)
        for stub in (None, folder):
            paths = {} if stub is None else {"LD_LIBRARY_PATH": str(stub)}
            _run([python, __file__, _CHECK, str(stub or "")], environment | paths)
    say("the CUDA wheels can be installed and loaded; kernels need a GPU: make gpu-check")


def check(has_stub: bool) -> None:
    """Checks what is installed here, with or without a stub of the driver's library."""
    import pytest
    import torch

    from autoshard.benchmark.backends.cuda import ANY_MINOR, EXACT, CudaBackend, CudaRuntime
    from autoshard.benchmark.operator import fbgemm
    from autoshard.workload import UserError

    assert (torch.version.cuda or "").startswith("13."), torch.__version__
    assert CudaRuntime().nvml.processes() == set()  # NVML without a driver
    problem = CudaBackend().problem()
    assert problem is not None
    assert "needs driver 580 or newer" in problem
    if not has_stub:
        with pytest.raises(UserError, match="NVIDIA's driver, which is not installed") as said:
            fbgemm.training_ops()
        say(f"without a driver: {said.value}")
        return
    operators = fbgemm.training_ops()  # its libraries are bound at once, so all symbols are there
    assert operators.SplitTableBatchedEmbeddingBagsCodegen
    say(f"fbgemm loads: {fbgemm.library_versions()}")
    libraries = sorted(Path(sys.modules["fbgemm_gpu"].__path__[0]).glob("*.so"))
    code = {each for library in libraries for each in kernels(library)}
    found = sorted(architecture for kind, architecture in code if kind != _PTX)
    assert len(found) == len(code), "drivers can translate some kernels for other GPUs"
    assert found == [ANY_MINOR * 10, *(10 * major + minor for major, minor in EXACT)], found
    say(f"kernels for sm_{', sm_'.join(map(str, found))}, and none that a driver could translate")
    forward = next(each for each in libraries if each.name.endswith("training_forward.so"))
    widths = {int(width) for width in re.findall(rb"max_D <= (\d+)", forward.read_bytes())}
    assert widths == {CudaBackend.max_width}, widths
    say(f"tables of at most {CudaBackend.max_width:,} columns")
    say(f"no GPU is found here: {problem}")


def kernels(library: Path) -> Iterator[tuple[int, int]]:
    """Yields kind of code and architecture of each kernel image in a library.

    They are in groups: magic, version, size of the header, size; then images, each with a header:
    kind, flags, size of the header, size, and at byte 28 the architecture.
    """
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        group = data.find(_FATBIN)
        while group >= 0:
            header, size = struct.unpack_from("<HQ", data, group + 6)
            image, end = group + header, min(group + header + size, len(data))
            while image < end:
                kind, _, header, size = struct.unpack_from("<HHIQ", data, image)
                if not header:  # no group, but bytes that look like one
                    break
                (architecture,) = struct.unpack_from("<I", data, image + 28)
                yield kind, architecture
                image += header + size
            group = data.find(_FATBIN, max(end, group + 1))


def _environment() -> dict[str, str]:
    """Returns the environment with pip's own settings, without those that prefer local builds."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2].replace("-", "_")] = value.strip("'\"")
    kept = {f"PIP_{name.upper()}": value for name, value in settings.items() if name not in _LOCAL}
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return others | kept | {"PIP_CONFIG_FILE": os.devnull}


def _stub(folder: Path, venv: Path) -> None:
    """Builds a library with all functions of the driver's that fbgemm asks for."""
    (packages,) = (venv / "lib").glob("python3.*/site-packages/fbgemm_gpu")
    names = re.findall(rb"\0(nvml\w+)(?=\0)", (packages / "fbgemm_gpu_py.so").read_bytes())
    assert names, "fbgemm asks for nothing of the driver's: this check needs no stub any more"
    source = "".join(f"int {name.decode()}(void) {{ return 999; }}\n" for name in sorted({*names}))
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / _DRIVER)]
    subprocess.run(compiler, input=source, text=True, check=True)


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHECK]:
        check(has_stub=bool(sys.argv[2]))
    else:
        main()
