"""The streamed trainer: a `Trainer` whose forward, backward and update are one `Engine.step`.

The library keeps its loop, and with it data, callbacks, logging, evaluation, checkpoints and their rotation; only what
touches weights is replaced, by overriding methods that transformers 5.17 and 5.23 have alike. The micro-batches of an
optimizer step are collected by `training_step`, the last of which runs them all. The learning rate is the scheduler's.

Differences to know: a loss or gradient that is not finite raises `NonFinite` and nothing is applied; dropout draws
other numbers; a router auxiliary loss counts by each micro-batch's share of the target tokens; TRL's `entropy` and
`mean_token_accuracy` are means over the tokens of a step, and its `aux_loss` is not logged.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Trainer

from megatrain.checkpoint import open_checkpoint
from megatrain.engine import count_targets
from megatrain.engine.losses import own_entries
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatrain.hf.optimizer import EngineOptimizer
from megatrain.hf.refusals import refuse_arguments, refuse_class, refuse_keywords, refuse_model
from megatrain.hf.standin import StandIn
from megatrain.losses import LogitsLoss, LossFn, SmoothedCrossEntropy
from megatrain.model import PretrainedSource
from megatrain.optim import AdamW
from megatrain.spec import Precision
from megatrain.train.engine import Engine
from megatrain.train.options import EngineOptions

MODEL_ARGUMENTS = {"attn_implementation": "attention", "trust_remote_code": "trust_remote_code"}
"""Of TRL's `model_init_kwargs`, those that mean something for a model that streams, and what they are called here."""


