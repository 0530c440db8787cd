"""The streamed trainer: a `Trainer` whose forward, backward and update are one `Engine.step`.

The library keeps its loop, and with it data, callbacks, logging, evaluation, checkpoints and their rotation; only what
touches weights is replaced, by overriding methods that transformers 5.17 and 5.23 have alike. The micro-batches of an
optimizer step are collected by `training_step`, the last of which runs them all. The learning rate is the scheduler's.

The model is the trainer's own, given or by name, as its user and TRL have made it when the engine is first needed. It
may be read, run and written to between steps, as in a callback, and before and after training. Anything else that is
changed in it from then on is refused at the next step (`model_changes.py`).

Processes that a launcher has started share the model, in place of `DistributedDataParallel`: each has its own batches,
as in a stock trainer, and its part of the state. All of them call alike what reads or writes weights.

Differences to know: a loss or gradient that is not finite raises `NonFinite` and nothing is applied; dropout draws
other numbers, and so does the noise of `neftune_noise_alpha`.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, Trainer

from megatrain.checkpoint import open_checkpoint
from megatrain.engine import count_targets
from megatrain.engine.chunked_loss import divisor_of, own_entries
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatrain.hf.model import NamedSource, StandIn, named_model, own_forward, sums_over
from megatrain.hf.model_changes import Facts, facts_of, refuse_changes
from megatrain.hf.noisy_embeddings import noisy_embeddings
from megatrain.hf.optimizer import EngineOptimizer
from megatrain.hf.refusals import refuse_class, refuse_keywords, refuse_loss, refuse_model
from megatrain.hf.trainer_losses import router_coefficient, router_weights, stock_loss
from megatrain.hf.training_options import refuse_arguments
from megatrain.losses import LossFn
from megatrain.model import PretrainedSource, base_of
from megatrain.optim import AdamW
from megatrain.spec import Numerics, Precision
from megatrain.train.engine import Engine
from megatrain.train.options import EngineOptions, launched_world


class Streamed:
    """Mixin that makes a `transformers.Trainer` class train through the engine; `streamed` applies it.

    model: as usual, or the folder or hub name of one, which is then never loaded whole. loss_fn: in place of
    cross-entropy, see `megatrain.losses`. engine_options: what `Engine.from_model` takes beyond what the training
    arguments say, such as `policy`, `numerics` and `disk`.

    Raises `ConfigError` and `ModelError`, before anything is allocated, for what cannot be honoured.
    """

    model: Any
    args: Any
    state: Any
    optimizer: Any
    accelerator: Any
    model_accepts_loss_kwargs: bool
    neftune_noise_alpha: float | None
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
        self._facts: Facts = {}
        """What the model was when the engine was made, beside the values of its parameters."""
        self._harmless: dict[str, dict[str, Any]] = {}
        """Its config and generation config, as the engine has them: what may change in them is handed on."""
        self._waiting: list[Mapping[str, Any]] = []
        self._norm: float | None = None
        self._saves_all = False
        """Whether what is saved is a checkpoint, with all of the engine's state."""
        self._by_name = isinstance(model, str | Path)
        if self._by_name:
            name, model = str(model), named_model(str(model), args)
            keywords = self._with_processor(name, args, keywords)
        engines = ["torch_compile_backend", *(["model_init_kwargs"] if self._by_name else [])]
        with _unset(args, *engines):  # else the accelerator compiles, and TRL says that it takes no name's arguments
            super().__init__(model=model, args=args, **keywords)  # type: ignore[call-arg]  # the trainer's
        refuse_arguments(self.args)
        refuse_model(self.model, self.args)
        self.neftune_noise_alpha = None  # else the library puts its hook on the model, after the engine is made
        if not self.model_accepts_loss_kwargs:
            what = f"{type(self.model).__name__} takes no num_items_in_batch, so its loss is a mean of means"
            raise ConfigError(what, where="StreamedTrainer", fix="give loss_fn, see megatrain.losses")
        self._standin = StandIn(self._base, self.model)
        self.accelerator.device_placement = False  # nothing goes to the device but through the engine
        not_wrapped = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = not_wrapped  # the engine sums gradients over ranks

    @property
    def _base(self) -> Any:
        """The model, or that with the layers of an adapter in it where the trainer's is a `PeftModel`."""
        return base_of(self.model)

    def _with_processor(self, name: str, args: Any, keywords: dict[str, Any]) -> dict[str, Any]:
        """TRL reads a processor beside a model by name, of the same revision; it is not told the name here."""
        revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision")
        if revision is None or keywords.get("processing_class") is not None:
            return keywords
        trusted = getattr(args, "trust_remote_code", False)
        found = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trusted)
        return {**keywords, "processing_class": found}

    # The engine -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Made when it is first needed, from the model as it is then."""
        if self._engine is None:
            engine = self._make_engine()
            self._engine = engine
            self._facts = facts_of(self._base)
            both = ((kind, getattr(self._base, kind, None)) for kind in ("config", "generation_config"))
            self._harmless = {kind: found.to_dict() for kind, found in both if found is not None}
            self._standin.lend(engine)
        return self._engine

    def _make_engine(self) -> Engine:
        if self.loss_fn is None:
            refuse_loss(self._base)
        options, mode, coefficient = self._engine_options(), self.model.training, router_coefficient(self)
        if coefficient is not None and hasattr(self._base, "router_aux_loss_coef"):
            self._base.router_aux_loss_coef = coefficient  # taken from the config when the model was made
        self.model.train()  # its dropout works in training, and never in evaluation
        try:
            with own_forward(self._base), noisy_embeddings(self._base, self.args.neftune_noise_alpha):
                if self._by_name:
                    engine = Engine.from_source(NamedSource(self._base), **options)
                else:
                    engine = Engine.from_model(self._base, **options)
        finally:
            self.model.train(mode)
        if coefficient is not None:
            found = engine.router_aux_loss_coef
            if found is None or not math.isclose(coefficient, found, rel_tol=1e-6):  # a float32 in the model's forward
                engine.close()
                own = "has no such loss" if found is None else f"multiplies it by {found:g}"
                what = f"router_aux_loss_coef={coefficient:g} cannot be honoured: the model's own forward {own}"
                raise ConfigError(what, where=type(self.model).__name__, fix="set router_aux_loss_coef=0.0")
        return engine

    def _catch_up(self) -> None:
        """Honour what has been changed in the model since the engine was made, or raise `ConfigError`."""
        engine = self.engine
        refuse_changes(self._facts, facts_of(self._base))
        for kind, before in self._harmless.items():
            of_model, of_engine = getattr(self._base, kind), getattr(engine, kind)
            for name, value in of_model.to_dict().items():
                if name not in before or value != before[name]:
                    setattr(of_engine, name, copy.deepcopy(getattr(of_model, name, value)))
                    before[name] = value
        self._take_back()

    def _take_back(self) -> None:
        """What has been read of the weights, and what has been written to them."""
        changed, world = self._standin.take_back(), self.engine.world
        told = world.exchange("weights that were written to", sums_over(changed) if world.size > 1 else {})
        if any(each != told[0] for each in told):
            what = "its weights have not been written to alike on all ranks"
            raise ConfigError(what, where="the trainer's model", fix="write the same to them on each, or on none")
        if changed:
            self.engine.set_weights(changed)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """It stays where it is: only what a layer needs goes to the device."""

    def _engine_options(self) -> EngineOptions:
        args = self.args
        precision: Precision = "bf16" if args.bf16 or self.model.dtype == torch.bfloat16 else "fp32"
        options: EngineOptions = {
            "device": str(args.device) if args.device.type != "cpu" else "cpu",
            "precision": precision,
            "optimizer": self._adamw(),
            "max_grad_norm": args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
            "seed": args.seed,
        }
        if args.world_size > 1 and any(parameter.requires_grad for parameter in self._base.parameters()):
            options["world"] = launched_world(args.device.type, float(args.ddp_timeout))
        if args.torch_compile:
            options["numerics"] = Numerics(precision, kernels="compile")
        return options | self._options  # type: ignore[return-value]

    def _adamw(self) -> AdamW:
        given = self._options.get("optimizer")
        if isinstance(given, AdamW):
            return given
        args, decaying = self.args, set(self.get_decay_parameter_names(self._base))  # type: ignore[attr-defined]
        others = tuple(name for name, _ in self._base.named_parameters() if name not in decaying)
        betas = (args.adam_beta1, args.adam_beta2)
        return AdamW(args.learning_rate, betas, args.adam_epsilon, args.weight_decay, others)

    # Training ---------------------------------------------------------------------------------------------------------

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """As the trainer's."""
        self._catch_up()
        self._waiting.clear()
        try:
            return super().train(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self._standin.is_ahead = False

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Keeps the micro-batch; the last one of an optimizer step runs them all, and returns the loss of the step."""
        self.model.train()
        self._waiting.append(dict(inputs))
        loss = 0.0
        if self.accelerator.sync_gradients:
            self._refuse_other_divisor(num_items_in_batch)
            self._catch_up()
            optimizer = self._plain_optimizer
            self.engine.set_optimizer(optimizer.adamw)
            out = self.engine.step(self._waiting, optimizer.lr, self._loss(), self._router_weights(len(self._waiting)))
            loss, self._norm = out.loss, out.grad_norm
            self._tell("train", out.by_micro_batch, self._waiting)
            self._waiting.clear()
            self._standin.is_ahead = True
        return torch.tensor(loss, device=self.args.device)

    def _refuse_other_divisor(self, items: Any) -> None:
        """Raise `ConfigError` where the trainer would divide by another number than the step's target tokens."""
        if items is None or self.loss_fn is not None or len(self._waiting) != self.current_gradient_accumulation_steps:
            return
        own = sum(count_targets(batch) for batch in self._waiting)
        targets = sum(self.engine.world.exchange("target tokens", own))
        if int(items) != targets:
            what = f"the trainer divides by {int(items)}, and the step has {targets} target tokens"
            raise ConfigError(what, where="StreamedTrainer", fix="give loss_fn with a divisor of its own")

    def create_optimizer(self, model: Any = None) -> Any:
        """Groups of parameters for the scheduler; the engine updates."""
        if self.optimizer is None:
            lr = self.args.learning_rate
            self.optimizer = EngineOptimizer(self._base, self._adamw(), lr, self._has_stepped)
        return self.optimizer

    def _has_stepped(self) -> None:
        self._standin.is_ahead = False

    @property
    def _plain_optimizer(self) -> EngineOptimizer:
        found: EngineOptimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return found

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self._norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return self._norm

    def _loss(self) -> LossFn | None:
        """What takes the place of `compute_loss`."""
        return self.loss_fn or stock_loss(self)

    def _router_weights(self, count: int) -> list[float] | None:
        return None if self.loss_fn is not None else router_weights(self, count, self.engine.world.size)

    def _tell(self, mode: str, found: Sequence[Mapping[str, float]], batches: Sequence[Mapping[str, Any]]) -> None:
        """Hand TRL what it logs, of each micro-batch."""
        if not hasattr(self, "_metrics"):
            return
        told: Any = self
        world = self.engine.world
        for of_batch, batch in zip(found[world.rank :: world.size], batches, strict=True):
            mask = batch.get("attention_mask")
            tokens = int(batch["input_ids"].numel() if mask is None else mask.sum())
            if world.size > 1:
                of_batch, tokens = self._over_ranks(of_batch, divisor_of(self._loss(), batch), tokens)
            for name, value in of_batch.items():
                told._metrics[mode][name].append(value)
            if mode == "train":
                told._total_train_tokens += tokens
        told._metrics[mode]["num_tokens"] = [told._total_train_tokens]

    def _over_ranks(self, own: Mapping[str, float], weight: float, tokens: int) -> tuple[dict[str, float], int]:
        """Means, and the number of tokens, over the micro-batches that the ranks have at once, as TRL takes them: by
        the accelerator, which leaves out what fills up the last batch of a data set."""
        row = torch.tensor([[*own.values(), weight, tokens]], dtype=torch.float64, device=self.args.device)
        table = self.accelerator.gather_for_metrics(row).cpu()
        means = {}
        for column, name in enumerate(own):
            weights = torch.ones(len(table), dtype=table.dtype) if name == "aux_loss" else table[:, -2]
            means[name] = float(table[:, column] @ weights / weights.sum()) if weights.sum() else 0.0
        return means, int(table[:, -1].sum())

    # Evaluation -------------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> Any:
        """The trainer's, of the model as it is now."""
        self._catch_up()
        with _unset(self.args, "bf16_full_eval"):  # the model's parameters are not to be cast: the engine computes so
            return super().evaluation_loop(*arguments, **keywords)  # type: ignore[misc]

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, and logits and labels where they are asked for. A batch without a target has no loss. Those of several
        ranks count by their tokens, and have a loss of this mean."""
        batch, loss, world = dict(inputs), None, self.engine.world
        labels = batch.get("labels")
        targets = world.exchange("target tokens", 0 if labels is None else int((labels[:, 1:] != -100).sum()))
        if any(targets):
            found = self.engine.measure([batch], self._loss(), self._router_weights(1))
            self._tell("eval", found.by_micro_batch, [batch])
            own = found.shares[world.rank] * world.size if world.size > 1 else found.loss
            loss = torch.tensor(own, device=self.args.device)
        if prediction_loss_only:
            return loss, None, None
        unseen = ("labels", *own_entries(self._loss()))
        seen = {key: value for key, value in batch.items() if key not in unseen}
        return loss, self.engine.logits(seen), labels

    # Saving -----------------------------------------------------------------------------------------------------------

    def _export(self, folder: Path) -> None:
        """What `save_pretrained` of the model does: its files, among those that are there; or those of a checkpoint."""
        self._catch_up()
        engine = self.engine
        if self._saves_all:
            used = engine.optimizer
            engine.set_optimizer(self._plain_optimizer.adamw_of_peaks)
            made = engine.save(folder.parent, step=self.state.global_step).wait()
            engine.set_optimizer(used)
            self._on_first(lambda: _takes_place_of(made, folder))
            engine.saver.goes_on_from(folder)
            return
        precision: Precision = "bf16" if self.model.dtype == torch.bfloat16 else "fp32"
        beside = folder / ".megatrain"
        self._on_first(lambda: shutil.rmtree(beside, ignore_errors=True))
        engine.save_pretrained(beside, precision=precision)
        self._on_first(lambda: _goes_into(beside, folder))

    def _on_first(self, work: Callable[[], object]) -> None:
        """Do something on rank 0, while the others wait for it; what it raises is raised on all."""
        world = self.engine.world
        world.agree("the saved model", lambda: work() and None if world.rank == 0 else None)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The trainer's; the engine writes the weights if it has them, on all ranks."""
        if self._engine is None:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        if not self.args.should_save:
            if self.engine.world.size > 1:
                self._export(Path(output_dir or self.args.output_dir))
            return
        with self._standin.saved_by(self._export):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

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
        self._take_back()
        self.engine.flush()
        self.engine.fill(PretrainedSource(best))


def _takes_place_of(made: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)


def _goes_into(made: Path, folder: Path) -> None:
    """The files of a model, among those that are there."""
    for stale in folder.glob("*.safetensors*"):
        stale.unlink()
    for path in made.iterdir():
        if path.name != "README.md" or not (folder / path.name).exists():
            path.replace(folder / path.name)
    shutil.rmtree(made)


@contextmanager
def _unset(args: Any, *names: str) -> Iterator[None]:
    """In the block, these of the arguments are unset: they are honoured, and the library is not to do it as well."""
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    for name in given:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(args, name, value)


class StreamedTrainer(Streamed, Trainer):
    """`transformers.Trainer` through the engine. See `Streamed` for what it takes beside."""


def streamed(kind: type) -> Any:
    """The trainer's class `kind`, `transformers.Trainer` or `trl.SFTTrainer` say, through the engine.

    Raises `ConfigError` for one with a loss or a step of its own.
    """
    made = type(f"Streamed{kind.__name__}", (Streamed, kind), {"__doc__": Streamed.__doc__, "__module__": __name__})
    refuse_class(made)
    return made


__all__ = ["Streamed", "StreamedTrainer", "streamed"]
