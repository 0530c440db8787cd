"""A `transformers.Trainer`, or one of TRL's, that trains through the streaming engine: two changed lines in a script.

    from megatrain.hf import streamed
    trainer = streamed(SFTTrainer)(model=..., args=..., ...)

It needs `accelerate`, as every `Trainer` does, and `trl` for its trainers; MegaTrain itself needs neither.
"""

from megatrain.hf.trainer import Streamed, StreamedTrainer, streamed

__all__ = ["Streamed", "StreamedTrainer", "streamed"]
