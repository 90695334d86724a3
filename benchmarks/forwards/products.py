"""Products of tiles and activations alone: in the cache beside the core's peak, from memory beside a plain read.

    python benchmarks/forwards/products.py --json benchmarks/results/products-MACHINE.json
    python benchmarks/forwards/products.py --sets avx2 --threads 1 --only cache --types Q4_K,IQ4_XS
    python benchmarks/forwards/products.py --only memory --types Q4_K,Q6_K --ahead usual,0+0,1536+12288,0+4096x3

In the cache: nanoseconds a block (32 columns of 16 rows), and the part of the multiply-adds of bytes that one core
makes a second when nothing is loaded. From memory: gigabytes of weights a second, where n = 0 is a plain read of the
same bytes, with pages of 4 kB and of 2 MB; the median of seven, plain reads and products in turn. With --ahead, that is
said for each setting of how far ahead weights are fetched, in bytes into the L1 cache + into the L2 cache; with x3 they
are asked for three times, the last time so far ahead. Needs a C++ compiler and CMake.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgedec_apps.bench.provenance import provenance

SOURCE = Path(__file__).with_name("native")


def build(folder: Path) -> Path:
    """Return the program, built with the options of a release."""
    configure = ["cmake", "-S", str(SOURCE), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, ["cmake", "--build", str(folder), "--target", "products"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "products"


def lines(program: Path, *arguments: object) -> list[dict[str, Any]]:
    """Return what the program prints, one object a line."""
    command = [str(program), *map(str, arguments)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def table(rows: Sequence[dict[str, Any]], cell: str) -> list[str]:
    """Return a line for each tensor type, with a column for each number of rows."""
    counts = sorted({row["n"] for row in rows})
    found = ["type   " + "".join(f"{f'n={n}':>14}" for n in counts)]
    for name in dict.fromkeys(row["type"] for row in rows):
        cells = {row["n"]: cell.format(**row) for row in rows if row["type"] == name}
        found.append(f"{name:<7}" + "".join(f"{cells[n]:>14}" for n in counts))
    return found


def main() -> None:
    """Build, measure, print the tables, and write the JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", help="instruction sets (default: all of this processor but portable)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--only", choices=["cache", "memory"])
    parser.add_argument("--types", help="with commas between them (default: all in the cache, four from memory)")
    parser.add_argument("--ahead", default="usual", help="settings with commas between them, as usual,4608+0,0+4096x3")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    document: dict[str, Any] = {**provenance(), "cache": [], "memory": []}
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        here = subprocess.run([program, "sets"], check=True, capture_output=True, text=True).stdout.split()
        for name in arguments.sets or [name for name in here if name != "portable"]:
            if arguments.only != "memory":
                peak, *rows = lines(program, "cache", name, arguments.types or "all")
                print(f"\n{name}, in the cache, one thread: ns a block (part of {peak['peak_gmacs']:.0f} GMAC/s)")
                print(*table(rows, "{ns_block:.2f} ({of_peak:.2f})"), sep="\n")
                document["cache"].append({**peak, "rows": rows})
            for n_threads, huge in [(n, huge) for n in arguments.threads for huge in (0, 1)]:
                if arguments.only == "cache":
                    continue
                types = arguments.types or "Q8_0,Q4_K,Q6_K,Q4_0"
                rows = lines(program, "memory", name, n_threads, huge, types, arguments.ahead)
                print(f"\n{name}, from memory, {n_threads} threads, pages of {'2 MB' if huge else '4 kB'}: GB/s")
                for ahead in arguments.ahead.split(","):
                    print(f"ahead: {ahead}")
                    print(*table([row for row in rows if row["ahead"] in ("", ahead)], "{gb_s:.1f}"), sep="\n")
                document["memory"].append({"set": name, "threads": n_threads, "huge": bool(huge), "rows": rows})
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
