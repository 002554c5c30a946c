"""How fast blocks move between two processes over NIXL: GB/s for many blocks, latency of one. Knows no services.

python bench/transfer.py --blocks 64 512 --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from kvtransfer.probe import BLOCK_BYTES, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 64, 512], help="blocks per part")
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    rows = run(args.blocks, args.rounds, args.block_bytes)
    if args.json:
        print(json.dumps({"block_bytes": args.block_bytes, "rows": [asdict(row) for row in rows]}))
        return
    print(f"{'blocks':>7} {'neighbours':>10} {'median':>10} {'best':>10} {'GB/s':>6} {'CPU writer':>10} {'reader':>7}")
    for r in rows:
        times = f"{r.write_s * 1e3:>7.3f} ms {r.best_s * 1e3:>7.3f} ms"
        print(f"{r.blocks:>7} {r.merged!s:>10} {times} {r.gb_per_s:>6.2f} {r.cpu_writer:>9.0%} {r.cpu_reader:>7.0%}")


if __name__ == "__main__":
    main()
