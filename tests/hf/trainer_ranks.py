"""One rank of a trainer's script, as `torchrun` starts it: the stock run and ours, one after the other.

`torchrun -m tests.hf.trainer_ranks CASE FOLDER` leaves in `FOLDER/CASE-RANK.json` what each has logged and called.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from megatrain.errors import ConfigError
from megatrain.hf import StreamedTrainer
from tests.hf import test_trainer
from tests.tiny import tiny_model


def trainer(folder: Path) -> dict[str, Any]:
    """Accumulation over an uneven epoch, clipping, cosine, evaluation and checkpoints; ours is then resumed."""
    changes: dict[str, Any] = {"more": {"compute_metrics": right_guesses}}
    found = {}
    for kind in (Trainer, StreamedTrainer):
        made, seen = test_trainer.run(kind, folder / kind.__name__, **changes)
        found[kind.__name__] = {"history": made.state.log_history, "calls": seen.calls}
    half = str(folder / "StreamedTrainer" / "checkpoint-5")
    made, _ = test_trainer.run(StreamedTrainer, folder / "again", resume=half, **changes)
    found["again"] = {"history": made.state.log_history, "calls": []}
    return found


def right_guesses(predicted: Any) -> dict[str, float]:
    """Of the predictions of all ranks."""
    right = predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]
    return {"right": float(right.mean()), "count": right.size}


def sft(folder: Path) -> dict[str, Any]:
    """TRL's, of a mixture of experts: what it logs besides, and the auxiliary loss."""
    from tests.hf import test_sft

    found = {}
    for streams, name in ((False, "Trainer"), (True, "StreamedTrainer")):
        made = test_sft.script(folder / name, streams, "mixtral", max_steps=6, gradient_accumulation_steps=1)
        found[name] = {"history": made.state.log_history, "calls": []}
    return found


def apart(folder: Path) -> dict[str, Any]:
    """Weights are written to on one rank alone."""
    model = tiny_model()
    trainer = StreamedTrainer(
        model=model,
        args=test_trainer.arguments(folder, max_steps=2, eval_strategy="no", save_strategy="no"),
        train_dataset=test_trainer.rows(8, 1),
        **test_trainer.QUICK,
    )
    trainer.train()
    norm = model.model.norm.weight
    assert norm.isfinite().all()  # reading is for all
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            norm.zero_()
    with pytest.raises(ConfigError, match="have not been changed in the same way on all ranks"):
        trainer.train()
    return {}


def main(case: str, folder: str) -> None:
    found = CASES[case](Path(folder))
    rank = torch.distributed.get_rank()
    (Path(folder) / f"{case}-{rank}.json").write_text(json.dumps(found))


CASES = {"trainer": trainer, "sft": sft, "apart": apart}

if __name__ == "__main__":
    main(*sys.argv[1:])
