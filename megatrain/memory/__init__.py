"""Owns all memory: the ledger counts bytes, the pool leases buffers to ops, the store has the state, the disk tier
swaps."""

from megatrain.memory.disk import Disk
from megatrain.memory.ledger import Ledger
from megatrain.memory.pool import Lease, Pool
from megatrain.memory.shared_memory import SharedMemory
from megatrain.memory.store import PARTS, Store, unit_state

__all__ = ["PARTS", "Disk", "Lease", "Ledger", "Pool", "SharedMemory", "Store", "unit_state"]
