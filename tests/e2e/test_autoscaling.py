import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the numbers would be real GPUs")
def test_gpus_are_asked_for_and_an_unusable_one_says_why(tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    script = Path(__file__).with_name("autoscaled.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    saw = json.loads(done.stdout.splitlines()[-1])
    assert (saw["before"], saw["came"]) == (0, 2)
    assert saw["asked"] == [{"GPU": 1.0}] * 2
    why = "torch is a build for CPUs" if torch.version.cuda is None else "torch finds no NVIDIA GPU"
    says = rf"the cluster has no device to measure on: gpu0@\S+ cannot be used: {why}"
    assert re.match(says, saw["said"])
