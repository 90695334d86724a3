"""Modelled cost curves of devices that were not measured, each a simple roofline.

T(n) = bytes of the weights / read bandwidth + n * parameters / rate of int8 multiply-adds + a fixed cost. The two times
are added, as if nothing overlapped. Bandwidths are those that CPU cores get from such memory in published tests, or
three quarters of what a GPU's memory is sold with; rates are half of the peak of the cores' dot-product units, and a
tenth to a fifth of what GPUs are sold with. On CUDA, a forward like the one before it is replayed as a graph; any other
is launched kernel by kernel, which took one to three milliseconds on the processor of an H100, and is taken to be two
to four on smaller ones. All of these are guesses to plan with: `edgedec bench --curve-out` measures a real curve on the
device.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """The figures of a device that its cost curve needs.

    Attributes:
        bandwidth: Bytes per second that all used cores read from memory.
        rate: Multiply-adds of 8-bit numbers per second.
        fixed_s: Further seconds of every forward.
        launch_s: Further seconds of a forward that is no plain step after a plain step.
        basis: The hardware that the figures are for.
    """

    bandwidth: float
    rate: float
    fixed_s: float
    basis: str
    launch_s: float = 0.0


DEVICES = {
    "raspberry-pi-4": Device(4e9, 35e9, 0.002, "LPDDR4-3200 x32; 4 Cortex-A72 at 1.5 GHz, no dot product"),
    "raspberry-pi-5": Device(9e9, 150e9, 0.001, "LPDDR4X-4267 x32; 4 Cortex-A76 at 2.4 GHz, dot product"),
    "jetson-orin-nano": Device(30e9, 140e9, 0.001, "LPDDR5 x128, its CPU's share; 6 Cortex-A78AE at 1.5 GHz"),
    "phone": Device(25e9, 250e9, 0.001, "LPDDR5X x64; one large and three middle cores of a 2023 phone"),
    "laptop-avx2": Device(40e9, 250e9, 0.0005, "DDR5-5600, two channels; 4 cores at 4 GHz, AVX2"),
    "laptop-avx512": Device(60e9, 900e9, 0.0005, "LPDDR5X-7500; 4 cores at 4.5 GHz, AVX-512 VNNI"),
    "jetson-orin-nano-gpu": Device(50e9, 2e12, 0.002, "LPDDR5 x128; Ampere, 1024 CUDA cores, CUDA graphs", 0.004),
    "rtx-4060-laptop": Device(190e9, 8e12, 0.001, "GDDR6 x128 at 16 Gb/s; Ada, 3072 CUDA cores, CUDA graphs", 0.002),
    "radeon-780m": Device(65e9, 2e12, 0.003, "DDR5-5600, two channels; 12 RDNA 3 units, Vulkan: no graphs"),
    "arc-140v": Device(100e9, 5e12, 0.003, "LPDDR5X-8533 x128; 8 Xe2 cores, Vulkan: no graphs"),
}


def modelled(device: Device, n_bytes: int, n_params: int) -> Callable[[int], float]:
    """Return T(n) in seconds for a model with so many bytes and parameters; T(1) is that after another T(1)."""
    read_s = n_bytes / device.bandwidth + device.fixed_s
    return lambda n: read_s + n * n_params / device.rate + (device.launch_s if n > 1 else 0.0)