class Streamed:
    """Put before a trainer's class, it trains through the engine; see `streamed`.

    model: as usual, or the folder or hub name of one, which is then never loaded whole. loss_fn: in place of
    cross-entropy, see `megatrain.losses`. engine_options: what `Engine.from_model` takes beyond what the training
    arguments say, such as `policy` and `disk`.

    Raises `ConfigError` and `ModelError`, before anything is allocated, for what cannot be honoured.
    """

    model: Any
    args: Any
    state: Any
    optimizer: Any
    accelerator: Any
    model_accepts_loss_kwargs: bool
    current_gradient_accumulation_steps: int

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *arguments: Any,
        loss_fn: LossFn | None = None,
        engine_options: EngineOptions | None = None,
        **keywords: Any,
    ) -> None:
        if arguments:
            fix = "name what follows model and args"
            raise ConfigError("takes two arguments without a name", where="StreamedTrainer", fix=fix)
        refuse_class(type(self))
        refuse_keywords(keywords)
        if args is not None:
            refuse_arguments(args)
        self.loss_fn, self._options = loss_fn, dict(engine_options or {})
        self._engine: Engine | None = None
        self._waiting: list[Mapping[str, Any]] = []
        self._norm: float | None = None
        self._saves_all = False
        """Whether what is saved is a checkpoint, with all of the engine's state."""
        self._folder = str(model) if isinstance(model, str | Path) else None
        if self._folder is not None:
            model = self._source(args).model
        super().__init__(model=model, args=args, **keywords)  # type: ignore[call-arg]  # the trainer's
        refuse_arguments(self.args)
        refuse_model(self.model)
        if not self.model_accepts_loss_kwargs:
            what = f"{type(self.model).__name__} takes no num_items_in_batch, so its loss is a mean of means"
            raise ConfigError(what, where="StreamedTrainer", fix="give loss_fn, see megatrain.losses")
        self._standin = StandIn(self.model, self._export)
        if not self._standin.loaded:
            self._standin.take()
        self.accelerator.device_placement = False  # nothing goes to the device but through the engine

    # The engine -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Made when it is first needed, from the weights that the model has then."""
        if self._engine is None:
            options = self._engine_options()
            self.model.train()  # its dropout works in training, and never in evaluation
            if self._folder is not None:
                source = self._source(self.args)
                source.model.train()
                for name, parameter in source.model.named_parameters():
                    parameter.requires_grad_(self.model.get_parameter(name).requires_grad)
                self._engine = Engine.from_source(source, **options)
            else:
                theirs = self.model.__dict__.pop("forward", None)  # TRL's, which the engine's copy must not have
                try:
                    self._engine = Engine.from_model(self.model, **options)
                finally:
                    if theirs is not None:
                        self.model.__dict__["forward"] = theirs
        return self._engine

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """It stays where it is: only what a layer needs goes to the device."""

    def _source(self, args: Any) -> PretrainedSource:
        given = dict(getattr(args, "model_init_kwargs", None) or {})
        given.pop("dtype", None), given.pop("torch_dtype", None)  # masters are float32; `bf16` says how it computes
        if refused := sorted(given.keys() - MODEL_ARGUMENTS.keys()):
            what = f"model_init_kwargs[{refused[0]!r}] cannot be honoured"
            raise ConfigError(what, where="StreamedTrainer", fix="leave it out")
        how = {MODEL_ARGUMENTS[name]: value for name, value in given.items()}
        if getattr(args, "trust_remote_code", False):
            how.setdefault("trust_remote_code", True)
        assert self._folder is not None
        return PretrainedSource(self._folder, **how)

    def _engine_options(self) -> EngineOptions:
        args = self.args
        low = args.bf16 or (self._folder is None and self.model.dtype == torch.bfloat16)
        if self.model.dtype == torch.float16:
            raise ConfigError("weights in float16", where="StreamedTrainer", fix="load them with dtype=torch.float32")
        precision: Precision = "bf16" if low else "fp32"
        options: EngineOptions = {
            "device": str(args.device) if args.device.type != "cpu" else "cpu",
            "precision": precision,
            "optimizer": self._adamw(),
            "max_grad_norm": args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
            "seed": args.seed,
        }
        return options | self._options  # type: ignore[return-value]

    def _adamw(self) -> AdamW:
        args, decaying = self.args, self._decaying()
        others = tuple(name for name, _ in self.model.named_parameters() if name not in decaying)
        betas = (args.adam_beta1, args.adam_beta2)
        return AdamW(args.learning_rate, betas, args.adam_epsilon, args.weight_decay, others)

    def _decaying(self) -> set[str]:
        return set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]

    # Training ---------------------------------------------------------------------------------------------------------

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """As the trainer's; the model has the trained weights afterwards, if it had any before."""
        engine = self.engine
        self._standin.take()
        self._waiting.clear()
        try:
            return super().train(*arguments, **keywords)  # type: ignore[misc]
        finally:
            if self._standin.loaded:
                engine.flush()
                self._standin.give_back(engine.master)

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Keeps the micro-batch; the last one of an optimizer step runs them all, and returns the loss of the step."""
        self.model.train()
        self._waiting.append(dict(inputs))
        loss = 0.0
        if self.accelerator.sync_gradients:
            self._refuse_other_divisor(num_items_in_batch)
            lr = self._plain_optimizer.lr
            out = self.engine.step(self._waiting, lr, self._loss())
            loss, self._norm = out.loss, out.grad_norm
            self._tell("train", out.metrics, self._waiting)
            self._waiting.clear()
        return torch.tensor(loss, device=self.args.device)

    def _refuse_other_divisor(self, items: Any) -> None:
        """Raise `ConfigError` where the trainer would divide by another number than the step's target tokens."""
        if items is None or self.loss_fn is not None or len(self._waiting) != self.current_gradient_accumulation_steps:
            return
        targets = sum(count_targets(batch) for batch in self._waiting)
        if int(items) != targets:
            what = f"the trainer divides by {int(items)}, and the step has {targets} target tokens"
            raise ConfigError(what, where="StreamedTrainer", fix="give loss_fn with a divisor of its own")

    def create_optimizer(self, model: Any = None) -> Any:
        """Groups of parameters for the scheduler; the engine updates."""
        if self.optimizer is None:
            self.optimizer = EngineOptimizer(self.model, self._decaying(), self._adamw())
        return self.optimizer

    @property
    def _plain_optimizer(self) -> EngineOptimizer:
        found: EngineOptimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return found

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self._norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return self._norm

    def _loss(self) -> LossFn | None:
        """What takes the place of `compute_loss`: `None` is cross-entropy over the step's target tokens."""
        if self.loss_fn is not None:
            return self.loss_fn
        smoothing = float(self.args.label_smoothing_factor or 0.0)
        if hasattr(self, "_metrics"):  # TRL's, which are logged
            return TokenLoss(smoothing, getattr(self.args, "loss_type", "nll") == "dft")
        return SmoothedCrossEntropy(smoothing) if smoothing else None

    def _tell(self, mode: str, metrics: Mapping[str, float], batches: list[Mapping[str, Any]]) -> None:
        """Hand TRL what it logs."""
        if not hasattr(self, "_metrics"):
            return
        told: Any = self
        for name, value in metrics.items():
            told._metrics[mode][name].append(value)
        if mode == "train":
            for batch in batches:
                mask = batch.get("attention_mask")
                told._total_train_tokens += int(batch["input_ids"].numel() if mask is None else mask.sum())
        told._metrics[mode]["num_tokens"] = [told._total_train_tokens]

    # Evaluation -------------------------------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, and logits and labels where they are asked for. A batch without a target has no loss."""
        batch, loss = dict(inputs), None
        labels = batch.get("labels")
        if labels is not None and bool((labels[:, 1:] != -100).any()):
            found = self.engine.measure([batch], self._loss())
            self._tell("eval", found.metrics, [batch])
            loss = torch.tensor(found.loss, device=self.args.device)
        if prediction_loss_only:
            return loss, None, None
        unseen = ("labels", *own_entries(self._loss()))
        seen = {key: value for key, value in batch.items() if key not in unseen}
        return loss, self.engine.logits(seen), labels

    # Saving -----------------------------------------------------------------------------------------------------------

    def _export(self, folder: Path) -> None:
        """What `save_pretrained` of the model does: its files, among those that are there; or those of a checkpoint."""
        engine = self.engine
        if self._saves_all:
            made = engine.save(folder.parent, step=self.state.global_step).wait()
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
            engine.saver.goes_on_from(folder)
            return
        precision: Precision = "bf16" if self.model.dtype == torch.bfloat16 else "fp32"
        beside = folder / ".megatrain"
        shutil.rmtree(beside, ignore_errors=True)
        made = engine.save_pretrained(beside, precision=precision)
        for stale in folder.glob("*.safetensors*"):
            stale.unlink()
        for path in made.iterdir():
            if path.name != "README.md" or not (folder / path.name).exists():
                path.replace(folder / path.name)
        shutil.rmtree(beside)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The trainer's, with the engine's whole state in place of the optimizer's, unless `save_only_model`."""
        self._saves_all = not self.args.save_only_model
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._saves_all = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        try:
            found = open_checkpoint(resume_from_checkpoint)
        except DamagedCheckpoint as error:
            what = f"holds no state of the engine that is whole ({error.what})"
            fix = "resume from one that a streamed trainer has written, or start from its weights as a model"
            raise CheckpointError(what, where=resume_from_checkpoint, fix=fix) from error
        self.engine.restore(found)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        self.engine.flush()
        self.engine.fill(PretrainedSource(best))


