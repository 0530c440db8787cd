"""Runs tasks of EleutherAI's lm_eval on the model during training, every so many steps and at the end.

The harness provides tasks, few-shot prompts and scores. The class here implements its model interface on the streaming
engine: log-likelihood of a continuation (and whether it is the greedy one), log-likelihood of a text, and generation.
lm_eval is optional (`pip install megatrain[eval]`) and imported only if `lm_eval.tasks` is set.

All ranks ask the same questions, so each has all answers. Chat templates for prompts are not supported.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.config import LmEvalSection
from megatrain.data.tokenizer import Tokenizer, encode_text, end_of_text_id
from megatrain.engine import LogitsLoss
from megatrain.errors import ConfigError, MegaTrainError, first_line, typed_line
from megatrain.run.sampling import Sampling, draw_ids
from megatrain.train.engine import Engine
from megatrain.train.events import Scored

UNLIMITED = 1 << 20
"""Longest context for a model without a maximum number of positions."""
NEW_TOKENS = 256
"""Default number of generated tokens, as in the harness."""


class Scoring(NamedTuple):
    """A continuation to score, and its context; both non-empty token ids."""

    context: list[int]
    continuation: list[int]


class _Keeps(LogitsLoss):
    """Records, instead of a loss, each target token's log-probability and whether it is the most likely token."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, logits: Tensor, labels: Tensor, **arguments: Tensor) -> Tensor:
        said = logits.log_softmax(dim=-1).gather(1, labels[:, None])[:, 0]
        self.found.append(torch.stack([said, (logits.argmax(dim=-1) == labels).to(said)]).cpu())
        return logits.new_zeros(())


