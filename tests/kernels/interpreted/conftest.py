"""Set-up of the processes that ``test_interpreted.py`` starts; nothing happens in any other."""

import os
from typing import Any


def make_integers_from_arrays_of_one() -> None:
    """Triton 3.6 makes integers with ``int(array)``, which NumPy 2.4 refuses for shape (1,)."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


if os.environ.get("TRITON_INTERPRET") == "1":
    make_integers_from_arrays_of_one()
