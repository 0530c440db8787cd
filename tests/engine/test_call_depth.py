"""Few functions of ours lie between `Engine.step` and a layer (`python -m bench.house` prints them)."""

from __future__ import annotations

from bench.house import walk_on

MOST = 5


def test_a_layers_forward_and_backward_are_at_most_five_functions_from_step() -> None:
    walk = walk_on("cpu")
    for names in (walk.forward, walk.backward):
        assert 0 < len(names) <= MOST, " > ".join(names)
        functions = [name.rpartition(".")[2] for name in names]
        assert len(set(functions)) == len(functions), f"two have the same name: {functions}"
