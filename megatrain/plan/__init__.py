"""Plans training by calculation alone. Does not import torch, so that a laptop can plan for any described machine."""

from megatrain.plan.analysis import Outlook, advised, changes, hidden_from, loads, look, stalls, written_nbytes_per_day
from megatrain.plan.cost import (
    Calibration,
    attention_seconds,
    calibrate,
    contention,
    duplex_bandwidths,
    op_seconds,
    optimizer_bandwidth,
    product_seconds,
    step_flops,
)
from megatrain.plan.estimates import estimate, examine, memory_table
from megatrain.plan.host_resources import available_host_nbytes, available_threads
from megatrain.plan.machines import load_hardware, machine, machine_names, save_hardware
from megatrain.plan.question import Choice, Plan, Question
from megatrain.plan.ranks import question_of_one, ranks_on_each, share_of
from megatrain.plan.report import peak_table
from megatrain.plan.search import find_plan, fits, survey
from megatrain.plan.spec_file import read_model
from megatrain.plan.without_plan import choose_policy, fit_activations, fit_lock_limit, images_nbytes, nearest_that_fits

__all__ = [
    "Calibration",
    "Choice",
    "Outlook",
    "Plan",
    "Question",
    "advised",
    "attention_seconds",
    "available_host_nbytes",
    "available_threads",
    "calibrate",
    "changes",
    "choose_policy",
    "contention",
    "duplex_bandwidths",
    "estimate",
    "examine",
    "find_plan",
    "fit_activations",
    "fit_lock_limit",
    "fits",
    "hidden_from",
    "images_nbytes",
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
    "question_of_one",
    "ranks_on_each",
    "read_model",
    "save_hardware",
    "share_of",
    "stalls",
    "step_flops",
    "survey",
    "written_nbytes_per_day",
]
