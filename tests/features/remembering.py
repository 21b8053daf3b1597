"""What remembers: samplers that hand out once, tables of pieces, removals and new fields."""

import torch

from engram import ConsumingSampler, NoSampleable, SliceSampler, StreamingSliceSampler
from tests.features.base import LEAST, Feature, Known, until
from tests.features.rows import by_trajectory, check_whole, steps, whos_in, whos_of


class Consumed(Feature):
    """Each step is drawn once, by one of all processes. Used ones are written over."""

    batch_size = 2
    forgets = frozenset({"moved"})
    common = True

    def arguments(self, most=1):
        return {"sampler": ConsumingSampler(most)}

    def broken(self):
        return self.arguments(2)

    def stored(self, rb, known):
        assert known.whos - known.drawn <= whos_of(rb) <= known.whos

    def draw(self, rb, known, whos):
        try:
            batch = rb.sample()
        except NoSampleable:
            return False
        self.sound(batch, whos)
        drawn = batch["who"].tolist()
        assert len(set(drawn)) == len(drawn)
        assert not known.drawn & set(drawn), "a step is drawn twice"
        known.drawn.update(drawn)
        return True

    def check(self, rb, known):
        while self.draw(rb, known, known.whos):
            pass
        assert known.drawn == known.whos


class Streams(Feature):
    """Complete windows come first, each once; then any."""

    batch_size = 2
    forgets = frozenset({"moved", "reopened"})

    def arguments(self):
        return {"sampler": StreamingSliceSampler(slice_len=2, traj_key="episode")}

    def broken(self):
        return {"sampler": SliceSampler(slice_len=2, traj_key="episode")}

    def sound(self, batch, whos):
        super().sound(batch, whos)
        first, second = batch["who"].tolist()
        assert second == first + 1

    def draw(self, rb, known, whos):
        """Beside a writer a window that is still to come may be drawn as one of any."""
        batch = rb.sample()
        self.sound(batch, whos)
        known.drawn.add(tuple(batch["who"].tolist()))
        known.exact = known.exact and known.whos == whos

    def check(self, rb, known):
        every = {
            tuple(own[at : at + 2]) for own in by_trajectory(known.whos).values() for at in range(0, len(own) - 1, 2)
        }
        new = every - known.drawn
        drawn = [tuple(rb.sample()["who"].tolist()) for _ in (new if known.exact else every)]
        if known.exact:
            assert sorted(drawn) == sorted(new)
        assert new <= set(drawn)
        for _ in range(LEAST):
            self.sound(rb.sample(), known.whos)
        known.drawn, known.exact = every, True


class Fragments(Feature):
    """Trajectories take turns. A move to other ranks numbers those anew that ``episode`` names, and leaves other fields alone."""

    batch_size = 6

    def __init__(self, key, turn=1):
        self.key, self.turn = key, turn

    def arguments(self):
        return {"sampler": SliceSampler(slice_len=2, traj_key=self.key, step_key="step", fragmented=True)}

    def broken(self):
        return {"sampler": SliceSampler(slice_len=2, traj_key="same")}

    def play(self, rb, trajectories):
        every = torch.cat([steps(number) for number in trajectories])
        every = every[(every["step"] // self.turn).sort(stable=True).indices]
        rows = rb.extend(every)
        known = Known(whos_in(*trajectories), dict(zip(every["who"].tolist(), rows.tolist(), strict=True)))
        self.draw(rb, known, known.whos)
        return known

    def sound(self, batch, whos):
        super().sound(batch, whos)
        for first, second in batch["who"].reshape(-1, 2).tolist():
            assert second == first + 1

    def check(self, rb, known):
        every, drawn = {(who, who + 1) for who in known.whos if who + 1 in known.whos}, set()
        for _ in until(lambda: drawn >= every) if every else ():
            batch = rb.sample()
            self.sound(batch, known.whos)
            drawn.update(map(tuple, batch["who"].reshape(-1, 2).tolist()))
        assert drawn == every


class Removed(Feature):
    """A whole trajectory is removed, and a step that others follow."""

    def play(self, rb, trajectories):
        known = super().play(rb, trajectories)
        first, second, *_ = trajectories
        gone = whos_in(first) | {100 * second + 2}
        assert rb.remove(torch.tensor([known.rows[who] for who in gone])) == len(gone)
        known.whos -= gone
        assert len(rb) == len(known.whos)
        return known


class Added(Feature):
    """Steps of even trajectories have a value in a new field, the others what it was filled with."""

    def play(self, rb, trajectories):
        known = super().play(rb, trajectories)
        rb.add_field(("next", "value"), torch.zeros(2), fill=-1.0)
        known.drawn = {who for who in known.whos if who // 100 % 2 == 0}
        for who in known.drawn:
            row = known.rows[who]
            rb[row] = rb[row].set(("next", "value"), torch.tensor([who, -who]).float())
        return known

    def spoil(self, rb, known):
        """Set a value that should be what the field was filled with."""
        row = known.rows[101]
        rb[row] = rb[row].set(("next", "value"), torch.zeros(2))

    def check(self, rb, known):
        rows = rb[:]
        self.check_values(rows, known)
        assert set(rows["who"].tolist()) == known.whos
        super().check(rb, known)
        for _ in range(LEAST):
            self.check_values(rb.sample(), known)

    def check_values(self, batch, known):
        check_whole(batch)
        for who, value in zip(batch["who"].tolist(), batch["next", "value"].tolist(), strict=True):
            assert value == ([who, -who] if who in known.drawn else [-1, -1])
