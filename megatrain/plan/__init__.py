"""What a policy costs, on paper. Imports no torch, so that a laptop can plan for a machine it has never seen."""

from megatrain.plan.advice import nearest_that_fits
from megatrain.plan.answer import find_plan, survey
from megatrain.plan.compare import Row, compare
from megatrain.plan.cost import Calibration, calibrate, op_seconds, step_flops
from megatrain.plan.estimates import cut, estimate, examine
from megatrain.plan.hardware import available_host_nbytes, available_threads
from megatrain.plan.machines import load_hardware, machine, machine_names, save_hardware
from megatrain.plan.outlook import (
    Hiding,
    Load,
    Outlook,
    Sweep,
    Upgrade,
    hiding,
    loads,
    look,
    stalls,
    sweep,
    upgrades,
    written_nbytes_per_day,
)
from megatrain.plan.page import render_page
from megatrain.plan.question import Estimate, Plan, Question
from megatrain.plan.rates import attention_seconds, duplex_bandwidths, optimizer_bandwidth, product_seconds
from megatrain.plan.report import memory_table, peak_table
from megatrain.plan.rules import choose_policy, fit_activations
from megatrain.plan.specs import read_model

__all__ = [
    "Calibration",
    "Estimate",
    "Hiding",
    "Load",
    "Outlook",
    "Plan",
    "Question",
    "Row",
    "Sweep",
    "Upgrade",
    "attention_seconds",
    "available_host_nbytes",
    "available_threads",
    "calibrate",
    "choose_policy",
    "compare",
    "cut",
    "duplex_bandwidths",
    "estimate",
    "examine",
    "find_plan",
    "fit_activations",
    "hiding",
    "load_hardware",
    "loads",
    "look",
    "machine",
    "machine_names",
    "memory_table",
    "nearest_that_fits",
    "op_seconds",
    "optimizer_bandwidth",
    "peak_table",
    "product_seconds",
    "read_model",
    "render_page",
    "save_hardware",
    "stalls",
    "step_flops",
    "survey",
    "sweep",
    "upgrades",
    "written_nbytes_per_day",
]
