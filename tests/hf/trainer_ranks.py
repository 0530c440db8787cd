"""One rank of a trainer script under `torchrun`: the stock run, then the streamed one.

`torchrun -m tests.hf.trainer_ranks CASE FOLDER` writes logs and callback calls of both to `FOLDER/CASE-RANK.json`.
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
    """Accumulation over an uneven epoch, clipping, cosine, evaluation, checkpoints; then a resumed streamed run."""
    changes: dict[str, Any] = {"more": {"compute_metrics": accuracy}}
    found = {}
    for kind in (Trainer, StreamedTrainer):
        made, seen = test_trainer.run(kind, folder / kind.__name__, **changes)
        found[kind.__name__] = {"history": made.state.log_history, "calls": seen.calls}
    half = str(folder / "StreamedTrainer" / "checkpoint-5")
    made, _ = test_trainer.run(StreamedTrainer, folder / "again", resume=half, **changes)
    found["again"] = {"history": made.state.log_history, "calls": []}
    return found


def accuracy(predicted: Any) -> dict[str, float]:
    """Over the predictions of all ranks."""
    right = predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]
    return {"right": float(right.mean()), "count": right.size}


def sft(folder: Path) -> dict[str, Any]:
    """TRL's trainer with a mixture of experts: its metrics and the auxiliary loss."""
    from tests.hf import test_sft

    found = {}
    for streams, name in ((False, "Trainer"), (True, "StreamedTrainer")):
        made = test_sft.script(folder / name, streams, "mixtral", max_steps=6, gradient_accumulation_steps=1)
        found[name] = {"history": made.state.log_history, "calls": []}
    return found


def changed_on_one_rank(folder: Path) -> dict[str, Any]:
    """Weights are changed on one rank only."""
    model = tiny_model()
    trainer = StreamedTrainer(
        model=model,
        args=test_trainer.arguments(folder, max_steps=2, eval_strategy="no", save_strategy="no"),
        train_dataset=test_trainer.rows(8, 1),
        **test_trainer.QUICK,
    )
    trainer.train()
    norm = model.model.norm.weight
    assert norm.isfinite().all()  # all ranks must read
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


CASES = {"trainer": trainer, "sft": sft, "changed_on_one_rank": changed_on_one_rank}

if __name__ == "__main__":
    main(*sys.argv[1:])
