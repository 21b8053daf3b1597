"""Train DQN on CartPole-v1 from a replay buffer on disk, while its processes are killed.

Half-way, the demo saves a checkpoint, kills one actor with SIGKILL, and then the learner. A new learner opens the store and
continues with all rows. Training ends when the mean return of the last 20 episodes passes 195. After Ctrl-C, the store can be
opened again.
"""

import argparse
import multiprocessing
import signal
import sys
import time
from itertools import count
from pathlib import Path


def train(parent, options):
    from examples.demo.learner import learn  # which takes seconds

    learn(parent, options)


def run(options):
    """Run a learner: its exit code, 130 after Ctrl-C. It ignores Ctrl-C itself, and stops in order when its pipe is closed."""
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    learner = context.Process(target=train, args=(theirs, options))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the learner and its actors
    learner.start()
    signal.signal(signal.SIGINT, handler)
    try:
        learner.join()
    except KeyboardInterrupt:
        ours.close()
        learner.join()
        return 130
    return learner.exitcode


def main(arguments=None):
    parser = argparse.ArgumentParser("make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="of all actors together, at most")
    parser.add_argument("--dir", type=Path, help="folder of the run; default: engram-demo/run-…")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--actors", type=int, choices=range(1, 65), default=2, metavar="1…64", help="processes that play"
    )
    options = parser.parse_args(arguments)
    runs = (Path("engram-demo") / f"run-{number:03d}" for number in count(1))
    options.dir = folder = options.dir or next(run for run in runs if not run.exists())
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--dir {folder}: expected a new or empty folder, found files. Choose another, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    options.started = time.time()
    print(f"DQN on CartPole-v1. Replay in {folder / 'replay'} (seed {options.seed}).", flush=True)
    code = run(options)
    sys.exit(run(options) if code == -signal.SIGKILL else code)
