"""Owns all memory: the ledger counts bytes, the pool leases buffers to ops, units have their state, the disk tier
swaps."""

from megatrain.memory.disk import Disk
from megatrain.memory.ledger import Ledger
from megatrain.memory.pool import Lease, LeasedBuffers, Pool
from megatrain.memory.shared_memory import SharedMemory
from megatrain.memory.store import Store
from megatrain.memory.unit_state import PARTS, UnitState

__all__ = ["PARTS", "Disk", "Lease", "LeasedBuffers", "Ledger", "Pool", "SharedMemory", "Store", "UnitState"]
