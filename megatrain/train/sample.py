"""Text from a model under training, token by token.

`draw_ids` needs no more than a function from the ids so far to the logits of the next one, which the engine has as
`next_logits`. It draws with a generator of its own, so that a sample neither depends on training's randomness nor
disturbs it. Left out: several samples at once, and a cache of keys and values: each token is a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NextLogits = Callable[[Tensor], Tensor]
"""From int64[1, length] to float32[vocabulary], the logits of the token that follows."""


def draw_ids(
    next_logits: NextLogits,
    prompt: Sequence[int],
    *,
    tokens: int,
    allowed: int,
    stop_id: int | None,
    context: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[int]:
    """Up to `tokens` ids that follow `prompt` (one id or more), without `stop_id`, which ends them.

    allowed: only ids below it are drawn, for a model may have more logits than its tokenizer has tokens. context: the
    model sees that many last ids at most. temperature: 0 takes the likeliest. top_k: draw among so many likeliest; 0 is
    all.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(tokens):
        seen = ids if context is None else ids[-context:]
        logits = next_logits(torch.tensor([seen], dtype=torch.int64)).float().cpu()[:allowed]
        drawn = draw_id(logits, temperature=temperature, top_k=top_k, generator=generator)
        if drawn == stop_id:
            break
        ids.append(drawn)
    return ids[len(prompt) :]


def draw_id(logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id from float32[vocabulary] logits."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        values, ids = logits.topk(top_k)
    else:
        values, ids = logits, torch.arange(len(logits))
    chances = torch.softmax(values / temperature, dim=0)
    return int(ids[torch.multinomial(chances, 1, generator=generator)])


def printable(text: str) -> str:
    """`text` with control characters, which could steer a terminal, replaced; line breaks and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
