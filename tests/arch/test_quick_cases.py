"""The quick suite's cases of a grid show each value of each argument, where there are enough of them."""

from itertools import product

from tests.quick_cases import chosen


def test_as_many_cases_as_an_argument_has_values_show_all_values() -> None:
    grid = [
        {"kind": kind, "device": device, "sizes": sizes} for kind, device, sizes in product("abcde", "xy", ([1], [2]))
    ]
    quick = [grid[place] for place in chosen(grid, 5)]
    assert {case["kind"] for case in quick} == set("abcde")
    assert sorted(str(case["device"]) for case in quick) in (list("xxxyy"), list("xxyyy"))
    assert len({str(case["sizes"]) for case in quick}) == 2


def test_a_count_beyond_the_grid_chooses_all() -> None:
    assert chosen([{"kind": kind} for kind in "abc"], 9) == {0, 1, 2}
