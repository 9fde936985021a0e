"""What the compiler of layers is told about CUDA, on nodes with and without a toolkit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from horizon_server.planning.gpu_compiler import compiler_environment, cuda_home, driver_library, what_is_missing


def toolkit(folder: Path, *, headers: bool = True, nvcc: bool = False) -> Path:
    (folder / "include").mkdir(parents=True)
    for name in ("cuda.h", "cuda_runtime.h") if headers else ():
        (folder / "include" / name).touch()
    if nvcc:
        (folder / "bin").mkdir()
        (folder / "bin" / "nvcc").touch(mode=0o755)
    return folder


def test_headers_come_from_what_is_named_then_nvcc_then_torchs_own_packages(tmp_path: Path) -> None:
    named, other, wheels = (toolkit(tmp_path / name, nvcc=name == "other") for name in ("named", "other", "wheels"))
    bare = toolkit(tmp_path / "bare", headers=False)

    def found(**environment: str) -> Path | None:
        return cuda_home(environment, default=tmp_path / "none", packages=[wheels])

    assert found(PATH="") == wheels
    assert found(PATH=str(other / "bin")) == other
    assert found(PATH=str(other / "bin"), CUDA_HOME=str(named)) == named
    # A runtime image names a folder that has libraries only.
    assert found(PATH="", CUDA_HOME=str(bare)) == wheels
    assert cuda_home({"PATH": ""}, default=tmp_path / "none", packages=[bare]) is None


def test_the_driver_is_linked_under_the_name_that_the_linker_wants(tmp_path: Path) -> None:
    home, scratch = toolkit(tmp_path / "wheels"), tmp_path / "scratch"
    (tmp_path / "nvidia").mkdir()
    driver = tmp_path / "nvidia" / "libcuda.so.1"
    driver.touch()
    assert driver_library({}, folders=[str(tmp_path)]) is None
    assert driver_library({"LD_LIBRARY_PATH": f":{driver.parent}"}, folders=[]) == driver
    assert driver_library({}, folders=[str(tmp_path), str(driver.parent)]) == driver

    for _ in range(2):  # a later attempt finds the link of an earlier one
        environment = compiler_environment({"LIBRARY_PATH": "/mine"}, scratch, home=home, driver=driver)

    folder, mine = environment["LIBRARY_PATH"].split(":")
    assert mine == "/mine" and environment["CUDA_HOME"] == str(home)
    assert (Path(folder) / "libcuda.so").resolve() == driver


def test_a_linker_finds_the_driver(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("linking takes g++")
    driver, program = tmp_path / "libcuda.so.1", tmp_path / "uses.so"
    subprocess.run([compiler, "-shared", "-x", "c++", "/dev/null", "-o", driver], check=True, timeout=240)
    environment = compiler_environment({}, tmp_path / "scratch", home=tmp_path, driver=driver)
    link: list[str | Path] = [compiler, "-shared", "-x", "c++", "/dev/null", "-x", "none", "-lcuda", "-o", program]
    for extra, code in (({}, 1), ({"LIBRARY_PATH": environment["LIBRARY_PATH"]}, 0)):
        done = subprocess.run(
            link, env={"PATH": "/usr/bin:/bin", **extra}, capture_output=True, check=False, timeout=240
        )
        assert done.returncode == code


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    missing = what_is_missing({"PATH": str(tmp_path)}, home=tmp_path, driver=tmp_path)
    assert missing == ["the C++ compiler g++"]
