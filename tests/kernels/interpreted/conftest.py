"""Set-up of the processes that ``test_interpreted.py`` starts; nothing happens in any other."""

import os
from types import SimpleNamespace
from typing import Any


def make_integers_from_arrays_of_one() -> None:
    """Triton 3.6 makes integers with ``int(array)``, which NumPy 2.4 refuses for shape (1,)."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def patch_the_language_once() -> None:
    """Triton 3.6 patches its language anew for every function that a kernel calls, which takes most
    of the time; here the kernel's own patch, of all modules, holds for those too."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, scopes = interpreter._patch_lang, []

    class KernelScope(interpreter._LangPatchScope):
        def restore(self) -> None:
            scopes.remove(self)
            super().restore()

    def patch_lang_once(function: Any) -> Any:
        if scopes:
            return interpreter._LangPatchScope()
        sees_all = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        scope = KernelScope()
        scope._changes = patch_lang(sees_all)._changes
        scopes.append(scope)
        return scope

    interpreter._patch_lang = patch_lang_once


if os.environ.get("TRITON_INTERPRET") == "1":
    make_integers_from_arrays_of_one()
    patch_the_language_once()
