"""Tells how torch was built, then launches small pieces of work on each GPU; prints a JSON line for each behind MARK.

Run as a script by the interpreter in question (`EXE gpu_probe.py GPUS DTYPE [--own]`), Python 3.6 and newer: what
breaks a driver or a process breaks this one only. `--own` also launches bevctl's operations.
"""

import json
import sys
import warnings

MARK = "BEVCTL_GPU_PROBE "
_TOLERANCE = 2e-2
"""Relative to the largest value; half precision rounds at 1e-3 (FP16) and 8e-3 (BF16)."""


def main(gpus: int, dtype: str, own: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        available = torch.cuda.is_available()
        count = torch.cuda.device_count() if available else 0
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() or ""
    reason = "" if available else " ".join(str(w.message).splitlines()[0] for w in caught)
    _tell(version=torch.__version__, cuda=torch.version.cuda, arch_list=flags.split(), reason=reason)
    _tell(devices=[_launch_all(torch.device("cuda", index), dtype, own) for index in range(min(gpus, count))])


def _tell(**values: object) -> None:
    print(MARK + json.dumps(values), flush=True)


def _launch_all(device, dtype: str, own: bool) -> dict:  # type: ignore[no-untyped-def]
    """What went wrong in each piece of work on `device`, by its name; an empty text where nothing did."""
    pieces = {"matrix product": _matmul, "convolution": _convolution}
    if own:
        pieces.update({"bev_pool": _bev_pool, "voxelize": _voxelize, "sparse_conv": _sparse_conv})
    return {name: _launch(piece, device, dtype) for name, piece in pieces.items()}


def _launch(piece, device, dtype: str) -> str:  # type: ignore[no-untyped-def]
    import torch

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = piece(torch.device("cpu"), torch.float32)
            got = piece(device, getattr(torch, dtype)).cpu()
    except Exception as error:
        return (str(error) or type(error).__name__).splitlines()[0][:200]
    off, largest = (got.float() - expected).abs().max().item(), expected.abs().max().item()
    if not off <= _TOLERANCE * largest:
        return "wrong result: off by {:.3g} where values reach {:.3g}".format(off, largest)  # noqa: UP032
    return ""


def _numbers(torch, count: int):  # type: ignore[no-untyped-def]
    """The same `count` values in [0, 1) everywhere, without a random generator."""
    return (torch.arange(count, dtype=torch.float64) * 0.6180339887 % 1.0).float()


def _matmul(device, dtype):  # type: ignore[no-untyped-def]
    import torch

    a = _numbers(torch, 64 * 64).reshape(64, 64).to(device, dtype)
    return a @ a.t()


def _convolution(device, dtype):  # type: ignore[no-untyped-def]
    import torch

    image = _numbers(torch, 8 * 16 * 16).reshape(1, 8, 16, 16).to(device, dtype)
    kernel = _numbers(torch, 8 * 8 * 9).reshape(8, 8, 3, 3).to(device, dtype)
    return torch.nn.functional.conv2d(image, kernel, padding=1)


def _bev_pool(device, dtype):  # type: ignore[no-untyped-def]
    import torch

    from bevctl.ops.bev_pool import index_points, lift_splat

    logits = _numbers(torch, 12 * 6).reshape(1, 1, 12, 2, 3).to(device, dtype)
    cells = (torch.arange(24).reshape(1, 1, 2, 3, 4) * 7 % 16).to(device)
    return lift_splat(logits, index_points(cells, (4, 4)))


def _voxelize(device, dtype):  # type: ignore[no-untyped-def]
    import torch

    from bevctl.ops.voxelize import voxelize

    del dtype  # always in FP32
    points = _numbers(torch, 500 * 5).reshape(500, 5).to(device)
    return voxelize([points], (0.25, 0.25, 0.5), (0.0, 0.0, 0.0, 1.0, 1.0, 1.0), 10, 100).features


def _sparse_conv(device, dtype):  # type: ignore[no-untyped-def]
    import torch

    from bevctl.ops.rulebook import submanifold_rules
    from bevctl.ops.sparse_conv import sparse_conv

    coords = torch.tensor([[0, x, y, z] for x in range(4) for y in range(4) for z in range(2)]).to(device)
    rules = submanifold_rules(coords, (4, 4, 2), (3, 3, 3))
    features = _numbers(torch, 32 * 16).reshape(32, 16).to(device, dtype)
    weight = _numbers(torch, 27 * 16 * 16).reshape(3, 3, 3, 16, 16).to(device, dtype)
    return sparse_conv(features, weight, rules)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose modules would hide others of the same name
    main(int(sys.argv[1]), sys.argv[2], "--own" in sys.argv)
