"""Runs what `racecheck_build.py` built under racecheck of NVIDIA's compute-sanitizer; needs a Hopper GPU and NumPy.

    python tests/triton/tiled_attention/racecheck_run.py FOLDER/*.npz

Kernels are launched through the CUDA driver alone. In each of them racecheck should find no hazard, the results should
be right, and with its barriers taken out it should find some. Prints how many of them there are then.
"""

import argparse
import ctypes
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

MAX_DYNAMIC_SHARED_SIZE = 8
SCRATCH = 4  # pointers that Triton may add to a kernel's own, null where it uses none
WRONG = ", a wrong result"
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}


class Driver:
    """The calls of libcuda, each of which has to succeed."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name, *args):
        status = getattr(self.library, name)(*args)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def allocate(self, size):
        at = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return at

    def upload(self, x):
        x = np.ascontiguousarray(x)
        at = self.allocate(x.nbytes)
        self("cuMemcpyHtoD_v2", at, ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.nbytes))
        return at

    def download(self, at, shape, dtype):
        x = np.empty(shape, np.uint16 if dtype == "bfloat16" else dtype)
        self("cuMemcpyDtoH_v2", ctypes.c_void_p(x.ctypes.data), at, ctypes.c_size_t(x.nbytes))
        return x

    def launch(self, code, call, arguments):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), code)
        self("cuModuleGetFunction", ctypes.byref(function), module, call["kernel"].encode())
        self("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE, call["shared"])
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
        shape = (call["grid"], 1, 1, call["threads"], 1, 1)
        self("cuLaunchKernel", function, *shape, call["shared"], None, pointers, None)
        self("cuCtxSynchronize")


def widened(x, dtype):
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else x.astype(np.float32)


def error(got, want, dtype):
    """Largest difference, relative to the largest number; places that are infinite have to be the same."""
    got, want = widened(got, dtype), widened(want, dtype)
    minus_inf_to_zero = np.isfinite(want)
    if not np.array_equal(np.isneginf(got), np.isneginf(want)) or not np.isfinite(got[minus_inf_to_zero]).all():
        return np.inf
    return np.abs(got[minus_inf_to_zero] - want[minus_inf_to_zero]).max() / np.abs(want[minus_inf_to_zero]).max()


def described(file):
    """The launches of a file and its arrays."""
    with np.load(file) as stored:
        arrays = dict(stored)
    return json.loads(str(arrays.pop("launches"))), arrays


def launch(file, index, code):
    """Launches a kernel of a file; says how far off its results are unless it has no barriers."""
    driver, (calls, arrays) = Driver(), described(file)
    call = calls[index]
    shapes = [(shape, 2 if dtype == "bfloat16" else 4, dtype) for shape, dtype in call["outputs"]]
    places = [driver.allocate(int(np.prod(shape)) * width) for shape, width, _ in shapes]
    for at, (shape, width, _) in zip(places, shapes, strict=True):
        driver("cuMemsetD8_v2", at, 0xFF, ctypes.c_size_t(int(np.prod(shape)) * width))
    inputs = [driver.upload(arrays[name]) for name in call["inputs"]]
    scratch = [ctypes.c_uint64(0)] * SCRATCH
    driver.launch(arrays[call[code]].tobytes(), call, [*inputs, *places, *scratch])
    for at, (shape, _, dtype), result in zip(places, shapes, call["results"], strict=False):
        if result is not None and code == "code":
            off = error(driver.download(at, shape, dtype), arrays[result], dtype)
            print(f"{dtype} off by {off:.1e}{'' if off < TOLERANCE[dtype] else WRONG}", flush=True)


def check(file, index, code):
    """How many hazards a kernel has, and whether a result is wrong.

    In a process of its own: racecheck goes silent in one that has had as many hazards as it counts.
    """
    sanitizer = ["compute-sanitizer", "--tool", "racecheck", "--print-limit", "100000"]
    command = [*sanitizer, sys.executable, __file__, "--launch", code, str(index), str(file)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode or "RACECHECK SUMMARY" not in ran.stdout:
        raise RuntimeError(f"{file} {code}: {ran.stdout[-2000:]}")
    return len(re.findall(r"(?:Error|Warning): Race", ran.stdout)), WRONG in ran.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launch", nargs=2, metavar=("CODE", "INDEX"), help="only launch a kernel, in this process")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    if options.launch:
        launch(options.files[0], int(options.launch[1]), options.launch[0])
        return
    kernels = [(file, i, call["kernel"]) for file in options.files for i, call in enumerate(described(file)[0])]
    failed = 0
    with ThreadPoolExecutor() as pool:
        whole, without = ([pool.submit(check, *x[:2], code) for x in kernels] for code in ("code", "without_barriers"))
        for (file, _, kernel), found, planted in zip(kernels, whole, without, strict=True):
            (hazards, wrong), (raced, _) = found.result(), planted.result()
            bad = hazards or wrong or not raced
            failed += bool(bad)
            said = f"{hazards} hazards, {raced} without its barriers{WRONG if wrong else ''}"
            print(f"{file.stem} {kernel}: {said}{' FAILED' if bad else ''}", flush=True)
    print(f"{failed} of {len(kernels)} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
