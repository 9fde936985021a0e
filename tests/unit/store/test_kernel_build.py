"""The kernel's library: built from its source, never stale, never lost without a reason, and in the wheel."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hatchling.builders.wheel import WheelBuilder

from horizon_server.store import native

ROOT = Path(__file__).resolve().parents[3]
SOURCE = native.KERNEL_FOLDER / native.SOURCE_FILE
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux, found none"
)


def build_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_kernels", ROOT / "tools" / "build_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with the store alone, without a library."""
    store = tmp_path / "server" / "horizon_server" / "store"
    shutil.copytree(
        native.KERNEL_FOLDER.parent, store, ignore=shutil.ignore_patterns("*.so", "__pycache__", ".build-*")
    )
    for package in ("proto/horizon_proto", "client/horizon_client"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "tools/build_kernels.py", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build_wheel(tree: Path) -> Path:
    (wheel,) = WheelBuilder(str(tree)).build(directory=str(tree / "dist"), versions=["standard"])
    return Path(wheel)


@needs_compiler
def test_a_changed_source_is_never_served_by_an_old_library(tree: Path) -> None:
    folder = tree / "server" / "horizon_server" / "store" / "kernels"
    first, *others = build_tool().build_kernels(tree)
    assert native.kernel_info(folder).available
    built = [library.stat().st_mtime_ns for library in (first, *others)]
    assert [library.stat().st_mtime_ns for library in build_tool().build_kernels(tree)] == built, "built twice"
    with (folder / native.SOURCE_FILE).open("a") as source:
        source.write("// changed\n")
    changed = folder.rename(folder.with_name("changed"))
    info = native.kernel_info(changed)
    assert not info.available and f"{first.name} was built from another" in info.reason
    assert "build_kernels.py" in info.reason
    changed.rename(folder)
    second, *_ = build_tool().build_kernels(tree)
    assert sorted(folder.glob("*.so")) == sorted([second, *others]) and second != first


def test_a_missing_library_gives_the_reason(tree: Path) -> None:
    folder = tree / "server" / "horizon_server" / "store" / "kernels"
    info = native.kernel_info(folder)
    assert (info.available, info.isa) == (False, "numpy")
    assert info.reason.startswith("it was never compiled; install g++")


def test_a_library_that_does_not_load_gives_the_reason(tree: Path) -> None:
    folder = tree / "server" / "horizon_server" / "store" / "kernels"
    name = native.library_name(native.source_bytes(folder / native.SOURCE_FILE))
    (folder / name).write_bytes(b"no library")
    info = native.kernel_info(folder)
    assert not info.available and f"{name} does not load" in info.reason


@needs_compiler
def test_the_wheel_carries_the_library_and_says_for_which_platform(tree: Path) -> None:
    wheel = build_wheel(tree)
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    libraries = {Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    sources = {name: native.source_bytes(native.KERNEL_FOLDER / name) for name in native.SOURCE_FILES}
    names = {native.library_name(source, name) for name, source in sources.items()}
    assert libraries == {Path("horizon_server/store/kernels") / name for name in names}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where a compiler would be used")
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_the_wheel_is_pure(
    tree: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", compiler)
    wheel = build_wheel(tree)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "NumPy will run instead" in "".join(capsys.readouterr())


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64, where the variants exist")
def test_every_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    kernel = native.library()
    assert kernel is not None
    expected = update_with(kernel)
    flags = SOURCE.read_text().split("build-flags: ")[1].split("\n")[0].split()
    cpu_flags = Path("/proc/cpuinfo").read_text().split()
    variants = {
        "sse2": ["-msse2"],
        "avx2": ["-mavx2"],
        "avx512bw": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
    }
    for variant, options in variants.items():
        if variant not in cpu_flags:
            continue
        file = tmp_path / f"{variant}.so"
        subprocess.run(["g++", *flags, "-DHZ_CLONES=", *options, str(SOURCE), "-o", str(file)], check=True, timeout=300)
        for value, other in zip(expected, update_with(native.bind(ctypes.CDLL(str(file)))), strict=True):
            assert torch.equal(value, other), variant


def update_with(kernel: ctypes.CDLL) -> list[torch.Tensor]:
    n = 70_001
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (4, n), generator=generator, dtype=torch.int64).to(torch.int32)
    hi, lo = bits[0].to(torch.int16), bits[1].to(torch.int16)
    exp_avg, exp_avg_sq = torch.randn(n, generator=generator), torch.rand(n, generator=generator)
    grads = torch.randn(n, generator=generator)
    segments = (native.Segment * 1)(native.Segment(0, n, 0.999, 0.7))
    scalars = native.Scalars(0.5, 0.9, 0.1, 0.999, 0.001, 3e-9, 3e-4, 7.3)
    pointers = [tensor.data_ptr() for tensor in (hi, lo, exp_avg, exp_avg_sq, grads)]
    kernel.hz_adamw(*pointers, 0, segments, 1, scalars, 2)
    compressed = compressed_update_with(kernel, grads, segments, scalars)
    partials = torch.zeros(8, dtype=torch.float64)
    kernel.hz_sum_squares(grads.data_ptr(), 0, n, partials.data_ptr(), 2)
    return [hi, lo, exp_avg.view(torch.int32), exp_avg_sq.view(torch.int32), partials, *compressed]


def compressed_update_with(
    kernel: ctypes.CDLL, grads: torch.Tensor, segments: ctypes.Array[native.Segment], scalars: native.Scalars
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    n = len(grads)
    hi = torch.randn(n, generator=generator).bfloat16()
    lo, first = (torch.randint(-127, 128, (n,), generator=generator, dtype=torch.int8) for _ in range(2))
    root = torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-40, 20, (2 * -(-n // 32),), generator=generator).float()).bfloat16()
    planes, dither = (hi, lo, first, root, scales), torch.rand(64, generator=generator)
    pointers = [tensor.data_ptr() for tensor in (*planes, grads)]
    kernel.hz_adamw_compressed(*pointers, 0, segments, 1, scalars, dither.data_ptr(), 2)
    return [plane.view(torch.uint8) for plane in planes]
