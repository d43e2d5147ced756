"""Without a toolkit, its adapter says what to install; with it, importing the adapter warns of nothing."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules[{toolkit!r}] = None
from jem_robust.adapters.toolkit_attacks import parse_attack
for use in (lambda: __import__("jem_robust.adapters.{toolkit}"), lambda: parse_attack("{toolkit}:X")):
    try:
        use()
    except ImportError as error:
        assert "pip install jem-robust[{toolkit}]" in str(error), error
    else:
        raise SystemExit("imported")
"""


@pytest.mark.parametrize("toolkit", ["art", "foolbox", "torchattacks"])
def test_a_missing_toolkit_names_its_extra(toolkit: str) -> None:
    run(WITHOUT.format(toolkit=toolkit))


def test_importing_the_adapters_is_silent() -> None:
    pytest.importorskip("foolbox", reason="pip install jem-robust[foolbox]")
    pytest.importorskip("art", reason="pip install jem-robust[art]")
    run("import jem_robust.adapters.foolbox, jem_robust.adapters.art, jem_robust.adapters.autoattack")


def run(code: str) -> None:
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", path + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
