"""Several ranks that train one model: what they tell each other, and what they compute together.

`world` is what the rest of MegaTrain knows of it; `processes` carries it with torch.distributed, whose only home this
room is. It knows nothing of models and steps.
"""

from megatrain.dist.world import ALONE, Collectives, World

__all__ = ["ALONE", "Collectives", "World"]
