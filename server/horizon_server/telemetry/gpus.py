"""What the NVIDIA driver says of the GPUs, read at regular times in a thread of its own.

Each figure declares its metric, as those of a step do. No figure needs torch or a process on the GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import pynvml

from horizon_server.figures import Metric

EVERY_S = 5.0
"""How often the GPUs are read. The slowest figure, PCIe traffic, keeps the driver busy for 40 ms."""
SILENT_S = 30.0
"""A GPU that was not read for so long counts as one that does not answer: the driver hangs."""

_GPU = ("device",)
# Hardware slowdown, thermal slowdown by software and by hardware, and the brake of the power supply.
_SLOWED = 0x08 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """One GPU at one moment. None is what this GPU or its driver does not tell.

    `device` is cuda:N with the driver's number, as in the other metrics.
    """

    device: str
    name: str
    up: Annotated[int, Metric("horizon_gpu_up", "1 while the driver answers for the GPU, else 0.", _GPU)] = 1
    utilization: Annotated[
        float | None,
        Metric("horizon_gpu_utilization_ratio", "Share of the last moment in which a kernel ran, 0 to 1.", _GPU),
    ] = None
    memory_used_bytes: Annotated[
        int | None, Metric("horizon_gpu_memory_used_bytes", "Memory of the GPU in use by all processes.", _GPU)
    ] = None
    memory_total_bytes: Annotated[int | None, Metric("horizon_gpu_memory_total_bytes", "Memory of the GPU.", _GPU)] = (
        None
    )
    temperature_celsius: Annotated[
        int | None, Metric("horizon_gpu_temperature_celsius", "Temperature of the GPU.", _GPU)
    ] = None
    temperature_limit_celsius: Annotated[
        int | None,
        Metric("horizon_gpu_temperature_limit_celsius", "Temperature at which the GPU slows itself down.", _GPU),
    ] = None
    power_watts: Annotated[float | None, Metric("horizon_gpu_power_watts", "Power that the GPU draws.", _GPU)] = None
    power_limit_watts: Annotated[
        float | None, Metric("horizon_gpu_power_limit_watts", "Power that the GPU may draw.", _GPU)
    ] = None
    sm_clock_hertz: Annotated[
        float | None, Metric("horizon_gpu_sm_clock_hertz", "Clock of the GPU's multiprocessors.", _GPU)
    ] = None
    slowed: Annotated[
        int | None, Metric("horizon_gpu_slowed", "1 while heat or the power supply slows the GPU down.", _GPU)
    ] = None
    pcie_bytes_per_second: Annotated[
        dict[str, float],
        Metric(
            "horizon_gpu_pcie_bytes_per_second",
            "PCIe traffic of the GPU over the last 20 ms, of all processes.",
            ("device", "direction"),
        ),
    ] = field(default_factory=dict)
    pcie_link_width: Annotated[int | None, Metric("horizon_gpu_pcie_link_width", "PCIe lanes in use now.", _GPU)] = None
    pcie_link_max_width: Annotated[
        int | None, Metric("horizon_gpu_pcie_link_max_width", "PCIe lanes that GPU and slot could use.", _GPU)
    ] = None
    memory_errors: Annotated[
        int | None,
        Metric(
            "horizon_gpu_memory_errors",
            "Errors of the GPU's memory that ECC could not correct, since the driver was loaded.",
            _GPU,
        ),
    ] = None

    @property
    def silent(self) -> GpuFigures:
        """The same GPU, which does not answer."""
        return GpuFigures(device=self.device, name=self.name, up=0)


class GpuWatch:
    """Reads all GPUs every few seconds. Thread: `figures` from any thread; the driver is called in one of its own, so
    that one that hangs holds nobody up, and not the end of the process either.

    Args:
        nvml: the driver's interface; a port for tests.
        clock: seconds; a port for tests.
    """

    def __init__(self, nvml: Any = pynvml, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._ended = threading.Event()
        self._newest: tuple[float, tuple[GpuFigures, ...]] = (clock(), ())

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def close(self) -> None:
        """Read no more; does not wait for the driver."""
        self._ended.set()

    def figures(self) -> tuple[GpuFigures, ...]:
        """Return the newest figures; of a driver that has been silent for long, only which GPUs it had."""
        read_s, gpus = self._newest
        return gpus if self._clock() - read_s <= SILENT_S else tuple(gpu.silent for gpu in gpus)

    def read(self) -> None:
        """Read every GPU once. Blocking."""
        gpus = tuple(self._read(gpu) for gpu in self._newest[1])
        self._newest = self._clock(), gpus

    def find(self) -> None:
        """Find the GPUs that there are. Blocking. Raises NVMLError."""
        numbers = range(self._nvml.nvmlDeviceGetCount())
        handles = ((number, self._nvml.nvmlDeviceGetHandleByIndex(number)) for number in numbers)
        gpus = (GpuFigures(device=f"cuda:{number}", name=self._nvml.nvmlDeviceGetName(h)) for number, h in handles)
        self._newest = self._clock(), tuple(gpus)

    def _run(self) -> None:
        try:
            self._nvml.nvmlInit()
            self.find()
        except pynvml.NVMLError:  # no driver: there is nothing to read
            return
        while True:
            self.read()
            if self._ended.wait(EVERY_S):
                return

    def _read(self, gpu: GpuFigures) -> GpuFigures:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu.device.removeprefix("cuda:")))
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            figures = replace(gpu, up=1, memory_used_bytes=memory.used, memory_total_bytes=memory.total)
        except pynvml.NVMLError:  # it has fallen off the bus, or the driver is broken
            return gpu.silent

        def told(name: str, *arguments: int) -> Any:
            # Consumer cards and virtual ones do not tell everything.
            try:
                return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *arguments)
            except pynvml.NVMLError:
                return None

        rates, reasons = told("UtilizationRates"), told("CurrentClocksEventReasons")
        # The driver counts from the GPU's side: what it receives came from the host.
        traffic = {
            "h2d": _times(told("PcieThroughput", pynvml.NVML_PCIE_UTIL_RX_BYTES), 1e3),
            "d2h": _times(told("PcieThroughput", pynvml.NVML_PCIE_UTIL_TX_BYTES), 1e3),
        }
        return replace(
            figures,
            utilization=None if rates is None else rates.gpu / 100,
            temperature_celsius=told("Temperature", pynvml.NVML_TEMPERATURE_GPU),
            temperature_limit_celsius=told("TemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            power_watts=_times(told("PowerUsage"), 1e-3),
            power_limit_watts=_times(told("EnforcedPowerLimit"), 1e-3),
            sm_clock_hertz=_times(told("ClockInfo", pynvml.NVML_CLOCK_SM), 1e6),
            slowed=None if reasons is None else int(bool(reasons & _SLOWED)),
            pcie_bytes_per_second={way: rate for way, rate in traffic.items() if rate is not None},
            pcie_link_width=told("CurrPcieLinkWidth"),
            pcie_link_max_width=told("MaxPcieLinkWidth"),
            memory_errors=told("TotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
        )


def _times(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
