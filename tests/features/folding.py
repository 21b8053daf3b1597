"""TorchRL's ``MultiStepTransform``, which holds the newest steps of a stream back, and stores the others with sums of rewards."""

import os

from engram import RandomSampler
from tests.features.base import Feature
from tests.features.rows import length_of, whos_in

N = 2


class Folded(Feature):
    """Each step with the rewards of ``N`` steps and the observation behind them. Each process has a stream of its own."""

    def arguments(self, n=N):
        from torchrl.envs.transforms import MultiStepTransform

        return {"sampler": RandomSampler(), "transform": MultiStepTransform(n, 0.5)}

    def broken(self):
        return self.arguments(N + 1)

    def reopening(self):
        return {"transform": self.arguments()["transform"]}

    def write(self, rb, known, *trajectories):
        transform = rb.transform[0]
        held = [] if transform._buffer is None else transform._buffer["who"].tolist()
        if known.rows.setdefault("process", os.getpid()) != os.getpid():  # what came along belongs to the other stream
            known.rows["process"], known.order = os.getpid(), held
            transform._buffer, held = None, []
        for number in trajectories:
            rb.extend(self.data(number))
        self.stream(known, held, trajectories)

    def wrote(self, known, *trajectories):
        """In the other stream."""
        known.order = self.stream(known, known.order, trajectories)

    def stream(self, known, held, trajectories):
        """Know what is stored. Returns what is held back."""
        whos = [*held, *(who for number in trajectories for who in sorted(whos_in(number)))]
        known.whos |= set(whos[:-N])
        return whos[-N:]

    def draw(self, rb, known, whos):
        """The other stream may write what it has held back."""
        super().draw(rb, known, whos | set(known.order))

    def sound(self, batch, whos):
        assert set(batch["who"].tolist()) <= whos
        rewards = batch["next", "reward"].squeeze(-1).tolist()
        behind = batch["next", "obs"].squeeze(-1).tolist()
        for who, reward, after in zip(batch["who"].tolist(), rewards, behind, strict=True):
            step, n = who % 100, length_of(who // 100)
            assert reward == step + 0.5 * (step + 1) * (step + 1 < n)
            assert after == who + min(N, n - step)
