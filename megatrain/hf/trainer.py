"""The streamed trainer: a `Trainer` whose forward, backward and update are one `Engine.step`.

The library keeps its training loop, data, callbacks, logging, evaluation and checkpoint rotation. Only what uses
weights is replaced, by overriding methods that are the same in transformers 5.17 and 5.23. `training_step` collects the
micro-batches of an optimizer step, and with the last one runs them all. The learning rate is the scheduler's.

The engine is created when it is first needed, from the trainer's model with all changes that its user and TRL have
made. Before, during and after training the model may be read and run, and its weights changed, for example in a
callback. Any other change after the engine was created is refused at the next step (`model_changes.py`).

Processes started by a launcher share the model, instead of using `DistributedDataParallel`: each has its own batches,
as in a stock trainer, and its part of the state. All must make the same calls that read or write weights.

Two things differ from a stock run: a loss or gradient that is not finite raises `NonFinite` and nothing is
updated; dropout and the noise of `neftune_noise_alpha` draw other random numbers.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, Trainer

from megatrain.checkpoint.folder import open_checkpoint, refuse_damaged_weights
from megatrain.dist import World
from megatrain.engine.chunked_loss import own_entries
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint
from megatrain.hf.model import LazyModel, LazySource, checksums, forward_without_wrappers, named_model, noisy_embeddings
from megatrain.hf.model_changes import Snapshot, refuse_changes, snapshot_of
from megatrain.hf.optimizer import EngineOptimizer
from megatrain.hf.trainer_losses import (
    refuse_mean_of_means,
    refuse_other_divisor,
    report_to_trl,
    router_coefficient,
    router_weights,
    stock_loss,
    with_weights,
)
from megatrain.hf.training_options import refuse_arguments, refuse_class, refuse_keywords, refuse_loss, refuse_model
from megatrain.losses import LossFn
from megatrain.model import PretrainedSource, base_of
from megatrain.optim import AdamW, Muon, Optimizer
from megatrain.spec import Precision
from megatrain.spec.validate_fields import checked, shown
from megatrain.train.engine import Engine
from megatrain.train.options import EngineOptions, launched_world


class Streamed:
    """Mixin that makes a `transformers.Trainer` class train through the engine; `streamed` applies it.

    model: a model, or a folder or hub name, which is then never loaded whole. loss_fn: replaces cross-entropy, see
    `megatrain.losses`. engine_options: arguments of `Engine.from_model` that the training arguments do not determine,
    such as `policy`, `numerics` and `disk`.

    Raises `ConfigError` and `ModelError`, before anything is allocated, for what is not supported.
    """

    model: Any
    args: Any
    state: Any
    optimizer: Any
    accelerator: Any
    callback_handler: Any
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
            fix = "pass all others by keyword"
            raise ConfigError("only model and args may be positional", where="StreamedTrainer", fix=fix)
        refuse_class(type(self))
        refuse_keywords(keywords)
        if args is not None:
            refuse_arguments(args)
        checked(engine_options, Mapping | None, ConfigError, "engine_options")
        self.loss_fn = loss_fn
        self._options: EngineOptions = dict(engine_options or {})  # type: ignore[assignment]  # its copy
        self._engine: Engine | None = None
        self._snapshot: Snapshot = {}
        """The model when the engine was created, without the values of its parameters."""
        self._configs: dict[str, dict[str, Any]] = {}
        """Its config and generation config as the engine has them. Fields that may change are copied to the engine."""
        self._micro_batches: list[Mapping[str, Any]] = []
        """Those of the current optimizer step so far."""
        self._norm: float | None = None
        self._saving_checkpoint = False
        """Whether a checkpoint with all of the engine's state is being saved, and not just the model."""
        self._given_by_name = isinstance(model, str | Path)
        if self._given_by_name:
            adapted = keywords.get("peft_config") is not None
            name, model = str(model), named_model(str(model), args, adapted=adapted)
            keywords = _with_processor(name, args, keywords)
        handled = ["torch_compile_backend", *(["model_init_kwargs"] if self._given_by_name else [])]
        with _temporarily_unset(args, *handled):  # or the accelerator would compile, and TRL refuse model_init_kwargs
            super().__init__(model=model, args=args, **keywords)  # type: ignore[call-arg]  # the trainer's
        self.args.ddp_find_unused_parameters = None  # TRL sets it for a processor, and there is no DDP
        refuse_arguments(self.args)
        refuse_model(self.model, self.args)
        self.neftune_noise_alpha = None  # or the library would add its hook to the model after the engine is created
        if self.loss_fn is None and not self.model_accepts_loss_kwargs:
            refuse_mean_of_means(self)
        self._lazy_model = LazyModel(self._base, self.model)
        self.accelerator.device_placement = False  # only the engine copies to the device
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "jit_manager"):  # the library's own, which saves on SIGTERM
                callback.on_pre_optimizer_step = _leave_to_step_end
        not_wrapped = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = not_wrapped  # no DDP: the engine sums gradients over ranks

    @property
    def _base(self) -> Any:
        """The model; if the trainer's is a `PeftModel`, the model inside it, with the adapter's layers."""
        return base_of(self.model)

    # The engine -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine. It is created when first needed, from the model as it is then."""
        if self._engine is None:
            engine = self._make_engine()
            self._engine = engine
            self._snapshot = snapshot_of(self._base)
            both = ((kind, getattr(self._base, kind, None)) for kind in ("config", "generation_config"))
            self._configs = {kind: found.to_dict() for kind, found in both if found is not None}
            self._lazy_model.move_weights_to(engine)
        return self._engine

    def _make_engine(self) -> Engine:
        if self.loss_fn is None:
            refuse_loss(self._base)
        options, mode, coefficient = engine_options(self, self._options), self.model.training, router_coefficient(self)
        if coefficient is not None and hasattr(self._base, "router_aux_loss_coef"):
            self._base.router_aux_loss_coef = coefficient  # was copied from the config when the model was created
        self.model.train()  # the engine is created from a model in training mode, so that it has its dropout
        try:
            with forward_without_wrappers(self._base), noisy_embeddings(self._base, self.args.neftune_noise_alpha):
                if self._given_by_name:
                    engine = Engine.from_source(LazySource(self._base), **options)
                else:
                    engine = Engine.from_model(self._base, **options)
        finally:
            self.model.train(mode)
        if coefficient is not None:
            weight = engine.parts.ported.balance_coefficient
            if weight is None or not math.isclose(coefficient, weight, rel_tol=1e-6):  # the model has it in float32
                engine.close()
                has = "has no such loss" if weight is None else f"multiplies it by {weight:g}"
                what = f"router_aux_loss_coef={coefficient:g} is not supported: the model's own forward {has}"
                raise ConfigError(what, where=type(self.model).__name__, fix="set router_aux_loss_coef=0.0")
        return engine

    def _sync_model(self) -> None:
        """Apply to the engine what has been changed in the model, or raise `ConfigError` if that is not possible."""
        engine = self.engine
        self._lazy_model.refuse_before_step()
        refuse_changes(self._snapshot, snapshot_of(self._base))
        for kind, before in self._configs.items():
            of_model, of_engine = getattr(self._base, kind), getattr(engine, kind)
            for name, value in of_model.to_dict().items():
                if name not in before or value != before[name]:
                    setattr(of_engine, name, copy.deepcopy(getattr(of_model, name, value)))
                    before[name] = value
        self._sync_weights()

    def _sync_weights(self) -> None:
        """Free weights that have been read, and copy those that have been written to the engine."""
        changed, world = self._lazy_model.collect_changes(), self.engine.world
        sums = world.exchange("weights that were written to", checksums(changed) if world.size > 1 else {})
        if any(each != sums[0] for each in sums):
            what = "its weights have not been changed in the same way on all ranks"
            raise ConfigError(what, where="the trainer's model", fix="write the same values on all ranks, or on none")
        if changed:
            self.engine.weights.update(changed)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Do nothing: the engine copies to the device what a layer needs."""

    # Training ---------------------------------------------------------------------------------------------------------

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Train, with the arguments and the result of the stock trainer's `train`."""
        self._sync_model()
        self._micro_batches.clear()
        try:
            return super().train(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self._lazy_model.engine_is_ahead = False

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Collect the micro-batch; if it is the last of an optimizer step, run the step and return its loss, else 0."""
        self.model.train()
        self._micro_batches.append(with_weights(self._loss(), inputs))
        loss = 0.0
        if self.accelerator.sync_gradients:
            if self.loss_fn is None and len(self._micro_batches) == self.current_gradient_accumulation_steps:
                refuse_other_divisor(self._micro_batches, num_items_in_batch, self.engine.world)
            self._sync_model()
            optimizer = self._engine_optimizer
            self.engine.set_optimizer(optimizer.algorithm)
            weights = router_weights(self, len(self._micro_batches))
            out = self.engine.step(self._micro_batches, optimizer.lr, self._loss(), weights)
            loss, self._norm = out.loss, out.grad_norm
            report_to_trl(self, "train", out.by_micro_batch, self._micro_batches)
            self._micro_batches.clear()
            self._lazy_model.engine_is_ahead = True
        return torch.tensor(loss, device=self.args.device)

    def create_optimizer(self, model: Any = None) -> Any:
        """An optimizer whose groups the scheduler sets and the engine reads."""
        if self.optimizer is None:
            algorithm, lr = _algorithm(self, self._options), self.args.learning_rate
            self.optimizer = EngineOptimizer(self._base, algorithm, lr, self._lazy_model.catch_up)
        return self.optimizer

    @property
    def _engine_optimizer(self) -> EngineOptimizer:
        """The optimizer without accelerate's wrapper."""
        optimizer: EngineOptimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return self._norm

    _clip_grad_norm = _get_grad_norm

    def _loss(self) -> LossFn | None:
        """The loss function; replaces `compute_loss`."""
        return self.loss_fn or stock_loss(self)

    # Evaluation -------------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the trainer's evaluation loop with the model's current weights."""
        self._sync_model()
        with _temporarily_unset(self.args, "bf16_full_eval"):  # or the trainer would cast the model's parameters
            return super().evaluation_loop(*arguments, **keywords)  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss, logits and labels of a batch; the last two only if needed. A batch without a target has no loss. Losses
        of several ranks are scaled so that their mean is the mean over tokens."""
        batch, loss, world = dict(inputs), None, self.engine.world
        labels = batch.get("labels")
        batch |= {} if labels is None else with_weights(self._loss(), batch)
        targets = world.exchange("target tokens", 0 if labels is None else int((labels[:, 1:] != -100).sum()))
        if any(targets):
            measured = self.engine.measure([batch], self._loss(), router_weights(self, 1))
            report_to_trl(self, "eval", measured.by_micro_batch, [batch])
            share = measured.shares[world.rank] * world.size if world.size > 1 else measured.loss
            loss = torch.tensor(share, device=self.args.device)
        if prediction_loss_only:
            return loss, None, None
        not_for_model = ("labels", *own_entries(self._loss()))
        model_inputs = {key: value for key, value in batch.items() if key not in not_for_model}
        return loss, self.engine.logits(model_inputs), labels

    # Saving -----------------------------------------------------------------------------------------------------------

    def _export(self, folder: Path) -> None:
        """Replacement for the model's `save_pretrained`: write its files to `folder`, or a whole checkpoint."""
        self._sync_model()
        engine = self.engine
        if self._saving_checkpoint:
            optimizer = engine.optimizer
            engine.set_optimizer(self._engine_optimizer.with_peak_rates)
            made = engine.save(folder.parent, step=self.state.global_step).wait()
            engine.set_optimizer(optimizer)
            _on_rank_0(engine.world, lambda: _replace_folder(made, folder))
            engine.saver.goes_on_from(folder)
            return
        loaded_as = {"dtype", "torch_dtype"} & (getattr(self.args, "model_init_kwargs", None) or {}).keys()
        precision: Precision | None = "fp32" if loaded_as else None
        if self.model.dtype == torch.bfloat16:
            precision = "bf16"
        beside = folder / ".megatrain"
        _on_rank_0(engine.world, lambda: shutil.rmtree(beside, ignore_errors=True))
        engine.save_pretrained(beside, precision=precision)
        _on_rank_0(engine.world, lambda: _move_into(beside, folder))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as the trainer does, except that the engine, if there is one, writes the weights, on all ranks."""
        if self._engine is None:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        if not self.args.should_save:
            if self.engine.world.size > 1:
                self._export(Path(output_dir or self.args.output_dir))
            return
        with self._lazy_model.saved_by(self._export):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as the trainer does, but all of the engine's state instead of the optimizer's, or no state at all if
        `save_only_model` is set."""
        self._saving_checkpoint = not self.args.save_only_model
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._saving_checkpoint = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        try:
            checkpoint = open_checkpoint(resume_from_checkpoint)
        except DamagedCheckpoint as error:
            what = f"has no complete engine state ({error.what})"
            fix = "resume from a checkpoint of a streamed trainer, or start from its weights as a model"
            raise CheckpointError(what, where=resume_from_checkpoint, fix=fix) from error
        self.engine.restore(checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        refuse_damaged_weights(best)
        self._sync_weights()
        self.engine.weights.flush()
        self.engine.weights.fill(PretrainedSource(best))


def _with_processor(name: str, args: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Add the processor of the model's revision, which TRL would load itself if it were given the name."""
    revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision")
    if revision is None or keywords.get("processing_class") is not None:
        return keywords
    trusted = getattr(args, "trust_remote_code", False)
    processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trusted)
    return {**keywords, "processing_class": processor}


def engine_options(trainer: Any, given: EngineOptions) -> EngineOptions:
    """The engine's options that follow from a trainer's arguments, and over them those that its user has given."""
    args, model = trainer.args, base_of(trainer.model)
    precision: Precision = "bf16" if args.bf16 or trainer.model.dtype == torch.bfloat16 else "fp32"
    options: EngineOptions = {
        "device": str(args.device) if args.device.type != "cpu" else "cpu",
        "precision": precision,
        "optimizer": _algorithm(trainer, given),
        "max_grad_norm": args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
        "seed": args.seed,
    }
    if args.world_size > 1 and any(parameter.requires_grad for parameter in model.parameters()):
        options["world"] = launched_world(args.device.type, float(args.ddp_timeout))
    return options | given


def _algorithm(trainer: Any, given: EngineOptions) -> Optimizer:
    if isinstance(optimizer := given.get("optimizer"), Optimizer):
        _refuse_two_values(trainer.args, optimizer)
        return optimizer
    args, model = trainer.args, base_of(trainer.model)
    decaying = set(trainer.get_decay_parameter_names(model))
    others = tuple(name for name, _ in model.named_parameters() if name not in decaying)
    betas = (args.adam_beta1, args.adam_beta2)
    return AdamW(args.learning_rate, betas, args.adam_epsilon, args.weight_decay, others)


def _refuse_two_values(args: Any, optimizer: Optimizer) -> None:
    """Raise `ConfigError` if arguments and the user's optimizer have different values, of which one would be ignored.
    Both always have a learning rate; of the others, an argument at its default gives way."""
    of, usual = type(optimizer).__name__, {field.name: field.default for field in fields(args)}
    if args.learning_rate != optimizer.lr:
        what = f"learning_rate={args.learning_rate} in the arguments, and lr={optimizer.lr} of {of}"
        fix = "set both to the peak" + (" of matrices; AdamW's rate follows with its own peak" if of == "Muon" else "")
        raise ConfigError(what, where="StreamedTrainer", fix=fix)
    elementwise = optimizer.elementwise if isinstance(optimizer, Muon) else optimizer
    betas = getattr(elementwise, "betas", (None, None))
    ours = {"weight_decay": optimizer.weight_decay, "adam_beta1": betas[0], "adam_beta2": betas[1]}
    for name, value in {**ours, "adam_epsilon": getattr(elementwise, "eps", None)}.items():
        if (given := getattr(args, name)) not in (usual[name], value):
            what = f"{name}={given} in the arguments, and {'none' if value is None else value} of {of}"
            raise ConfigError(what, where="StreamedTrainer", fix=f"leave {name} out, and set that of the optimizer")


def _on_rank_0(world: World, work: Callable[[], object]) -> None:
    """Call `work` on rank 0 while the others wait. What it raises is raised on all."""
    world.agree("the saved model", lambda: work() and None if world.rank == 0 else None)


def _leave_to_step_end(*_: Any, **__: Any) -> None:
    """Save no checkpoint before the optimizer's step, which the engine has made already."""


def _replace_folder(made: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)


def _move_into(made: Path, folder: Path) -> None:
    """Move a model's files into `folder`, replacing its weights but keeping its other files and its README."""
    for stale in folder.glob("*.safetensors*"):
        stale.unlink()
    for path in made.iterdir():
        if path.name != "README.md" or not (folder / path.name).exists():
            path.replace(folder / path.name)
    shutil.rmtree(made)


@contextmanager
def _temporarily_unset(args: Any, *names: str) -> Iterator[None]:
    """In the block, these arguments are `None`, so that the library does not act on what the engine does."""
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    for name in given:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(args, name, value)


class StreamedTrainer(Streamed, Trainer):
    """`transformers.Trainer` on the engine. Additional arguments: see `Streamed`."""


def streamed(kind: type) -> Any:
    """A subclass of the trainer class `kind` that trains through the engine.

    kind: `transformers.Trainer` or `trl.SFTTrainer`, for example.
    Raises `ConfigError` for anything but a trainer class, and for one with its own loss or training step.
    """
    if not (isinstance(kind, type) and issubclass(kind, Trainer)):
        what, fix = f"{shown(kind)} is not a trainer class", "give the class: streamed(SFTTrainer)(model=..., ...)"
        raise ConfigError(what, where="streamed", fix=fix)
    if issubclass(kind, Streamed):
        return kind
    made = type(f"Streamed{kind.__name__}", (Streamed, kind), {"__doc__": Streamed.__doc__, "__module__": __name__})
    refuse_class(made)
    return made
