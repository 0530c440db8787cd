"""Values that say what a model, a machine, a step's work and a policy are. No torch, no files, no devices."""

from megatrain.spec.hardware import Hardware
from megatrain.spec.layer_profile import Growth, LayerProfile
from megatrain.spec.limits import Limits, Nbytes
from megatrain.spec.model import ModelSpec, ParamSpec, UnitKind, UnitSpec
from megatrain.spec.numerics import WEIGHT_NBYTES, Kernels, Numerics
from megatrain.spec.policy import (
    IN_HOST,
    NOT_OFFLOADED,
    SAVED_BY,
    ActivationPlan,
    Keep,
    Part,
    Placement,
    Policy,
    SavedOutputs,
    Slots,
    Tier,
    Transfer,
    UpdateTime,
    WaitFor,
)
from megatrain.spec.rates import Precision
from megatrain.spec.work import Batching, Tokens, Work

__all__ = [
    "IN_HOST",
    "NOT_OFFLOADED",
    "SAVED_BY",
    "WEIGHT_NBYTES",
    "ActivationPlan",
    "Batching",
    "Growth",
    "Hardware",
    "Keep",
    "Kernels",
    "LayerProfile",
    "Limits",
    "ModelSpec",
    "Nbytes",
    "Numerics",
    "ParamSpec",
    "Part",
    "Placement",
    "Policy",
    "Precision",
    "SavedOutputs",
    "Slots",
    "Tier",
    "Tokens",
    "Transfer",
    "UnitKind",
    "UnitSpec",
    "UpdateTime",
    "WaitFor",
    "Work",
]
