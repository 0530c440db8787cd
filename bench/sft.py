"""Does fine-tuning teach what it should? Arithmetic in words, by a model that the quickstart has trained on Python.

    make quickstart
    python -m bench.sft [--model runs/quickstart/model] [--json FILE]

Questions are sums of two numbers in words ("forty two plus thirty five"), put as chats in several phrasings; answers
are words as well. No pair of numbers that is asked in the end was trained on, so the model must have learned to add
tens and units, not the answers by heart. Answers are drawn greedily and must be equal to the letter.

The claim: from under 5% before to over 90% after, on two cores in a few minutes, through `megatrain train`'s own code.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from megatrain.config import load_config
from megatrain.data.encode import EncodeOptions, Encoder
from megatrain.data.tokenizer import load_tokenizer
from megatrain.run.training import run_training
from megatrain.train.engine import Engine

UNITS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TENS = ("", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
PHRASINGS = ("What is {} plus {}?", "Add {} and {}.", "{} and {} make?")
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
ASKED = 200

RECIPE = """
model: {{path: {model}}}
data:
  sources: {data}
  chat_template: {template}
  tokenizer: bytes
  packing: best_fit
  sequence_length: 256
  validation_fraction: 0
  cache: {cache}
train:
  precision: fp32
  steps: {steps}
  micro_batch_size: 4
  learning_rate: 1e-3
  warmup_steps: 20
  weight_decay: 0.0
  sample_tokens: 0
  log_every: 50
  eval_every: 0
checkpoint: {{every: 0}}
output: {{folder: {folder}, trackers: [], verify_export: false}}
"""


def words(number: int) -> str:
    """A number of two digits, its tens and units each a word."""
    return f"{TENS[number // 10]} {UNITS[number % 10]}"


def pairs() -> list[tuple[int, int]]:
    """Numbers from 21 on without a zero, whose tens and units add up to nine at most."""
    numbers = [number for number in range(20, 100) if number % 10]
    return [(a, b) for a in numbers for b in numbers if a % 10 + b % 10 < 10 and a // 10 + b // 10 < 10]


def chats(chosen: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Each pair in each phrasing."""
    for a, b in chosen:
        for phrasing in PHRASINGS:
            yield {
                "messages": [
                    {"role": "user", "content": phrasing.format(words(a), words(b))},
                    {"role": "assistant", "content": words(a + b)},
                ]
            }


def exact_match(model: Path, asked: list[dict[str, Any]], template: Path) -> float:
    """The share of answers that are equal to the letter, 0 to 1."""
    import torch

    tokenizer = load_tokenizer("bytes")
    encoder = Encoder(tokenizer, EncodeOptions(template=str(template)))
    right = 0
    with Engine.from_pretrained(str(model), device="cpu", precision="fp32") as engine:
        for sample in asked:
            question, answer = (message["content"] for message in sample["messages"])
            ids = torch.tensor([encoder.prompt_ids(question)])
            drawn = engine.generate(ids, max_new_tokens=len(answer) + 4, do_sample=False)[0, ids.shape[1] :].tolist()
            said = drawn[: drawn.index(256)] if 256 in drawn else drawn
            right += bytes(token for token in said if token < 256).decode(errors="replace") == answer
    return right / len(asked)


def measure(model: Path, steps: int, asked: int = ASKED, seed: int = 0) -> dict[str, float]:
    """Exact match before and after, and the seconds of training."""
    every = pairs()
    random.Random(seed).shuffle(every)
    held_out, trained = every[: len(every) // 10], every[len(every) // 10 :]
    questions = list(chats(held_out))
    random.Random(seed).shuffle(questions)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "data.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats(trained)))
        (folder / "template.jinja").write_text(TEMPLATE)
        places = {"data": folder / "data.jsonl", "template": folder / "template.jinja", "cache": folder / "cache"}
        (folder / "sft.yaml").write_text(RECIPE.format(model=model, steps=steps, folder=folder / "run", **places))
        before = exact_match(model, questions[: asked // 4], places["template"])
        began = time.perf_counter()
        run_training(load_config(folder / "sft.yaml"), Console(file=io.StringIO()))
        seconds = time.perf_counter() - began
        after = exact_match(folder / "run" / "model", questions[:asked], places["template"])
    return {"before": before, "after": after, "seconds": seconds, "trained": len(trained), "held_out": len(held_out)}


def main() -> None:
    parser = argparse.ArgumentParser(description="fine-tuning on arithmetic in words")
    parser.add_argument("--model", type=Path, default=Path("runs/quickstart/model"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.model.resolve(), arguments.steps)
    print(f"exact match on {found['held_out']:.0f} pairs that were not trained: ", end="")
    print(f"{found['before']:.1%} before, {found['after']:.1%} after {found['seconds']:.0f} s of training")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
