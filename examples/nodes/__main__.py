"""Two nodes of a Ray cluster on this machine, of which one is killed with the rows on it: make demo ARGS='--nodes 2'.

Actors play CartPole on the first node. The second node has the rows, which are in a directory, their server, and the learner, which
shares their memory. First the server is killed, then the node. Both times the actors wait, and go on with the same episodes. In the end
each row for which ``add`` has returned is compared with what its actor wrote.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster

import engram
from engram.buffer.connecting import NAMESPACE
from examples.demo.agent import BATCH, Agent, checksums, mean_return, progress

CAPACITY, NAME = 200_000, "demo"
#: Ray says after 5 seconds that a node is dead, not after 15. What the demo does not need is not started.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1_000}
HEAD = {"_system_config": HEALTH, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
FIRST, SECOND = ({"resources": {node: 0.001}, "num_cpus": 0} for node in ("first", "second"))


class Player:
    """Plays and writes its steps into its own lane."""

    def __init__(self, lane, seed):
        torch.set_num_threads(1)
        self.lane, self.agent, self.written = lane, Agent(), 0
        self.steps = self.agent.play(seed, lambda: self.written)

    def play(self, replay, policy, written, n):
        """Take n steps: rows, checksums, and the returns of episodes that ended. ``add`` waits while no server answers."""
        self.written, made = written, []
        self.agent.load_state_dict(policy)
        for row, episode_return in islice(self.steps, n):
            made.append((replay.add(row, lane=self.lane), *checksums(row.unsqueeze(0)), episode_return))
        return made


class Learner:
    """Trains from the rows, in the memory of its node."""

    def __init__(self, policy):
        torch.set_num_threads(1)
        self.agent = Agent()
        self.agent.load_state_dict(policy)

    def learn(self, replay, seconds):
        """The policy after some seconds, how many batches were drawn, and when the first one was."""
        until, batches, first = time.time() + seconds, 0, None
        while first is None or time.time() < until:
            batch = replay.sample()
            first, batches = first or time.time(), batches + 1
            self.agent.learn(batch)
            replay.update_tensordict_priority(batch)
        return self.agent.state_dict(), batches, first

    def differing(self, replay, rows, sums):
        return [row for row, sum_, found in zip(rows, sums, checksums(replay[rows]), strict=True) if sum_ != found]


class Run:
    def __init__(self, options):
        self.options, self.policy, self.batches = options, Agent().state_dict(), 0
        self.returns, self.rows, self.sums = [], [], []
        self.cluster = Cluster(initialize_head=True, head_node_args={**NODE, **HEAD, "resources": {"first": 1}})
        ray.init(address=self.cluster.address, logging_level="error", log_to_driver=False)
        self.second = self.cluster.add_node(**NODE, resources={"second": 1})
        folder = str((options.dir / "replay").absolute())
        self.replay = engram.RayReplayBuffer(
            replay_buffer_cls=engram.TensorDictReplayBuffer,
            storage=partial(engram.LazyMemmapStorage, CAPACITY, scratch_dir=folder, lanes=options.actors),
            sampler=partial(engram.PrioritizedSampler, CAPACITY, 0.6, 0.4),
            batch_size=BATCH,
            remote_config=SECOND,
            name=NAME,
        )
        self.server, self.learner = ray.get_actor(NAME, NAMESPACE), ray.remote(**SECOND)(Learner).remote(self.policy)
        self.players = [ray.remote(**FIRST)(Player).remote(lane, lane) for lane in range(options.actors)]

    def say(self, text):
        print(f"[{time.time() - self.options.started:5.1f} s] {text}", file=sys.__stdout__, flush=True)

    def play(self, n=50):
        return [player.play.remote(self.replay, self.policy, len(self.rows), n) for player in self.players]

    def count(self, playing):
        """Wait for actors, while the learner learns. Returns how many batches it drew."""
        before = self.batches
        while len(ray.wait(playing, num_returns=len(playing), timeout=0)[0]) < len(playing):
            if self.learner is None or not self.rows:
                time.sleep(0.2)
            else:
                self.policy, batches, _ = ray.get(self.learner.learn.remote(self.replay, 0.5))
                self.batches += batches
        for row, checksum, episode_return in [made for played in ray.get(playing) for made in played]:
            self.rows.append(row)
            self.sums.append(checksum)
            self.returns += [] if episode_return is None else [episode_return]
        return self.batches - before

    def train(self, steps):
        shown = time.time()
        until = min(len(self.rows) + steps, CAPACITY // 2)  # none of the rows that are compared is overwritten
        while len(self.rows) < until:
            self.count(self.play())
            if time.time() - shown > 2:
                self.say(progress(len(self.rows), self.returns, f"{self.batches * BATCH:,} samples"))
                shown = time.time()

    def pids(self, *actors):
        return ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors])

    def kill_server(self):
        (pid,), began = self.pids(self.server), time.time()
        self.say(f"kill -9 {pid} (the server)")
        os.kill(pid, signal.SIGKILL)
        drawn = self.count(self.play(1))
        waited, (new,) = time.time() - began, self.pids(self.server)
        self.say(f"Ray has started a new one, {new}. Actors waited {waited:.1f} s, and go on with the same episodes.")
        self.say(f"Meanwhile the learner drew {drawn * BATCH:,} samples, from shared memory.")

    def kill_node(self):
        pids, began = self.pids(self.learner, self.server), time.time()
        self.say(f"kill -9 of node 2: Ray, the learner {pids[0]}, the server {pids[1]}")
        self.learner = None
        self.cluster.remove_node(self.second, allow_graceful=False)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ends with its node, a moment later
                os.kill(pid, signal.SIGKILL)
        playing = self.play(1)
        self.second = self.cluster.add_node(**NODE, resources={"second": 1})
        self.say("Node 2 is started again.")
        self.count(playing)
        waited, self.learner = time.time() - began, ray.remote(**SECOND)(Learner).remote(self.policy)
        self.policy, _, first = ray.get(self.learner.learn.remote(self.replay, 0.0))
        self.say(f"Actors waited {waited:.1f} s. A new learner draws {first - began:.1f} s after the kill.")
        wrong = ray.get(self.learner.differing.remote(self.replay, self.rows, self.sums))
        if wrong:
            raise RuntimeError(f"Rows {wrong[:8]} are not what the actors wrote.")
        self.say(f"All {len(self.rows):,} rows that were acknowledged are there, and whole.")

    def go(self):
        self.train(100)
        *players, learner, server = self.pids(*self.players, self.learner, self.server)
        self.say(f"Node 1: actors {', '.join(map(str, players))}, one lane each.")
        self.say(f"Node 2: learner {learner}, and the rows with their server {server}.")
        for deadly in (self.kill_server, self.kill_node, None):
            self.train(self.options.steps // 3)
            if deadly is not None:
                deadly()
        self.say(f"Mean return {mean_return(self.returns):.0f} after {len(self.rows):,} steps.")
        self.replay.close()
        self.say(f"What Ray said: {self.options.dir / 'ray.log'}")
        self.say(f"Go on with the rows: engram.ReplayBuffer.open('{self.options.dir / 'replay'}')")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, choices=(2,), default=2)
    parser.add_argument("--steps", type=int, default=6_000, help="of all actors together, about")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=Path(f"engram-demo/nodes-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    options.dir.mkdir(parents=True)
    options.started = time.time()
    with tempfile.TemporaryDirectory(prefix="engram-") as scratch, (options.dir / "ray.log").open("w") as log:
        os.dup2(log.fileno(), 2)  # what Ray prints is long, and it has no setting for all of it
        sys.stdout = sys.stderr = log
        os.environ |= {"RAY_TMPDIR": scratch, "RAY_USAGE_STATS_ENABLED": "0"}  # nothing of it stays, or is sent
        run = Run(options)
        try:
            run.go()
        finally:
            ray.shutdown()
            run.cluster.shutdown()
