"""The learner. It starts the actors: each plays CartPole and writes its steps into its own lane of the shared buffer.

A pipe connects each actor to the learner, which sends how many steps the actor may take; the actor sends each row after ``add`` has
returned. There is no lock between processes, so one may be killed at any moment. Where one end of a pipe closes, the other one ends.
"""

import contextlib
import os
import signal
import time
from multiprocessing.connection import wait

import torch
from torch import multiprocessing

import engram
from examples.demo.agent import BATCH, LEARN_FROM, SOLVED, Agent, checksums, mean_return, progress

#: Actors are forked from a process that has imported this module, so a new one starts in a fraction of a second.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


def new_replay(folder, lanes):
    storage = engram.LazyMemmapStorage(20_000 // lanes * lanes, scratch_dir=folder, lanes=lanes)
    return engram.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)


def act(channel, replay, agent, lane, seed):
    """What an actor does. The learner trains its agent meanwhile."""
    torch.set_num_threads(1)
    steps = agent.play(seed, lambda: replay.write_count)
    with contextlib.closing(replay), contextlib.suppress(EOFError, ConnectionError):
        while True:
            for _ in range(channel.recv()):
                row, episode_return = next(steps)
                began = time.perf_counter()
                at = replay.add(row, lane=lane)
                channel.send((at, *checksums(row.unsqueeze(0)), time.perf_counter() - began, episode_return))


class Actor:
    """An actor, as the learner sees it."""

    def __init__(self, replay, agent, lane, seed):
        #: Steps that were granted and are not taken yet. Row, checksum, seconds of the write, return of the episode if it ended there.
        self.lane, self.owed, self.acknowledged = lane, 0, []
        self.channel, theirs = multiprocessing.Pipe()
        self.process = context.Process(target=act, args=(theirs, replay, agent, lane, seed), daemon=True)
        self.process.start()
        theirs.close()


