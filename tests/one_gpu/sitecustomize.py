"""Read by every Python process of tests with SHARE_GPU=N: each rank takes the first GPU, as if it
were on a host of its own, so that NCCL lets ranks share it."""

import os

if {"RANK", "LOCAL_RANK"} <= os.environ.keys():
    os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
