"""What a long-lived process does once it has started. Knows nothing of what it serves."""

from __future__ import annotations

import gc


def settle() -> None:
    """Take everything that start-up made out of the garbage collector's sight.

    Modules and models are hundreds of thousands of objects that never die; a full collection walks them all, with the
    interpreter standing still meanwhile, and every stream of the process gets its tokens late.
    """
    gc.collect()
    gc.freeze()
