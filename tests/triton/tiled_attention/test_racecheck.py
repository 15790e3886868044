"""What `racecheck_build.py` builds for a GPU that is not here: machine code that loads with what is beside it."""

import json

import numpy as np
import pytest
import racecheck_build


@pytest.mark.parametrize("chip", racecheck_build.DEVICES)
def test_racecheck_build_stores_kernels_with_and_without_barriers(chip, tmp_path):
    record = racecheck_build.make_record(64, "bfloat16", "causal")
    racecheck_build.build(tmp_path, "call", chip, record, racecheck_build.from_rule(chip, record))
    with np.load(tmp_path / "call.npz") as stored:
        arrays = dict(stored)
    launches = json.loads(str(arrays.pop("launches")))
    assert [launch["kernel"] for launch in launches] == [
        "flash_fwd_kernel",
        "flash_bwd_dkdv_kernel",
        "flash_bwd_dq_kernel",
    ]
    for launch in launches:
        assert launch["barriers"] > 0
        assert launch["code"] != launch["without_barriers"]
        assert arrays[launch["code"]].tobytes().startswith(b"\x7fELF")
        assert all(name in arrays for name in [*launch["inputs"], *launch["results"]])
        assert len(launch["outputs"]) == len(launch["results"])
