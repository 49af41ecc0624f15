"""The dispatcher and its vocabulary are pure Python."""

import ast
import inspect
import subprocess
import sys

import pytest

from specdec.verifier import dispatcher as dispatcher_module
from specdec.verifier import modes as modes_module


@pytest.mark.parametrize("module", [modes_module, dispatcher_module])
def test_source_imports_no_torch(module):
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    ours = {"specdec.verifier.modes"}
    assert all(name in ours or name in sys.stdlib_module_names for name in
               {name if name in ours else name.split(".")[0] for name in imported})  # fmt: skip


def test_importing_them_imports_no_torch():
    code = (
        "import sys, specdec.verifier.modes, specdec.verifier.dispatcher; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd="/").returncode == 0