def verify(replay, dead):
    """Compare the checksum of each row that a dead actor acknowledged. Returns how many that were."""
    # In a full lane, the row begun last may have replaced the oldest.
    expected = dead.acknowledged[1 - replay.storage.max_size // replay.lanes :]
    found = checksums(replay[[row for row, *_ in expected]]) if expected else []
    wrong = [row for (row, checksum, *_), other in zip(expected, found, strict=True) if checksum != other]
    if wrong:
        raise RuntimeError(f"Rows {wrong[:8]} are not what process {dead.process.pid} wrote.")
    return len(expected)


class Learner:
    def __init__(self, options):
        torch.set_num_threads(1)  # batches are so small that more threads make them slower
        torch.manual_seed(options.seed)
        self.options, self.agent, self.returns, self.kills = options, Agent(), [], []
        self.resumed, store = (options.dir / "checkpoints").exists(), options.dir / "replay"
        self.replay = engram.ReplayBuffer.open(store) if self.resumed else new_replay(store, options.actors)
        self.checkpoints = engram.Checkpointer(options.dir / "checkpoints", self.replay, keep=2)
        if self.resumed:
            newest = self.checkpoints.list()[0]
            agent, self.returns, self.kills = torch.load(options.dir / f"agent-{newest.step}.pt", weights_only=True)
            self.agent.load_state_dict(agent)
            self.kills.append(len(self.returns))
            self.say(f"A new learner opens the store: {len(self.replay):,} rows are there. Network of {newest.name}.")
        self.updates = max(0, self.replay.write_count - LEARN_FROM) // 2
        self.actors = [self.actor(lane) for lane in range(options.actors)]
        pids = ", ".join(str(actor.process.pid) for actor in self.actors)
        self.say(f"Learner {os.getpid()}; actors {pids}, one lane each.")

    def actor(self, lane):
        return Actor(self.replay, self.agent, lane, 1_000_003 * self.options.seed + self.replay.write_count + lane)

    def say(self, text):
        print(f"[{time.time() - self.options.started:5.1f} s] {text}", flush=True)

    def save(self):
        """Begin to save a checkpoint. The agent is saved before."""
        step = self.replay.write_count
        torch.save((self.agent.state_dict(), self.returns, self.kills), self.options.dir / f"agent-{step}.pt")
        return self.checkpoints.save(step, wait=False)

    def train(self, parent):
        """Train until the task is solved or all steps are taken; False if ``parent`` was closed before."""
        deaths, shown, updates, most = self.deaths(), time.monotonic(), self.updates, self.options.steps
        while not (self.resumed and (mean_return(self.returns) > SOLVED or self.replay.write_count >= most)):
            for actor in self.actors:
                steps = min(8, most - self.replay.write_count - sum(other.owed for other in self.actors))
                if actor.owed == 0 and steps > 0:
                    actor.owed = steps
                    with contextlib.suppress(OSError):  # it was just killed
                        actor.channel.send(steps)
            ready = wait([parent, *(actor.channel for actor in self.actors)], timeout=0.1)
            if parent in ready:  # Ctrl-C, or the process that started this one is dead
                return False
            for actor in [actor for actor in self.actors if actor.channel in ready]:
                self.receive(actor)
            while self.replay.write_count >= LEARN_FROM + 2 * self.updates:
                batch = self.replay.sample()
                self.agent.learn(batch)
                self.replay.update_tensordict_priority(batch)
                self.updates += 1
            next(deaths, None)
            if (elapsed := time.monotonic() - shown) > 2:
                rates = f"{(self.updates - updates) * BATCH / elapsed:8,.0f} samples/s"
                self.say(progress(self.replay.write_count, self.returns, rates))
                shown, updates = time.monotonic(), self.updates
        return True

    def receive(self, actor):
        """Count a row of an actor, or replace the actor if it is dead and all of its rows were counted."""
        try:
            actor.acknowledged.append(actor.channel.recv())
        except (EOFError, OSError):
            actor.process.join()
            if (code := actor.process.exitcode) != -signal.SIGKILL:
                raise RuntimeError(f"The actor of lane {actor.lane} failed with exit code {code}.") from None
            self.actors[actor.lane] = new = self.actor(actor.lane)
            self.say(f"Actor {actor.process.pid} is dead. All {verify(self.replay, actor):,} rows it wrote are intact.")
            self.say(f"Actor {new.process.pid} takes over its lane.")
        else:
            actor.owed -= 1
            if actor.acknowledged[-1][-1] is not None:
                self.returns.append(actor.acknowledged[-1][-1])

    def deaths(self):
        """Save a checkpoint, kill an actor, kill this process. Yields while it waits; the second learner has none of this."""
        total = self.options.steps
        while self.resumed or (mean_return(self.returns) < SOLVED / 2 and self.replay.write_count < total // 2):
            yield
        handle = self.save()
        while not handle.done:
            yield
        saved = handle.wait()
        self.say(f"{saved.name}: {saved.steps:,} rows saved; writers waited {1e3 * saved.paused_s:.1f} ms.")
        dead, before = self.actors[0], self.replay.write_count
        self.say(f"kill -9 {dead.process.pid} (an actor)")
        self.kills.append(len(self.returns))
        dead.process.kill()
        while self.actors[0] is dead or not (self.actors[0].acknowledged or self.replay.write_count >= total):
            yield
        rows = self.replay.write_count - before
        longest = max((seconds for it in self.actors[1:] for _, _, seconds, _ in it.acknowledged[-rows:]), default=0)
        self.say(f"Meanwhile {rows} rows were written; the longest write took {1e3 * longest:.1f} ms.")
        self.say(f"kill -9 {os.getpid()} (the learner)")
        os.kill(os.getpid(), signal.SIGKILL)

    def report(self):
        """Save a last checkpoint, draw the returns with the kills, and say what can be done with the run."""
        from matplotlib.figure import Figure  # takes a second

        folder, saved, figure = self.options.dir, self.save().wait(), Figure(figsize=(8, 3.5), layout="constrained")
        self.say(f"{'Solved' if mean_return(self.returns) > SOLVED else 'Not solved'} after {saved.steps:,} steps.")
        axes = figure.subplots()
        axes.plot(self.returns, color="0.75")
        axes.plot([mean_return(self.returns[: end + 1]) for end in range(len(self.returns))])
        axes.vlines(self.kills, 0, max(self.returns, default=1), "tab:red", "dashed")
        axes.set(xlabel="episode", ylabel="return, and its mean over 20", title="DQN on CartPole-v1, with both kills")
        figure.savefig(folder / "demo.png", dpi=120)
        print(f"Learning curve:          {folder / 'demo.png'}")
        print(f"Look at the checkpoints: engram inspect {folder / 'checkpoints'}")
        print(f"Go on with the rows:     engram.ReplayBuffer.open('{folder / 'replay'}')")

    def close(self):
        for actor in self.actors:
            actor.channel.close()
            actor.process.join(60)
            actor.process.kill()
        self.replay.close()


def learn(parent, options):
    with contextlib.closing(Learner(options)) as learner:
        if learner.train(parent):
            learner.report()
        elif learner.replay.storage.initialized:
            print(f"\nInterrupted. The store is whole: engram.ReplayBuffer.open('{options.dir / 'replay'}')")
