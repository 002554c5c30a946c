"""A process of its own for `doctor`: imports torch, looks for kernels and GPUs, prints JSON. Compiles nothing."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """argv: the dtype of the weights."""
    import torch

    from engine.native.build import library_path

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    found = {"torch": torch.__version__, "gpus": gpus} | _native(sys.argv[1], library_path().exists())
    print(json.dumps(found))


def _native(dtype: str, built: bool) -> dict[str, str]:
    """Compiling takes longer than a doctor may: what is not built yet is only said."""
    if not built:
        detail = "native kernels: not built yet, the first worker does it"
        return {"native": "", "detail": detail, "linear": "the backend chosen then"}
    import torch

    from engine.linear import backend_name
    from engine.native import native_status

    status = native_status()
    native = status.kernels.instruction_set if status.kernels else ""
    return {"native": native, "detail": status.detail, "linear": backend_name(getattr(torch, dtype))}


if __name__ == "__main__":
    main()
