"""Several ranks that train one model: the messages and collectives between them.

`world` is the interface for the rest of MegaTrain; `processes` implements it with torch.distributed, which only
this room imports. Knows nothing of models and steps.
"""

from megatrain.dist.world import ALONE, Collectives, World

__all__ = ["ALONE", "Collectives", "World"]
