"""``engram demo --nodes 2``: two nodes of a Ray cluster on this machine, of which one is killed with the rows on it.

Actors play on the first node, where this process is, too. The second node has the rows, their server, and the learner, which
shares their memory. This process hands out steps and collects what was acknowledged; rows never pass through it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Generator, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

import engram
from engram.buffer.on_ray import NAMESPACE
from engram.demo.learner import BATCH, LEARN_FROM, SOLVED, WINDOW
from engram.demo.remote import Learned, Learner, Mark, Played, Player, Throughput
from engram.demo.run import Settings, tell

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NAME = "demo"
#: Seconds between two policies of the learner.
ROUND_S = 0.5
#: Steps that an actor may take at a time.
AT_ONCE = 50
#: Seconds before the first death at most, and after each return, unless steps run out.
FIRST_S, THEN_S = 15.0, 7.0
#: Rows of the store, of which the newest half are compared.
CAPACITY = 200_000
ON_FIRST = {"resources": {"actors": 0.001}, "num_cpus": 0}
ON_SECOND = {"resources": {"learner": 0.001}, "num_cpus": 0}
#: Ray says after 5 seconds that a node is dead, not after 15. What the demo does not need is not started.
HEAD = {
    "_system_config": {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1_000},
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


class Nodes:
    """Both nodes, and the processes of the demo on them. The constructor starts them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.throughput = Throughput(BATCH)
        self.returns: list[float] = []
        self.acknowledged: list[list[tuple[int, int]]] = [
            [] for _ in range(settings.actors)
        ]  # rows and checksums, by lane
        self.granted = 0  # steps
        self.told = False  # both deaths are over
        self.policy: ray.ObjectRef | None = None
        self.playing: dict[ray.ObjectRef, tuple[int, int]] = {}  # lanes, and steps that were granted
        self.learning: ray.ObjectRef | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray's own start
            self.cluster = Cluster(initialize_head=True, head_node_args={**NODE, **HEAD, "resources": {"actors": 1}})
            ray.init(address=self.cluster.address, logging_level="error", log_to_driver=False)
        self._start_second()
        self.say("Both nodes run. The server of the rows starts, then the learner and the actors.")
        self.replay = self._new_replay()
        self.server: ActorHandle = ray.get_actor(NAME, NAMESPACE)
        self.learner: ActorHandle | None = self._new_learner()
        self.players = [
            ray.remote(**ON_FIRST)(Player).remote(lane, 1_000_003 * settings.seed + lane)
            for lane in range(settings.actors)
        ]
        for actor in (self.learner, *self.players):
            actor.attach.remote(self.replay)

    def _start_second(self) -> None:
        self.second = self.cluster.add_node(**NODE, resources={"learner": 1})

    def _new_replay(self) -> engram.ReplayBuffer:
        lanes, folder = self.settings.actors, (self.settings.folder / "replay").absolute()
        capacity, prioritized = CAPACITY // lanes * lanes, self.settings.sampler == "prioritized"
        sampler = partial(engram.PrioritizedSampler, capacity, 0.6, 0.4) if prioritized else engram.RandomSampler
        return engram.RayReplayBuffer(
            replay_buffer_cls=engram.TensorDictReplayBuffer,
            storage=partial(engram.LazyMemmapStorage, capacity, scratch_dir=str(folder), lanes=lanes),
            sampler=sampler,
            batch_size=BATCH,
            remote_config=ON_SECOND,
            name=NAME,
        )

    def _new_learner(self) -> ActorHandle:
        return ray.remote(**ON_SECOND)(Learner).remote(self.policy, self.settings.seed)

    @property
    def now(self) -> float:
        """Seconds since the demo started."""
        return time.time() - self.settings.started

    def say(self, text: str, color: str | None = None) -> None:
        """Print a line with the time since the demo started."""
        self.settings.say(text, color)

    @property
    def steps(self) -> int:
        """Rows that were acknowledged."""
        return sum(map(len, self.acknowledged))

    @property
    def mean_return(self) -> float:
        """Mean return of the last 20 episodes; 0 before there are 20."""
        return sum(self.returns[-WINDOW:]) / WINDOW if len(self.returns) >= WINDOW else 0.0

    # ---- training --------------------------------------------------------------------------------------------------------

    def train(self, parent: Connection) -> bool:
        """Train until both deaths are over; False if ``parent`` was closed before."""
        events, shown, rows, batches = self._events(), self.now, 0, 0
        while not self.told:
            if parent.poll():  # Ctrl-C, or the command that started this process is dead
                return False
            self._ask()
            self._receive()
            next(events, None)
            written, drawn, elapsed = self.steps, len(self.throughput.batches), self.now - shown
            if written and elapsed > (2 if (written, drawn) != (rows, batches) else 10):
                rates = (
                    f"{(written - rows) / elapsed:5,.0f} rows/s {(drawn - batches) * BATCH / elapsed:8,.0f} samples/s"
                )
                self.settings.say_progress(written, self.mean_return, SOLVED, rates)
                shown, rows, batches = self.now, written, drawn
        return True

    def _ask(self) -> None:
        """Let actors and the learner that have nothing to do go on."""
        busy = {lane for lane, _ in self.playing.values()}
        for lane in set(range(len(self.players))) - busy:
            steps = min(AT_ONCE, self.settings.steps - self.granted)
            if steps > 0:
                self.granted += steps
                self.playing[self.players[lane].play.remote(self.policy, self.steps, steps)] = lane, steps
        if (
            self.learning is None
            and self.learner is not None
            and self.steps >= min(LEARN_FROM, self.settings.steps // 4 + 1)
        ):
            self.learning = self.learner.learn.remote(ROUND_S)

    def _receive(self) -> None:
        """Count what was done, or wait a moment for it."""
        under_way = [*self.playing, *([] if self.learning is None else [self.learning])]
        done, _ = ray.wait(under_way, timeout=0.2) if under_way else ([], [])
        for one in done:
            if one in self.playing:
                self._played(*self.playing.pop(one), ray.get(one))
            else:
                self._learned(one)

    def _played(self, lane: int, granted: int, played: Played) -> None:
        self.granted -= granted - len(played.rows)
        self.acknowledged[lane] += zip(played.rows, played.checksums, strict=True)
        self.throughput.rows += [at - self.settings.started for at in played.times]
        self.returns += played.returns

    def _learned(self, round_: ray.ObjectRef) -> None:
        self.learning = None
        try:
            learned: Learned = ray.get(round_)
        except RayError:
            if self.learner is not None:  # it was not killed
                raise
            return
        self.policy = ray.put(learned.policy)
        self.throughput.batches += [at - self.settings.started for at in learned.times]

    # ---- deaths ----------------------------------------------------------------------------------------------------------

    def _events(self) -> Iterator[None]:
        """Kill the server, then the node, and see what is there. Yields while it waits."""
        yield from self._started()
        total, until = self.settings.steps, self.now + FIRST_S
        while self.policy is None or (self.mean_return < SOLVED / 2 and self.steps < total // 2 and self.now < until):
            yield
        yield from self._kill_server()
        yield from self._calm(3 * total // 4)
        learner = yield from self._kill_second()
        self._verify(learner)
        yield from self._calm(total)
        self.told = True

    def _started(self) -> Iterator[None]:
        processes = [_pid(actor) for actor in (*self.players, self.learner, self.server)]
        while len(ray.wait(processes, num_returns=len(processes), timeout=0)[0]) < len(processes):
            yield
        *players, learner, server = ray.get(processes)
        self.say(f"Node 1: actors {', '.join(map(str, players))}, one lane each.")
        self.say(f"Node 2: learner {learner}, and the rows with their server {server}.")

    def _calm(self, steps: int) -> Iterator[None]:
        """Let some seconds pass, or that many steps be taken."""
        until = self.now + THEN_S
        while self.now < until and self.steps < steps:
            yield

    def _kill_server(self) -> Iterator[None]:
        pid: int = ray.get(_pid(self.server))
        killed = self._mark(f"kill -9 {pid} (the server)", "server killed", fatal=True)
        os.kill(pid, signal.SIGKILL)
        new = yield from self._returned()
        pause, drawn = self._pause(killed)
        self.say(
            f"Ray has started a new one, {new}. Actors waited {pause:.1f} s, and go on with the same episodes.", "green"
        )
        self.say(f"Meanwhile the learner drew {drawn:,} samples, from shared memory.")

    def _kill_second(self) -> Generator[None, None, ActorHandle]:
        """Returns the new learner."""
        pids: list[int] = ray.get([_pid(self.learner), _pid(self.server)])
        killed = self._mark(
            f"kill -9 of node 2: Ray, the learner {pids[0]}, the server {pids[1]}", "node 2 killed", fatal=True
        )
        dead, self.learner = self.learner, None
        self.cluster.remove_node(self.second, allow_graceful=False)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ends with its node, a moment later
                os.kill(pid, signal.SIGKILL)
        while self.learning is not None:
            yield
        drawn = len(self.throughput.batches)
        del dead
        self._start_second()
        self._mark("Node 2 is started again.", "node 2 starts", fatal=False)
        new = self._new_learner()
        yield from self._returned(new)
        while len(self.throughput.batches) == drawn:
            yield
        pause, _ = self._pause(killed)
        self.say(
            f"Actors waited {pause:.1f} s. A new learner draws {self.throughput.batches[drawn] - killed:.1f} s after the kill."
        )
        return new

    def _mark(self, text: str, short: str, *, fatal: bool) -> float:
        """Say that something happens now. The second of the run."""
        self.say(text, "red" if fatal else None)
        self.throughput.marks.append(Mark(self.now, short, fatal))
        return self.now

    def _returned(self, learner: ActorHandle | None = None) -> Generator[None, None, int]:
        """Wait for the server, and until each actor wrote since. A new learner begins meanwhile. Returns the server's process."""
        server = _pid(self.server)
        while not ray.wait([server], timeout=0)[0]:
            yield
        if learner is not None:  # it could not have opened the store before
            learner.attach.remote(self.replay)
            self.learner = learner
        written = list(map(len, self.acknowledged))
        while self.steps < self.settings.steps and any(map(int.__eq__, written, map(len, self.acknowledged))):
            yield
        pid: int = ray.get(server)
        return pid

    def _pause(self, since: float) -> tuple[float, int]:
        """The longest time without a row since a second of the run, and the samples drawn in it."""
        times = np.sort([since, *(at for at in self.throughput.rows if at > since)])
        if len(times) == 1:
            return 0.0, 0
        longest = int(np.diff(times).argmax())
        first, last = times[longest : longest + 2]
        return last - first, BATCH * sum(first < at < last for at in self.throughput.batches)

    def _verify(self, learner: ActorHandle) -> None:
        """Compare the checksums of acknowledged rows, of the newest half of what a lane can have.

        Raises:
            RuntimeError: a row is not what the actor wrote. RowError: a row is missing.
        """
        newest = CAPACITY // len(self.players) // 2
        rows, sums = zip(*(pair for lane in self.acknowledged for pair in lane[-newest:]), strict=True)
        wrong = ray.get(learner.differing.remote(list(rows), list(sums)))
        if wrong:
            raise RuntimeError(f"Rows {wrong[:8]} are not what the actors wrote.")
        which = "All" if len(rows) == self.steps else "The newest"
        self.say(f"{which} {len(rows):,} rows that were acknowledged are there, and whole.", "green")

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Plot the throughput, and say what can be done with the run."""
        folder = self.settings.folder
        self.say(f"Mean return {self.mean_return:.0f} after {self.steps:,} steps.")
        self.throughput.plot(folder / "nodes.png")
        tell(f"Throughput:          {folder / 'nodes.png'}")
        tell(f"What Ray said:       {folder / 'ray.log'}")
        tell(f"Look at the store:   engram inspect {folder / 'replay'}")
        tell(f"Go on with the rows: engram.ReplayBuffer.open({str(folder / 'replay')!r})")

    def close(self) -> None:
        """End all processes."""
        self.replay.close()
        ray.shutdown()
        self.cluster.shutdown()


def _pid(actor: ActorHandle) -> ray.ObjectRef:
    """The number of its process."""
    return actor.__ray_call__.remote(lambda _: os.getpid())


@contextlib.contextmanager
def _aside(log: Path) -> Iterator[None]:
    """Let what Ray prints go to a file: it is long, and Ray has no setting for all of it. ``tell`` goes on as before."""
    terminal = os.dup(2)
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        os.dup2(file.fileno(), 2)  # for what is not Python's
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def train(parent: Connection, settings: Settings) -> None:
    """What the process of a run does. It stops when ``parent`` is closed."""
    with tempfile.TemporaryDirectory(prefix="engram-") as scratch, _aside(settings.folder / "ray.log"):
        os.environ |= {"RAY_TMPDIR": scratch, "RAY_USAGE_STATS_ENABLED": "0"}  # nothing of it stays, or is sent
        with contextlib.closing(Nodes(settings)) as nodes:
            if nodes.train(parent):
                nodes.report()
            elif (settings.folder / "replay").exists():
                store = str(settings.folder / "replay")
                tell(f"\nInterrupted. The store is whole: engram.ReplayBuffer.open({store!r})")
