"""From offline to online: an agent learns from recordings, then in a world that has changed since, with both in each batch.

A walk through two rooms. When the recordings were made, the door was at the top of the wall; now it is at the bottom. From recordings
alone the agent learns to walk into the wall. Then it acts, and half of each batch is new: the old rows still say how to walk within
a room. Their share falls to nothing, as the wall is not where they say. (Ball et al., 2023, "Efficient online reinforcement learning
with offline data", draw half of each batch from either.)
"""

import argparse
import copy
import logging
import tempfile

import torch
from torch import Tensor, nn

from engram import OfflineToOnlineReplayBuffer, ReplayBuffer

SIDE, WALL, TOP, BOTTOM = 8, 4, 7, 0  # the wall is a column with one door
WALKERS, LIMIT = 16, 40
GAMMA, RATE, FOLLOW, BATCH = 0.95, 2e-3, 0.02, 128
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Rooms:
    """Walkers that start in the left room, and end at the far corner of the right one."""

    def __init__(self, door: int) -> None:
        self.door = door
        self.place = self._start()
        self.steps = torch.zeros(WALKERS, dtype=torch.int64)
        self.reached = self.ended = 0

    def _start(self) -> Tensor:
        return torch.stack([torch.randint(WALL, (WALKERS,)), torch.randint(SIDE, (WALKERS,))], 1)

    def step(self, action: Tensor) -> dict[str, object]:
        """Rows ``[WALKERS]``. Those that end begin anew."""
        ahead = (self.place + MOVES[action]).clamp(0, SIDE - 1)
        shut = (ahead[:, 0] == WALL) & (ahead[:, 1] != self.door)
        ahead = torch.where(shut.unsqueeze(1), self.place, ahead)
        terminated = (ahead == SIDE - 1).all(1)
        self.steps = self.steps + 1
        end = terminated | (self.steps == LIMIT)
        rows = {"place": self.place, "action": action, "next": {"place": ahead, "terminated": terminated}}
        self.reached += int(terminated.sum())
        self.ended += int(end.sum())
        self.place = torch.where(end.unsqueeze(1), self._start(), ahead)
        self.steps = self.steps * ~end
        return rows


def at(place: Tensor) -> Tensor:
    """``[B, 64]``: a one where the walker is."""
    return nn.functional.one_hot(place[:, 0] * SIDE + place[:, 1], SIDE * SIDE).float()


def act(values: nn.Module, place: Tensor, explore: float) -> Tensor:
    with torch.no_grad():
        best = values(at(place)).argmax(1)
    return torch.where(torch.rand(WALKERS) < explore, torch.randint(4, (WALKERS,)), best)


def share_that_arrives(values: nn.Module) -> float:
    """Of walkers in the world as it is now."""
    rooms = Rooms(BOTTOM)
    for _ in range(4 * LIMIT):
        rooms.step(act(values, rooms.place, 0.05))
    return rooms.reached / rooms.ended


class Learner:
    """Values of moves; each step costs one."""

    def __init__(self) -> None:
        self.values = nn.Sequential(nn.Linear(SIDE * SIDE, 128), nn.ReLU(), nn.Linear(128, 4))
        self.slow = copy.deepcopy(self.values)
        self.optimizer = torch.optim.Adam(self.values.parameters(), lr=RATE)

    def update(self, batch: dict) -> None:
        with torch.no_grad():
            following = self.slow(at(batch["next"]["place"])).amax(1)
            goal = -1 + GAMMA * following * ~batch["next"]["terminated"]
        value = self.values(at(batch["place"])).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        self.optimizer.zero_grad()
        (value - goal).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for old, new in zip(self.slow.parameters(), self.values.parameters(), strict=True):
                old.lerp_(new, FOLLOW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2_000, help="of recordings, and of both")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.getLogger("engram").setLevel("WARNING")
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        with ReplayBuffer.open_or_create(folder, 32_000, lanes=WALKERS) as recordings:
            rooms = Rooms(TOP)
            for _ in range(2_000):
                recordings.extend(rooms.step(torch.randint(4, (WALKERS,))), lane="each")
        old = ReplayBuffer.open(folder, readonly=True)
        rb = OfflineToOnlineReplayBuffer(old, online_capacity=32_000, offline_fraction=0.5, batch_size=BATCH)
        learner = Learner()
        for _ in range(arguments.updates):
            learner.update(rb.sample())  # there are recordings only
        print(f"{len(old)} recordings: {100 * share_that_arrives(learner.values):.0f}% arrive", flush=True)
        rooms = Rooms(BOTTOM)
        for update in range(arguments.updates):
            rb.extend(rooms.step(act(learner.values, rooms.place, 0.2)))
            rb.anneal(update, arguments.updates // 2)
            if len(rb.online_buffer) >= BATCH:
                learner.update(rb.sample())
        said = f"{len(rb.online_buffer)} rows more, a share of {rb.offline_fraction:.0f} recordings in the end"
        print(f"{said}: {100 * share_that_arrives(learner.values):.0f}% arrive")
        rb.online_buffer.close()
        old.close()


if __name__ == "__main__":
    main()
