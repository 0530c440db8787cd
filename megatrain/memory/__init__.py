"""Who holds which byte: the ledger, the pool of buffers behind leases, and the store of the training state."""

from megatrain.memory.ledger import Ledger
from megatrain.memory.pool import Held, Pool
from megatrain.memory.store import Store, UnitState

__all__ = ["Held", "Ledger", "Pool", "Store", "UnitState"]
