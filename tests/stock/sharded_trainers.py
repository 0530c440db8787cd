"""Trains a tiny model on two ranks with DeepSpeed's ZeRO-3 or PyTorch's FSDP2, and saves a checkpoint on the way.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.stock.sharded_trainers zero3|fsdp2 FOLDER

FOLDER then holds the checkpoint after `DONE` steps in `there/`, and the losses and weights of all steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from tests.stock.test_peer_checkpoints import CLIP, DONE, batches, peer
from tests.tiny import tiny_model


def zero3(model: Any, folder: Path) -> tuple[list[float], dict[str, Any]]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "sub_group_size": 5000, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=peer(model), config=config)
    losses = []
    for number, batch in enumerate(batches()):
        if number == DONE:
            engine.save_checkpoint(str(folder / "there"))
        loss = engine(**{key: each[dist.get_rank()][None] for key, each in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return losses, {name: each.detach().clone() for name, each in model.named_parameters()}


def fsdp2(model: Any, folder: Path) -> tuple[list[float], dict[str, Any]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    optimizer, losses = peer(model), []
    for number, batch in enumerate(batches()):
        if number == DONE:  # as accelerate's save_fsdp_model and save_fsdp_optimizer
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "there" / "pytorch_model_fsdp_0")
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder / "there" / "optimizer_0")
        optimizer.zero_grad()
        loss = model(**{key: each[dist.get_rank()][None] for key, each in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(mean(loss))
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def mean(loss: torch.Tensor) -> float:
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    family = "llama-tied" if kind == "fsdp2" else "llama"
    losses, weights = {"zero3": zero3, "fsdp2": fsdp2}[kind](tiny_model(family), folder)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
        torch.save(weights, folder / "weights.pt")
        tiny_model(family).config.save_pretrained(folder / "there")
    dist.barrier()
    dist.destroy_process_group()
