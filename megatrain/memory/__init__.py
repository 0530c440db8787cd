"""Who holds which byte: the ledger, the pool of buffers behind leases, the disk, and the store of the state."""

from megatrain.memory.disk import Disk
from megatrain.memory.ledger import Ledger
from megatrain.memory.pool import Held, Pool
from megatrain.memory.shared_memory import SharedMemory
from megatrain.memory.store import PARTS, Store, UnitState, unit_state

__all__ = ["PARTS", "Disk", "Held", "Ledger", "Pool", "SharedMemory", "Store", "UnitState", "unit_state"]
