"""Count the instructions that the NEON kernels execute for a block, under an emulator: no board is needed.

    python benchmarks/forwards/neon_instructions.py
    python benchmarks/forwards/neon_instructions.py --sets neon --json FILE

A block is 32 columns of 16 rows of weights, times n rows of activations. For every tensor type and n = 1 to 16 the
tables have all instructions, and in brackets the vector arithmetic among them (dot products, unpacking, conversions,
multiply-adds; loads are not in it). The first line is the least that there can be: the dot products alone.

Counts are no times: a board may wait for memory or for results, and none was measured. Needs g++-aarch64-linux-gnu,
CMake, a C compiler and qemu-user of version 4.2 to 8.2 (its interface for plug-ins changed later).
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from edgedec_apps.bench.provenance import provenance

SOURCE = Path(__file__).with_name("native")
SYSROOT = "/usr/aarch64-linux-gnu"
KINDS = ("dots", "vectors", "memory", "prefetches", "others")  # as count_instructions.c writes them
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)


def build(folder: Path) -> tuple[Path, Path]:
    """Return the benchmark, built for aarch64, and the emulator's plug-in, built for this machine."""
    cross = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    compiler = "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"
    plugin = folder / "libcount_instructions.so"
    for command in (
        ["cmake", "-S", str(SOURCE), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", *cross, compiler],
        ["cmake", "--build", str(folder), "--target", "products"],
        ["cc", "-O2", "-shared", "-fPIC", str(SOURCE / "count_instructions.c"), "-o", str(plugin)],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "products", plugin


def counted(program: Path, plugin: Path, name: str) -> list[dict[str, Any]]:
    """Return, for every type and n, the instructions a block of the instruction set `name` by kind, and their sum.

    Raises:
        RuntimeError: if the emulator did not count every product.
    """
    log = plugin.with_suffix(".log")
    emulator = ["qemu-aarch64", "-L", SYSROOT, "-cpu", "max", "-plugin", str(plugin), "-d", "plugin", "-D", str(log)]
    done = subprocess.run([*emulator, str(program), "count", name], check=True, capture_output=True, text=True)
    products = [json.loads(line) for line in done.stdout.splitlines()]
    counts = [[int(count) for count in line.split()] for line in log.read_text(encoding="utf-8").splitlines()]
    if len(products) != len(counts):
        raise RuntimeError(
            f"the emulator counted {len(counts)} products of {len(products)}: its version may not fit the plug-in's"
        )
    rows = []
    for product, kinds in zip(products, counts, strict=True):
        blocks = product["blocks"]
        by_kind = {kind: round(count / blocks, 2) for kind, count in zip(KINDS, kinds, strict=True)}
        rows.append({"type": product["type"], "n": product["n"], "all": round(sum(kinds) / blocks, 2), **by_kind})
    return rows


def least(name: str, n: int) -> int:
    """Return the fewest dot products of a block: 16 multiply-adds each, or 32 for two rows of activations with i8mm."""
    return 32 * ((n + 1) // 2 if name == "i8mm" else n)


def table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table for one instruction set, in Markdown."""
    found = {(row["type"], row["n"]): f"{row['all']:.0f} ({row['dots'] + row['vectors']:.0f})" for row in rows}
    lines = ["| " + " | ".join([name, *(f"n = {n}" for n in SHOWN)]) + " |", "|---" * (len(SHOWN) + 1) + "|"]
    lines.append("| " + " | ".join(["dot products alone", *(str(least(name, n)) for n in SHOWN)]) + " |")
    for tensor_type in dict.fromkeys(row["type"] for row in rows):
        lines.append("| " + " | ".join([tensor_type, *(found[tensor_type, n] for n in SHOWN)]) + " |")
    return lines


def main() -> None:
    """Build, count, print the tables, and write the JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["neon", "i8mm"], help="instruction sets (default: neon i8mm)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    document: dict[str, Any] = {**provenance(), "instructions": []}
    with tempfile.TemporaryDirectory() as folder:
        program, plugin = build(Path(folder))
        for name in arguments.sets:
            rows = counted(program, plugin, name)
            document["instructions"].append({"set": name, "rows": rows})
            print("", *table(name, rows), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
