"""Runs the code of docs/gpus.md."""

import pytest
from pages import python_blocks, text_of


def test_rows_in_slower_memory_go_to_torchrec(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = python_blocks(text_of("docs/gpus.md"))
    found: dict[str, object] = {}
    exec(code, found)
    share, *tables = capsys.readouterr().out.splitlines()
    assert 0 < float(share) < 0.5
    assert len(tables) == 26
    assert isinstance(found["constraints"], dict)
    kernels = {each.compute_kernels[0] for each in found["constraints"].values()}
    assert kernels == {"fused", "fused_uvm_caching"}
