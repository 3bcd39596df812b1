"""Every fault of the list has a test of its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

# Small numeric cases, then those that need a whole step, a module or the compiler.
ONE_PROCESS = """
    S01 S02 S03 S05 S06 S08 S09 S10 S12 S14 S15 S16 S17 U01 U02 U03 U05 U06 U07 U08 U10 U12 U13 U16
    C02 C03 C05 C07 C09 C10 C11 C12 C13 C14 C17 C18 C19 K01 K02 K03 K04 K05 K07 K08 K09 K11 K13
    M01 M02 M03 M04 M06 M10 M11 M12 M13 M17 M18 M19 F07 F18 F19 F20 P01 P02
    S19 K14 K15 M15 F01 F02 F03 F04 F05 F06 F09 F10 F11 F12 F13 F15 F16 F23
""".split()
# Of the second set: modules, states that were given away, saving and moving between GradScaler and this library.
MODULES = [f"W{number:02}" for number in range(1, 15)]
DONATION = "G01 G02 G03 G04 G05 G06 G07 L05".split()
FILES = "P11 P12 P13 D16".split()
# Of the second set: gradients that were silently zero, sums and means, windows, graphs, containers.
LOOPS = "L01 L02 L03 L04 L06 L07 L08 L09 L10 L11 L12 L13 L14 L15 L16 L17 L18".split()
# These are about a CUDA device, several processes or several devices.
DEVICES_AND_RANKS = "C06 F14 D02 D03 D04 D05 D06 D11 D12 D13 D14 D15 D17".split()


def case_ids() -> set[str]:
    """The ids in the names of the tests, which are `test_S01_title` or `test_S01_title__part`."""
    functions = [
        node.name
        for path in Path(__file__).parent.glob("test_cases*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return {part for name in functions if re.fullmatch(r"[A-Z]\d\d", part := name.split("_")[1])}


def test_each_case_has_a_test_and_each_test_a_case():
    assert len(set(ONE_PROCESS)) == 83
    assert case_ids() == {*ONE_PROCESS, *MODULES, *DONATION, *LOOPS, *FILES, *DEVICES_AND_RANKS}