class TokenLoss(LogitsLoss):
    """Cross-entropy, or dynamic fine-tuning (Wu et al., "On the Generalization of SFT", 2025), and what TRL logs."""

    def __init__(self, smoothing: float, dynamic: bool) -> None:
        self.smoothing, self.dynamic = smoothing, dynamic

    def __call__(self, logits: Tensor, labels: Tensor, **own: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over the tokens, with the sums of the entropy and of right guesses."""
        log_probs = functional.log_softmax(logits, dim=-1)
        losses = functional.nll_loss(log_probs, labels, reduction="none")
        if self.dynamic:
            losses = losses * torch.exp(-losses).detach()
        elif self.smoothing:
            losses = (1 - self.smoothing) * losses - self.smoothing * log_probs.mean(dim=-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum()
            right = (logits.argmax(dim=-1) == labels).sum()
        return losses.sum(), {"entropy": entropy, "mean_token_accuracy": right}


class StreamedTrainer(Streamed, Trainer):
    """`transformers.Trainer` through the engine. See `Streamed` for what it takes beside."""


def streamed(kind: type) -> Any:
    """The trainer's class `kind`, `transformers.Trainer` or `trl.SFTTrainer` say, through the engine.

    Raises `ConfigError` for one with a loss or a step of its own.
    """
    made = type(f"Streamed{kind.__name__}", (Streamed, kind), {"__doc__": Streamed.__doc__, "__module__": __name__})
    refuse_class(made)
    return made


__all__ = ["Streamed", "StreamedTrainer", "TokenLoss", "streamed"]
