"""Runs a `transformers.Trainer`, or one of TRL's, on the streaming engine, by changing two lines of a script.

    from megatrain.hf import streamed
    trainer = streamed(SFTTrainer)(model=..., args=..., ...)

This needs `accelerate`, as every `Trainer` does, and `trl` for TRL's trainers; MegaTrain itself needs neither.
"""

from megatrain.hf.trainer import Streamed, StreamedTrainer, streamed

__all__ = ["Streamed", "StreamedTrainer", "streamed"]
