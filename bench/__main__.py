"""`make bench`: every benchmark that needs no GPU, each in a process of its own, with the machine and the date on top.

python -m bench                 # all, about an hour on two cores
python -m bench adamw link      # some
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys

from bench.gpu.machine import processor_line
from horizon_server.settings import child_environment

BENCHES: dict[str, tuple[str, list[str]]] = {
    "adamw": ("The optimizer kernel against STREAM triad", []),
    "throughput": ("The engine against a plain PyTorch loop", []),
    "host_memory": ("Host memory against the plan, and loading", []),
    "prediction": ("The predicted step against the real one", []),
    "link": ("What double buffering hides", []),
    "drive": ("States on drives", []),
    "giant": ("The largest models, their schedule rehearsed", ["--rehearse"]),
    "ranks": ("Lanes, and several devices", []),
    "methods": (
        "LoRA against full fine-tuning, link-bound",
        ["--shape", "6m", "--rows", "1", "--row-tokens", "64", "--steps", "5", "--share", "4", "--rank", "4"],
    ),
    "optimizer_states": ("Held-out loss with compressed optimizer states", []),
    "chunked_rows": ("A row in chunks against the whole row", []),
    "pages": ("Experts in pages against whole layers", []),
    "joined_rows": ("Packed against unpacked rows", []),
    "preference": ("A step of DPO against one of supervised fine-tuning", []),
    "data": ("From a file to micro-batches", []),
    "upload": ("A push against a bare gRPC byte stream", []),
    "service": ("What a user waits for", []),
    "metrics_page": ("A scrape of /metrics", []),
    "page": ("What a reader of a long job's page waits for", []),
    "service_load": ("What polling clients and watchers cost", ["--quick"]),
    "loading": ("What one user's many small jobs cost another's training", ["--quick"]),
    "sharing": ("Several jobs on one device", ["--quick"]),
    "fleet": ("Where the jobs of a fleet are sent", ["--quick"]),
}
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "computes or counts, and measures nothing": (
        "forecast",
        "kept_from_drives",
        "lowered",
        "nodes",
        "residents",
        "scaling",
    ),
    "needs a GPU, or is about one": ("fp8", "gpu_all", "lora_products"),
    "needs what is not installed with the server": ("deepspeed_adam", "fsdp"),
    "takes most of a machine's memory": ("giant_real", "long_rows", "shared_base"),
    "takes long": ("compile_time", "first_step", "sampling", "series", "sessions", "soak"),
    "a part of another one": (
        "giant_worker",
        "loader",
        "service_clients",
        "sharing_worker",
        "tokenisation",
        "validation",
    ),
}
"""Modules that can be run by themselves and are not among all, by the reason."""


def main() -> int:
    """Run the benches asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", choices=[[], *BENCHES], metavar="NAME", help=f"{', '.join(BENCHES)}; all when none is named"
    )
    names = parser.parse_args().names or list(BENCHES)
    today = datetime.datetime.now(datetime.UTC).date()
    print(
        f"{today}, {processor_line()}, Python {platform.python_version()}; `python -m bench {' '.join(names)}`\n",
        flush=True,
    )
    code = 0
    for name in names:
        title, flags = BENCHES[name]
        print(f"## {title} (`python -m bench.{name}`)\n", flush=True)
        code |= subprocess.run(
            [sys.executable, "-m", f"bench.{name}", *flags], env=child_environment(), check=False
        ).returncode
        print(flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
