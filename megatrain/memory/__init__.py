"""Owns all memory: the ledger counts bytes, the pool leases buffers to ops, units have their state, the disk tier
swaps."""

from megatrain.memory.disk import Disk
from megatrain.memory.ledger import Ledger
from megatrain.memory.pool import Lease, Leased, Pool
from megatrain.memory.shared_memory import SharedMemory
from megatrain.memory.store import Store
from megatrain.memory.unit_state import PARTS, UnitState

__all__ = ["PARTS", "Disk", "Lease", "Leased", "Ledger", "Pool", "SharedMemory", "Store", "UnitState"]
