"""Values that say what a model, a machine, a step's work and a policy are. No torch, no files, no devices."""

from megatrain.spec.hardware import Hardware
from megatrain.spec.layer_profile import Growth, LayerProfile
from megatrain.spec.limits import Limits, Nbytes
from megatrain.spec.model import ModelSpec, ParamSpec, UnitKind, UnitSpec
from megatrain.spec.numerics import WEIGHT_NBYTES, Kernels, Numerics
from megatrain.spec.policy import (
    IN_HOST,
    ActivationPlan,
    Gates,
    Home,
    Keep,
    Part,
    Policy,
    SavedOutputs,
    Slots,
    Tier,
    Transit,
    UpdateTime,
)
from megatrain.spec.rates import Precision
from megatrain.spec.work import Rows, Tokens, Work

__all__ = [
    "IN_HOST",
    "WEIGHT_NBYTES",
    "ActivationPlan",
    "Gates",
    "Growth",
    "Hardware",
    "Home",
    "Keep",
    "Kernels",
    "LayerProfile",
    "Limits",
    "ModelSpec",
    "Nbytes",
    "Numerics",
    "ParamSpec",
    "Part",
    "Policy",
    "Precision",
    "Rows",
    "SavedOutputs",
    "Slots",
    "Tier",
    "Tokens",
    "Transit",
    "UnitKind",
    "UnitSpec",
    "UpdateTime",
    "Work",
]
