"""What is asked of a feature, whatever became of the store of its buffer."""

from dataclasses import dataclass, field

import torch

from engram import RandomSampler, TensorDictReplayBuffer
from tests.features.rows import check_whole, steps, whos_in, whos_of
from tests.stress import size

#: At least so many batches are drawn by a check, and so many more until all that should be drawn was: some tens.
#: That one of those is not in ``MOST`` has a chance below 1e-10.
LEAST, MOST = size(20, 1000), size(1000, 4000)
CAPACITY = 128


@dataclass
class Known:
    """What a model of the buffer remembers."""

    #: Who is stored.
    whos: set
    #: The row of each step that this process has written.
    rows: dict = field(default_factory=dict)
    #: Those stored that were written last, the newest at the end, where a feature must remember it.
    order: list = field(default_factory=list)
    #: What was drawn, where a feature must remember it.
    drawn: set = field(default_factory=set)
    #: Whether ``drawn`` is all that was drawn; else it is a part of that.
    exact: bool = True


def until(enough, most=MOST):
    """Goes round until that holds."""
    for number in range(most):
        if number >= LEAST and enough():
            return
        yield number


class Feature:
    """None: rows, drawn alike."""

    batch_size = 8
    capacity = CAPACITY
    cls = TensorDictReplayBuffer
    #: After which of ``reopened`` and ``moved`` what was drawn is forgotten.
    forgets = frozenset()
    #: Whether all processes that share a store draw from one account.
    common = False

    def arguments(self):
        """Of the buffer, but for its storage."""
        return {"sampler": RandomSampler()}

    def broken(self):
        """Arguments that make a buffer which does nearly what the feature promises: the check must see it. None: :meth:`spoil`."""
        return

    def spoil(self, rb, known):
        """Do to a buffer what the feature must not do. By default a step is lost."""
        rb.remove(known.rows[max(known.whos)])

    def buffer(self, storage, *, seed=0, arguments=None):
        return self.cls(
            storage=storage,
            batch_size=self.batch_size,
            generator=torch.Generator().manual_seed(seed),
            **(self.arguments() if arguments is None else arguments),
        )

    def write(self, rb, known, *trajectories):
        """Write whole trajectories."""
        for number in trajectories:
            data = self.data(number)
            rows = rb.extend(data)
            known.rows.update(zip(data["who"].tolist(), rows.tolist(), strict=True))
        self.wrote(known, *trajectories)

    def data(self, number):
        """The steps of a trajectory, as they are written."""
        return steps(number)

    def wrote(self, known, *trajectories):
        """Know that somebody wrote them."""
        known.whos |= whos_in(*trajectories)

    def play(self, rb, trajectories):
        """Write, and use the feature a little. Returns what is known then."""
        known = Known(set())
        self.write(rb, known, *trajectories)
        self.draw(rb, known, known.whos)
        return known

    def stored(self, rb, known):
        """Exactly the steps that should be there are there."""
        assert whos_of(rb) == known.whos

    def reset(self, known, what):
        """What is known after this: ``moved`` to other ranks, or ``reopened``."""
        if what in self.forgets:
            known.drawn.clear()
        return known

    def sound(self, batch, whos):
        """A batch follows from these steps, of which some may not be written yet."""
        check_whole(batch)
        assert set(batch["who"].tolist()) <= whos

    def draw(self, rb, known, whos):
        """Draw a batch of steps that are among ``whos``, where another process may be writing them."""
        self.sound(rb.sample(), whos)

    def reopening(self):
        """What :meth:`ReplayBuffer.open` must be given, as the folder cannot note it: functions."""
        return {}

    def check(self, rb, known):
        """All that is drawn follows from the steps that are stored, and all that may be drawn is."""
        drawn = set()
        for _ in until(lambda: drawn >= known.whos):
            batch = rb.sample()
            self.sound(batch, known.whos)
            drawn.update(batch["who"].tolist())
        assert drawn == known.whos
