"""Run one seed of the whole simulation and print its event log: `python -m tests.simulation.whole.replay 123`."""

import argparse
import time

from tests.simulation.whole.faults import play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=0, help="run so many seeds from this one on, without logs")
    args = parser.parse_args()
    if not args.count:
        print("passed:", dict(play(args.seed, print).happened))
        return
    began = time.process_time()
    for seed in range(args.seed, args.seed + args.count):
        try:
            play(seed)
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
    print(f"{(time.process_time() - began) / args.count * 1000:.0f} ms of processor time per seed")


if __name__ == "__main__":
    main()
