"""Replay one run of the simulator with a readable trace: `python -m tests.simulation.replay --seed 123 --depth 3`."""

import argparse

from tests.simulation.driver import play, play_peers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--speculates", action="store_true")
    parser.add_argument("--tier", action="store_true")
    parser.add_argument("--peers", action="store_true")
    args = parser.parse_args()
    if args.peers:
        worlds = [*play_peers(args.seed, args.depth, print)]
    else:
        worlds = [play(args.seed, args.depth, print, args.speculates, tier=args.tier)]
    for world in worlds:
        print("passed:", dict(world.coverage))


if __name__ == "__main__":
    main()
