"""Error message of a failed compiler, and paths that break its commands."""

from __future__ import annotations

import os
import re
import sys
import tempfile

CAUSE = re.compile(r"\berror: |: cannot find |: undefined reference to ")
SUMMARY = "collect2: error: "


def compiler_error(output: str) -> str | None:
    """Return the first line naming a cause: ``file.cpp:1:2: fatal error: ...`` or the linker's. None without one.

    Commands of several thousand characters come before it, and ``ld returned 1 exit status`` after it.
    """
    for line in output.splitlines():
        text = line.strip()
        if CAUSE.search(text) and not text.startswith(SUMMARY):
            return text
    return None


def paths_with_a_space(*, inductor: bool = True) -> list[str]:
    """Return a sentence for each path with a space that torch passes to the compiler without quotes.

    The path of the Python environment breaks both torch.compile and the extensions of torch and DeepSpeed. The other
    two break only torch.compile (``inductor``). An extension is built inside its folder, so TORCH_EXTENSIONS_DIR may
    have a space.
    """
    places = {"the Python environment": sys.prefix}
    if inductor:
        places["the directory for temporary files"] = tempfile.gettempdir()
        places["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return [
        f"{name} {place!r} contains a space, which breaks a compiler's command "
        f"(compile.mode{', DeepSpeed' if place == sys.prefix else ''}); use a path without one"
        for name, place in places.items()
        if " " in place
    ]