def score(engine: Engine, asked: Sequence[Scoring], rows: int, tokens: int) -> list[tuple[float, bool]]:
    """Each continuation's summed log-probability, and whether all its tokens are the most likely ones.

    Batches hold similar lengths, at most `rows` rows and about `tokens` tokens. Text beyond the model's positions is
    truncated at its beginning.
    """
    most = engine.parts.ported.spec.max_positions or UNLIMITED
    order = sorted(range(len(asked)), key=lambda at: -len(asked[at].context) - len(asked[at].continuation))
    results: list[tuple[float, bool]] = [(0.0, True)] * len(asked)
    while order:
        longest = min(most, len(asked[order[0]].context) + len(asked[order[0]].continuation))
        count = max(1, min(rows, tokens // longest))
        chosen, order = order[:count], order[count:]
        keeps = _Keeps()
        batch, targets = _batch([asked[at] for at in chosen], longest)
        engine.measure([batch], keeps)
        said = torch.cat(keeps.found, dim=1).split(targets, dim=1)
        for at, row in zip(chosen, said, strict=True):
            results[at] = float(row[0].double().sum()), bool(row[1].bool().all())
    return results


def _batch(asked: Sequence[Scoring], longest: int) -> tuple[dict[str, Tensor], list[int]]:
    """A right-padded batch with the continuations as targets, and the number of targets of each row."""
    ids = torch.zeros(len(asked), longest, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    targets = []
    for row, scoring in enumerate(asked):
        whole = torch.tensor([*scoring.context, *scoring.continuation][-longest:])
        count = min(len(scoring.continuation), len(whole) - 1)
        ids[row, : len(whole)], mask[row, : len(whole)] = whole, 1
        labels[row, len(whole) - count : len(whole)] = whole[len(whole) - count :]
        targets.append(count)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}, targets


@contextlib.contextmanager
def _harness_errors() -> Iterator[None]:
    """Hide the harness's progress bars, and turn what it or its data sets raise, which may be anything, into
    `ConfigError`."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except MegaTrainError:
        raise
    except Exception as error:
        what = f"failed ({typed_line(error)})"
        raise ConfigError(what, where="lm_eval", fix="try the task with `lm_eval` itself, or leave it out") from error


class Tasks:
    """The configured lm_eval tasks, with their questions looked up at the start of a run.

    Raises `ConfigError` if lm_eval is not installed, does not know a task or cannot load its questions.
    """

    def __init__(self, section: LmEvalSection) -> None:
        self.section = section
        try:
            self._harness: Any = importlib.import_module("lm_eval.evaluator")
            self._models = importlib.import_module("lm_eval.api.model")
            self._lengths = importlib.import_module("lm_eval.utils")
            manager: Any = importlib.import_module("lm_eval.tasks")
        except ImportError as error:
            what = f"lm_eval cannot be imported ({first_line(error)})"
            raise ConfigError(what, where="lm_eval", fix="pip install megatrain[eval], or leave it out") from error
        self._manager = manager.TaskManager(include_path=section.folder)
        known = set(self._manager.all_tasks)
        for name in section.tasks:
            if name not in known:
                fix = "name one that `lm_eval ls tasks` lists, or of a YAML file in lm_eval.folder"
                raise ConfigError(f"there is no task {name!r}", where="lm_eval.tasks", fix=fix)
        vars(self._harness)["get_git_commit_hash"] = str  # or git complains on the screen of a run outside a repository
        with _harness_errors():
            load = getattr(self._manager, "load", None) or self._manager.load_task_or_group  # its older name
            load(list(section.tasks))

    def run(self, step: int, engine: Engine, tokenizer: Tokenizer, rows: int, tokens: int) -> Scored:
        """Evaluate the model; scores are named `task/metric`. Errors of the harness become `ConfigError`."""
        model = self._model(engine, tokenizer, rows, tokens)
        options: dict[str, Any] = {"limit": self.section.limit, "num_fewshot": self.section.num_fewshot}
        # keep the run's random state
        options |= dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
        with _harness_errors():
            scores = self._harness.simple_evaluate(
                model=model, tasks=list(self.section.tasks), task_manager=self._manager, bootstrap_iters=0, **options
            )
        return Scored(step, dict(_flat(scores["results"])))

    def _model(self, engine: Engine, tokenizer: Tokenizer, rows: int, tokens: int) -> Any:
        lengths, most = self._lengths, engine.parts.ported.spec.max_positions or UNLIMITED
        start = end_of_text_id(tokenizer) if tokenizer.bos_token_id is None else tokenizer.bos_token_id

        class Streamed(self._models.TemplateLM):  # type: ignore[misc, name-defined]  # known when it is imported
            eot_token_id = end_of_text_id(tokenizer)
            prefix_token_id = start
            tokenizer_name = ""

            def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
                return [int(token) for token in encode_text(tokenizer, string)]

            def _loglikelihood_tokens(self, requests: Any, **_: object) -> list[tuple[float, bool]]:
                return score(engine, [Scoring(context, rest) for _, context, rest in requests], rows, tokens)

            def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
                return [self._rolled(request.args[0]) for request in requests]

            def _rolled(self, text: str) -> float:
                windows = lengths.get_rolling_token_windows(
                    token_list=self.tok_encode(text), prefix_token=start, max_seq_len=most - 1, context_len=1
                )
                parts = [Scoring(*lengths.make_disjoint_window(window)) for window in windows]
                return sum(said for said, _ in score(engine, parts, rows, tokens))

            def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
                return [_continued(engine, tokenizer, *request.args) for request in requests]

        return Streamed()


def _continued(engine: Engine, tokenizer: Tokenizer, context: str, options: Mapping[str, Any]) -> str:
    """Text generated after `context`, up to the first of `until`."""
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    count = int(options.get("max_gen_toks", NEW_TOKENS))
    room = max(1, (engine.parts.ported.spec.max_positions or UNLIMITED) - count)
    ids = [int(token) for token in encode_text(tokenizer, context)][-room:] or [end_of_text_id(tokenizer)]
    heat = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
    drawn = draw_ids(engine, tokenizer, ids, Sampling(count, heat))
    text = str(tokenizer.decode(drawn, skip_special_tokens=True))
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _flat(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Scores as (`task/metric`, value): `acc` for `acc,none`, without standard errors and non-numbers."""
    for task, numbers in results.items():
        for key, value in numbers.items():
            name, _, chosen = key.partition(",")
            if isinstance(value, int | float) and not name.endswith("_stderr") and name != "sample_len":
                yield f"{task}/{name}" + (f" {chosen}" if chosen not in ("", "none") else ""), float(value)
