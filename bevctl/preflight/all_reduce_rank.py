"""One rank of the all-reduce that preflight tries: `python -m bevctl.preflight.all_reduce_rank BACKEND FILE BYTES`."""

from __future__ import annotations

import datetime
import os
import sys

import torch
from torch import distributed


def main(backend: str, meeting_file: str, size: int) -> None:
    """Sums a tensor of `size` bytes over the ranks of the environment and exits 1 when the sum is wrong."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{meeting_file}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(minutes=5),
    )
    gradients = torch.full((max(size // 4, 1),), float(rank + 1), device=device)
    distributed.all_reduce(gradients)
    expected = world * (world + 1) / 2
    right = bool((gradients == expected).all())
    distributed.destroy_process_group()
    if not right:
        sys.exit(f"the sum over {world} ranks is wrong")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
