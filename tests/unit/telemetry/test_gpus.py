"""GPU figures come from the driver, here a stand-in with pynvml's functions: no test machine has a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from horizon_server.telemetry.gpus import EVERY_S, SILENT_S, GpuFigures, GpuWatch


class Driver:
    """Two GPUs: an H100 that tells everything, and a card that tells only what every card does."""

    lost: int | None = None

    def __init__(self) -> None:
        self.hangs = threading.Event()
        self.hangs.set()

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.hangs.wait(240)
        if index == self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return ("NVIDIA H100 80GB HBM3", "GeForce")[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=5 << 30, total=80 << 30)

    def __getattr__(self, name: str) -> Any:
        """What else there is of pynvml, for the first GPU only."""
        assert hasattr(pynvml, name), f"pynvml has no {name}"
        told = {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=20),
            "nvmlDeviceGetTemperature": 64,
            "nvmlDeviceGetTemperatureThreshold": 90,
            "nvmlDeviceGetPowerUsage": 612_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x20 | 0x1,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetTotalEccErrors": 2,
        }

        def call(handle: int, *arguments: int) -> Any:
            if handle == 1:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            if name == "nvmlDeviceGetPcieThroughput":
                return {pynvml.NVML_PCIE_UTIL_RX_BYTES: 24_000_000, pynvml.NVML_PCIE_UTIL_TX_BYTES: 12_000_000}[
                    arguments[0]
                ]
            return told[name]

        return call


@pytest.fixture
def driver() -> Driver:
    return Driver()


def _watch(driver: Driver, now: list[float]) -> GpuWatch:
    watch = GpuWatch(driver, clock=lambda: now[0])
    watch.find()
    watch.read()
    return watch


def test_every_figure_is_in_base_units_and_from_the_side_of_the_host(driver: Driver) -> None:
    h100, card = _watch(driver, [0.0]).figures()
    assert h100 == GpuFigures(
        device="cuda:0",
        name="NVIDIA H100 80GB HBM3",
        utilization=0.87,
        memory_used_bytes=5 << 30,
        memory_total_bytes=80 << 30,
        temperature_celsius=64,
        temperature_limit_celsius=90,
        power_watts=612.5,
        power_limit_watts=700.0,
        sm_clock_hertz=1.98e9,
        slowed=1,
        pcie_bytes_per_second={"h2d": 24e9, "d2h": 12e9},
        pcie_link_width=8,
        pcie_link_max_width=16,
        memory_errors=2,
    )
    assert card == GpuFigures(
        device="cuda:1", name="GeForce", memory_used_bytes=5 << 30, memory_total_bytes=80 << 30
    ), "what a card does not tell is absent, not 0"


def test_a_gpu_that_fell_off_the_bus_is_down_and_the_others_go_on(driver: Driver) -> None:
    watch = _watch(driver, [0.0])
    driver.lost = 0
    watch.read()
    assert [(gpu.device, gpu.name, gpu.up) for gpu in watch.figures()] == [
        ("cuda:0", "NVIDIA H100 80GB HBM3", 0),
        ("cuda:1", "GeForce", 1),
    ]
    assert watch.figures()[0].memory_used_bytes is None
    driver.lost = None
    watch.read()
    assert watch.figures()[0].utilization == 0.87


def test_a_driver_that_hangs_holds_nobody_up_and_shows_as_silent(driver: Driver) -> None:
    now = [0.0]
    watch = _watch(driver, now)
    driver.hangs.clear()
    reading = threading.Thread(target=watch.read, daemon=True)
    reading.start()
    now[0] = SILENT_S
    assert watch.figures()[0].up == 1
    now[0] = SILENT_S + 1
    assert [gpu.up for gpu in watch.figures()] == [0, 0]
    assert watch.figures()[0].utilization is None
    driver.hangs.set()
    reading.join(240)
    assert watch.figures()[0].up == 1, "it answers again"


def test_it_reads_in_a_thread_of_its_own_until_it_is_closed(driver: Driver) -> None:
    read = threading.Event()
    watch = GpuWatch(driver)
    read_once = watch.read

    def read_and_tell() -> None:
        read_once()
        read.set()

    watch.read = read_and_tell  # type: ignore[method-assign]
    watch.start()
    assert read.wait(240)
    watch.close()
    assert [gpu.device for gpu in watch.figures()] == ["cuda:0", "cuda:1"]
    assert SILENT_S > 2 * EVERY_S, "one slow reading is no silence"


def test_without_a_driver_there_are_no_figures() -> None:
    class NoDriver:
        def nvmlInit(self) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    watch = GpuWatch(NoDriver())
    watch._run()
    assert watch.figures() == ()
