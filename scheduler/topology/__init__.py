"""What links the GPUs of a machine: from NVML, from `nvidia-smi topo -m`, and what each link can carry.

Pure: `parse` (matrix.py), `links`, `bandwidth`, `fabric`. Acting: `nvml`, `sysfs`, `discover`, `command`.
"""

from scheduler.topology.matrix import parse
from scheduler.topology.topology import Gpu, PcieLink, Topology, TopologyRefused

__all__ = ["Gpu", "PcieLink", "Topology", "TopologyRefused", "parse"]
