"""Planned step times of small steps, with all updates where their state is and with some of them streamed.

python -m bench.streamed_updates
"""

from __future__ import annotations

from dataclasses import replace

from bench.shapes import llama_shape
from megatrain.plan import Plan, Question, find_plan, machine

LENGTH = 8192
MODELS = {"8B": llama_shape("8B", 32, 4096), "70B": llama_shape("70B", 80, 8192)}
CASES = (("8B", "rtx-4090"), ("8B", "rtx-5090"), ("8B", "a100-sxm"), ("8B", "h100"), ("8B", "gh200"), ("70B", "h100"))


def _shown(plan: Plan) -> str:
    return f"{plan.seconds:.3f} s, {plan.timeline.stall_seconds() / plan.seconds:.0%} waits"


def main() -> None:
    print(f"| planned, 1 x {LENGTH:,} tokens | clips | updates where the state is | streamed | share | gain |")
    print("|---|---|---|---|---|---|")
    for size, name in CASES:
        for clips in (True, False):
            question = Question(MODELS[size], machine(name), LENGTH, LENGTH, clips=clips)
            plain, found = find_plan(replace(question, overrides={"streamed_updates": 0.0})), find_plan(question)
            words = (
                f"{size} on {question.hardware.name} | {'yes' if clips else 'no'} | {_shown(plain)} | {_shown(found)}"
            )
            gain = plain.seconds / found.seconds - 1
            print(f"| {words} | {found.policy.streamed_updates:.0%} | {gain:.1%} |", flush=True)


if __name__ == "__main__":
    main()
