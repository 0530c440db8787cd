"""Frozen values that describe a model, a machine, a step's work and a policy. No torch, no files, no devices."""

from megatrain.spec.hardware import Hardware
from megatrain.spec.layer_profile import Growth, LayerProfile
from megatrain.spec.limits import Limits
from megatrain.spec.model import FileBytes, ModelSpec, ParamSpec, SideValue, UnitSpec, hidden_sides
from megatrain.spec.numerics import WEIGHT_NBYTES, Kernels, Numerics, Precision
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
    StateTier,
    Tier,
    Transfer,
    UpdateTime,
    WaitFor,
)
from megatrain.spec.work import Batching, Work

__all__ = [
    "IN_HOST",
    "NOT_OFFLOADED",
    "SAVED_BY",
    "WEIGHT_NBYTES",
    "ActivationPlan",
    "Batching",
    "FileBytes",
    "Growth",
    "Hardware",
    "Keep",
    "Kernels",
    "LayerProfile",
    "Limits",
    "ModelSpec",
    "Numerics",
    "ParamSpec",
    "Part",
    "Placement",
    "Policy",
    "Precision",
    "SavedOutputs",
    "SideValue",
    "StateTier",
    "Tier",
    "Transfer",
    "UnitSpec",
    "UpdateTime",
    "WaitFor",
    "Work",
    "hidden_sides",
]
