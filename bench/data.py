"""From a researcher's file to micro-batches: every part of the data pipeline against a reference in the same run.

python -m bench.data                 # all sections
python -m bench.data validation      # some
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from bench import loader, tokenisation, validation

SECTIONS: dict[str, tuple[str, Callable[[], None]]] = {
    "validation": ("Every row checked, against parsing alone", validation.main),
    "tokenisation": ("The preparation against encode_batch alone", tokenisation.main),
    "loader": ("What a step waits for its batch", loader.main),
}


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections",
        nargs="*",
        choices=[[], *SECTIONS],
        metavar="NAME",
        help=f"{', '.join(SECTIONS)}; all when none is named",
    )
    for name in parser.parse_args().sections or list(SECTIONS):
        title, section = SECTIONS[name]
        print(f"### {title} (`python -m bench.data {name}`)\n", flush=True)
        section()
        print(flush=True)


if __name__ == "__main__":
    main()
