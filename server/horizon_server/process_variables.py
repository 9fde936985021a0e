"""The environment variables that every child process which computes is started with: the daemon's children, and the
benchmarks."""

from __future__ import annotations

CHILD_VARIABLES = {
    # No hub is ever asked: what is not on this node is refused.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # The preparation spreads over processes; pools of threads in each would compete for the same processors.
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # Threads that wait must sleep, not spin: on a box that others use too, spinning ones starve those they wait for.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    # Attention multiplies inside OpenMP's threads, and MKL's thread count chooses the order of a product's sum. A new
    # OpenMP thread has this count until torch gives it one, which is 1 too: without it the first step of a process has
    # other bits than the same step later. The compute thread sets its own count, so products outside such threads still
    # use all of them.
    "MKL_NUM_THREADS": "1",
    # The ranks of a job are processes of one node: what they say to each other stays on it.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # A layer's intermediates are freed and asked for again all the time. glibc would give them back to the kernel in
    # between, which then clears every page again: 200,000 page faults a step of a 40 M model, 5 % of its time.
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    # A thread's own arena is made of pieces of 64 MiB, which a block of 32 MiB divides badly: the peak of a row of
    # 32,768 tokens was up to 20 % higher, and differed more from run to run.
    "MALLOC_ARENA_MAX": "1",
}
