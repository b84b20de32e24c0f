"""GPUs to compile for: facts the compiler asks of a device, and devices made of them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from jaxinfer.platform import allocator_fraction
from jaxinfer.roofline.devices import DEVICES


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """One GPU model. Sizes in bytes, clock in GHz, bandwidth in bytes a second.

    `memory` is what a driver reports as usable, rounded down, not the number on the box.
    """

    name: str
    compute_capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock: float
    memory: int
    memory_bandwidth: int
    l2_cache: int
    shared_memory_per_core: int

    # The interface `memory_plan.plan_memory` reads of a device.
    platform = "cuda"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": int(self.memory * allocator_fraction())}

    @property
    def shared_memory_per_block(self) -> int:
        """A block that opts in gets all of a core's but 1 KiB."""
        return self.shared_memory_per_core - 1024

    def config(self) -> str:
        """XLA's target configuration, a text protocol buffer."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory_per_core}
              shared_memory_per_block_optin: {self.shared_memory_per_block}
              core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.memory_bandwidth} l2_cache_size: {self.l2_cache}
              clock_rate_ghz: {self.clock} device_memory_size: {self.memory}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 13 }}
            device_description_str: "{self.name}"
        """


def _target(
    name: str,
    compute_capability: tuple[int, int],
    cores: int,
    fpus_per_core: int,
    clock: float,
    l2_cache: int,
    shared_memory_per_core: int,
) -> GpuTarget:
    """What the compiler asks beside what `roofline.devices` knows of that device."""
    device = DEVICES[name]
    figures = (compute_capability, cores, fpus_per_core, clock)
    memory = (device.memory, int(device.memory_bandwidth), l2_cache, shared_memory_per_core)
    return GpuTarget(device.name, *figures, *memory)


TARGETS = {
    "h200": _target("h200", (9, 0), 132, 128, 1.98, 50 << 20, 228 << 10),
    "h100": _target("h100", (9, 0), 132, 128, 1.98, 50 << 20, 228 << 10),
    "b200": _target("b200", (10, 0), 148, 128, 1.965, 126 << 20, 228 << 10),
    "l40": _target("l40", (8, 9), 142, 128, 2.49, 96 << 20, 100 << 10),
    "a100": _target("a100", (8, 0), 108, 64, 1.41, 40 << 20, 164 << 10),
}


def devices(target: GpuTarget, count: int) -> list[jax.Device]:
    """`count` GPUs of one host to compile for; nothing can run on them.

    Raises RuntimeError saying what to install when the CUDA plugin is missing.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=target.config(),
            topology=f"1x1x{count}",  # partitions x hosts x devices a host
        )
    except Exception as error:
        raise RuntimeError(
            f"cannot compile for {target.name}: {error}; install the toolchain with "
            "pip install '.[gpu-check]' and set JAX_PLATFORMS=cpu"
        ) from error
    return list(topology.devices)


def environment() -> dict[str, str]:
    """Environment variables of a process that compiles for GPUs it does not have.

    JAX_PLATFORMS=cpu keeps the plugin from looking for a driver. Symbolising the stack traces that
    LLVM collects while it compiles would take ten times as long as compiling. A kernel that spills
    registers fails to compile. Programs come from the compiler, never from a cache.
    """
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_gpu_fail_ptx_compilation_on_register_spilling=true",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "LLVM_DISABLE_SYMBOLIZATION": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
