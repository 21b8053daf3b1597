"""Training that is killed and continues exactly where it was, from checkpoints of model and replay that belong together.

A small network learns the way along a cliff (the Blind Cliffwalk of Schaul et al., 2016) from a prioritized replay. Every
200 steps, the training writes a file of the model, and then, in the background, a checkpoint of the replay that names this
file. The program runs the training in a separate process, kills it with SIGKILL, runs it again, and compares the result with
an undisturbed training: network, rows, priorities and the next batch are the same, bit for bit.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
import uuid
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import multiprocessing, nn

from engram import Checkpointer, LazyTensorStorage, SaveHandle, TensorDictPrioritizedReplayBuffer

CELLS, ROWS, BATCH = 6, 10_000, 32
STEPS, LEARN_FROM, SAVE_EVERY, KILL_AT = 1_200, 100, 200, 850
RATE, GAMMA, EXPLORE = 1e-2, 0.9, 0.5
LEADS_ON = torch.arange(CELLS) % 2  # the right action of each cell
ONE_HOT = torch.eye(CELLS)  # its input to the network
warnings.filterwarnings("ignore", "restore: ")  # about the interrupted save; the report has it as well


class Training:
    """The state of the training. A ``Checkpointer`` saves ``replay``; everything else is in a file of the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.random = torch.Generator().manual_seed(1)  # of the actions
        self.cell = self.step = 0
        torch.manual_seed(2)
        self.network = nn.Sequential(nn.Linear(CELLS, 32), nn.ReLU(), nn.Linear(32, 2))
        self.optimizer = torch.optim.Adam(self.network.parameters(), RATE)
        draws = torch.Generator().manual_seed(3)  # saved with the replay
        self.replay = TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=LazyTensorStorage(ROWS), batch_size=BATCH, generator=draws
        )
        self.checkpoints = Checkpointer(folder / "replay", self.replay, keep=2)
        self.saving: SaveHandle | None = None

    def save(self) -> None:
        """Save the model first, so that every replay that can be restored names a complete model file."""
        if self.saving is not None:
            self.saving.wait()  # raises if the last save failed; usually it ended long ago
        name = f"model-{self.step}-{uuid.uuid4().hex[:8]}.pt"
        with (self.folder / name).open("xb") as file:
            networks = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**networks, "random": self.random.get_state(), "cell": self.cell, "step": self.step}, file)
            file.flush()
            os.fsync(file.fileno())
        self.saving = self.checkpoints.save(self.step, user={"model": name}, wait=False)
        oldest = min((entry.step for entry in self.checkpoints.list()), default=0)
        for path in self.folder.glob("model-*.pt"):
            if int(path.stem.split("-")[1]) < oldest:
                path.unlink()

    def restore(self) -> bool:
        """Restore the replay and the model that it names; False if there is no checkpoint."""
        try:  # "exact", because the model's file has the state of the environment; the default starts environments again
            report = self.checkpoints.restore(resume="exact")
        except FileNotFoundError:
            return False
        state = torch.load(self.folder / report.user["model"], weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"])
        self.cell, self.step = state["cell"], state["step"]
        print(f"restored the replay of step {report.step}, {report.steps} rows, and the model of step {self.step}")
        return True

    def run(self, said: Connection) -> str:
        """Restore, train to the end, and return a digest of network, rows, priorities and the next batch."""
        if not self.restore():
            print("found no checkpoint: a new training")
        while self.step < STEPS:
            self.walk()
            if self.step >= LEARN_FROM:
                self.learn()
            self.step += 1
            if self.step % SAVE_EVERY == 0:
                self.save()
            said.send(self.step)
        if self.saving is not None:
            self.saving.wait()
        rows, batch = self.replay[:], self.replay.sample()
        tensors = [*self.network.parameters(), self.replay.sampler.state_dict()["leaves"]]
        tensors += [rows[key] for key in ("cell", "action", "reward", "done")]
        tensors += [batch[key] for key in ("index", "priority_weight")]
        return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()

    def walk(self) -> None:
        """Take one step. One action leads on, the other over the edge; only the end of the path has a reward."""
        action = int(torch.randint(2, (), generator=self.random))
        if float(torch.rand((), generator=self.random)) > EXPLORE:
            action = int(self.network(ONE_HOT[self.cell]).argmax())
        safe = action == int(LEADS_ON[self.cell])
        end = not safe or self.cell == CELLS - 1
        row = {"cell": self.cell, "action": action, "reward": float(safe and end), "done": end}
        self.replay.add(TensorDict({name: torch.tensor(value) for name, value in row.items()}))
        self.cell = 0 if end else self.cell + 1

    def learn(self) -> None:
        batch = self.replay.sample()
        cell, action = batch["cell"], batch["action"]
        following = self.network(ONE_HOT[(cell + 1) % CELLS]).max(1).values.detach()
        target = batch["reward"] + GAMMA * following * ~batch["done"]
        error = target - self.network(ONE_HOT[cell])[torch.arange(BATCH), action]
        self.optimizer.zero_grad()
        (batch["priority_weight"] * error**2).mean().backward()
        self.optimizer.step()
        batch["td_error"] = error.detach().abs()
        self.replay.update_tensordict_priority(batch)


def work(folder: Path, said: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = "0"  # draws follow from the seed and the rank; without one each process draws its own
    said.send(Training(folder).run(said))


def train(folder: Path, *, kill_at: int | None = None) -> str:
    """Run the training in a separate process; its digest, or ``""`` if it was killed at step ``kill_at``."""
    context = multiprocessing.get_context("fork")  # starts at once; "spawn" works, too
    heard, said = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(folder, said))
    process.start()
    said.close()
    message: int | str = ""
    with contextlib.suppress(EOFError):  # the process has ended
        while message != kill_at:
            message = heard.recv()
        process.kill()  # SIGKILL: it cannot clean up, and need not
        print(f"killed after step {message} of {STEPS}")
    process.join()
    return "" if message == kill_at else str(message)


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the processes may write to one pipe
    with tempfile.TemporaryDirectory() as name:
        train(Path(name, "a"), kill_at=KILL_AT)
        killed = train(Path(name, "a"))
        undisturbed = train(Path(name, "b"))
    assert killed == undisturbed, "the replay or the model differs"
    print("network, rows, priorities and the next batch are as in a training that was never killed: True")


if __name__ == "__main__":
    main()
